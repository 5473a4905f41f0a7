"""`moe-ep demo`: a Mixture-of-Experts language model reads real text, its experts over all ranks.

    seeded Qwen3-MoE model (16 experts, top-4) -> safetensors shards -> loaded back
    prompts: this project's README and Python's own documentation, as bytes
    every rank holds the model and reads its share of the prompts; the experts are one MoEEpLayer
    per model layer over all ranks; 64 tokens greedily, the same number of steps on every rank

and then asks three questions, whose answers are the exit code:

    same bits?      logits and tokens against a run of the same prompts on one rank
    mean, largest   logits against the untouched model, beside that model's own BF16 noise
                    (BF16 against FP32): mean ratio at most 1, largest at most 2

Each prompt is a batch of its own: what torch computes around the experts depends on the shape of
the batch, and must not depend on how many prompts a rank has.
"""

import argparse
import hashlib
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.config import Backend
from moe_ep.launch import bootstrap, torchrun
from moe_ep.launch.backends import BACKENDS, named_backend
from moe_ep.megakernel.problem import owned_experts

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 16, 4
# Bytes of each prompt: all differ, so that ranks hold different numbers of tokens.
PROMPT_LENGTHS = tuple(448 + 16 * i for i in range(8))
NEW_TOKENS = 64
MAX_MEAN_RATIO, MAX_LARGEST_RATIO = 1.0, 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), help="processes (default 2)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens per prompt")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there too")


def run(args: argparse.Namespace) -> int:
    """Start torchrun with `--ranks` workers, or be one of them if torchrun started this process."""
    if args.new_tokens < 1:
        raise MoEEpConfigError(f"--new-tokens must be at least 1, got {args.new_tokens}")
    if args.ranks != 1 and not torchrun.is_worker():
        return torchrun.start(args, args.ranks or 2)
    with bootstrap.session() as group:
        if args.ranks not in (None, group.num_ranks) or len(PROMPT_LENGTHS) % group.num_ranks:
            raise MoEEpConfigError(
                f"--ranks {args.ranks} with {group.num_ranks} processes; allowed: as many ranks "
                f"as processes, and a divisor of the {len(PROMPT_LENGTHS)} prompts"
            )
        report = run_on_rank(group, args.new_tokens, named_backend(args.backend))
    if report is None:  # not rank 0
        return 0
    show(report)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.failures() else 0


@dataclass
class Generation:
    """What one rank generated. L = bytes of a prompt, n = new tokens, V = 256."""

    tokens: list[torch.Tensor]  # per prompt int64 [n]
    logits: list[torch.Tensor]  # per prompt BF16 [L + n - 1, V], of every position seen
    seconds: float


@dataclass
class Deviation:
    """|a - b| of two runs' logits over the same tokens, and how many routings differ."""

    total: float = 0.0
    count: int = 0
    largest: float = 0.0
    flips: int = 0
    routings: int = 0

    def __add__(self, other: "Deviation") -> "Deviation":
        return Deviation(
            self.total + other.total,
            self.count + other.count,
            max(self.largest, other.largest),
            self.flips + other.flips,
            self.routings + other.routings,
        )

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass
class Report:
    """What the demo found; `failures` is empty when it passed."""

    backend: str
    device: str
    num_ranks: int
    prompt_bytes: int
    new_tokens: int
    tokens_per_s: float
    one_rank_tokens_per_s: float
    tokens_per_expert: list[int]  # over all ranks and layers
    owner_of_expert: list[int]
    difference: Deviation  # replaced model against the untouched one, both BF16
    noise: Deviation  # untouched model, BF16 against FP32
    logits_identical: bool
    tokens_identical: bool
    digest: str  # SHA-256 of logits and tokens; equal for any number of ranks

    @property
    def mean_ratio(self) -> float:
        return self.difference.mean / self.noise.mean

    @property
    def largest_ratio(self) -> float:
        return self.difference.largest / self.noise.largest

    def failures(self) -> list[str]:
        """Why the demo did not pass, one sentence each. A NaN anywhere fails too."""
        reasons = []
        if not self.logits_identical:
            reasons.append("logits differ from the run on one rank")
        if not self.tokens_identical:
            reasons.append("tokens differ from the run on one rank")
        if not self.mean_ratio <= MAX_MEAN_RATIO:
            reasons.append(f"mean ratio {self.mean_ratio:.2f} is above {MAX_MEAN_RATIO:g}")
        if not self.largest_ratio <= MAX_LARGEST_RATIO:
            reasons.append(f"largest ratio {self.largest_ratio:.2f} is above {MAX_LARGEST_RATIO:g}")
        return reasons


def run_on_rank(group: EpGroup, new_tokens: int, backend: Backend | str) -> Report | None:
    """The whole demo, called on every rank of `group`. Rank 0 gets the report, others None."""
    from rich.console import Console

    if group.device.type == "cpu":
        torch.set_num_threads(1)  # plain python would take all cores, torchrun takes one
    prompts = real_text_prompts()
    share = len(prompts) // group.num_ranks
    mine = prompts[group.rank * share : (group.rank + 1) * share]
    console = Console(stderr=True, quiet=group.rank != 0)
    with console.status("loading transformers") as status, tempfile.TemporaryDirectory() as folder:
        from transformers.utils import logging

        from moe_ep.integrations.transformers import replace_moe_layers

        logging.disable_progress_bar()

        def load(ranks: EpGroup) -> tuple[torch.nn.Module, str]:
            """The model with its experts on `ranks`, and what its first layer says of itself."""
            model = load_model(Path(folder), torch.bfloat16, group.device)
            capacity = max(PROMPT_LENGTHS) + new_tokens
            layers = replace_moe_layers(model, ranks, max_tokens_per_rank=capacity, backend=backend)
            return model, next(iter(layers.values())).explain()

        status.update("writing and loading the model")
        write_checkpoint(Path(folder))
        model, explanation = load(group)
        generate(model, [mine[0][:, :16]], 2)  # warm-up
        status.update(f"generating on {group.num_ranks} ranks")
        generation = generate(model, mine, new_tokens)
        status.update("comparing with the untouched model")
        exact = load_model(Path(folder), torch.float32, group.device)
        eager = load_model(Path(folder), torch.bfloat16, group.device)
        compared = compare(model, eager, exact, mine, generation.tokens)
        per_rank = gather((generation, *compared), group)
        if per_rank is None:
            return None
        # The other ranks are done; what follows has no collective.
        status.update("generating on one rank")
        alone_model, _ = load(EpGroup.single(group.device))
        generate(alone_model, [prompts[0][:, :16]], 2)
        alone = generate(alone_model, prompts, new_tokens)
    return summarize(per_rank, alone, explanation, group)


def write_checkpoint(folder: Path) -> None:
    """A small Qwen3-MoE model with seeded weights, as several safetensors shards."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(2026)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        initializer_range=1 / 16,  # 1 / sqrt(hidden): activations stay near 1 in every layer
        max_position_embeddings=1024,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4MB")


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The model with transformers' own loop over the experts ('eager')."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    )
    return model.to(device).eval()


def real_text_prompts() -> list[torch.Tensor]:
    """Bytes of the README and of Python's documentation in turn, int64 [1, L] each."""
    from importlib.metadata import metadata
    from pydoc_data import topics

    readme = Path(__file__).resolve().parent.parent / "README.md"
    manual = "\n".join(text for _, text in sorted(topics.topics.items())).encode()
    # Installed from a wheel there is no README beside the package, but its metadata holds it.
    about = readme.read_bytes() if readme.exists() else metadata("moe-ep").get_payload().encode()
    sources = [about + manual, manual]
    prompts = []
    for i, length in enumerate(PROMPT_LENGTHS):
        text, sources[i % 2] = sources[i % 2][:length], sources[i % 2][length:]
        prompts.append(torch.tensor([list(text)], dtype=torch.int64))
    return prompts


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[torch.Tensor], new_tokens: int) -> Generation:
    """Greedy decoding with a KV cache, exactly `new_tokens` forwards for each prompt.

    `model.generate` would stop where a rank's texts end, and leave the others waiting.
    """
    device = next(model.parameters()).device
    tokens, logits = [], []
    start = time.perf_counter()
    for prompt in prompts:
        ids, cache = prompt.to(device), None
        chosen, seen = [], []
        for _ in range(new_tokens):
            out = model(input_ids=ids, cache=cache, use_cache=True)
            cache = out.cache
            ids = out.logits[:, -1:].argmax(dim=-1)
            seen.append(out.logits[0])
            chosen.append(ids[0])
        tokens.append(torch.cat(chosen).cpu())
        logits.append(torch.cat(seen).cpu())
    return Generation(tokens, logits, time.perf_counter() - start)


@torch.inference_mode()
def compare(
    model: torch.nn.Module,
    eager: torch.nn.Module,
    exact: torch.nn.Module,
    prompts: list[torch.Tensor],
    continuations: list[torch.Tensor],
) -> tuple[Deviation, Deviation, torch.Tensor]:
    """The three models on the same texts: (difference, noise, tokens per expert int64 [E])."""
    from moe_ep.integrations.transformers import count_flips, record_routing

    def run_one(one: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict]:
        with record_routing(one) as routing:
            return one(input_ids=ids, use_cache=False).logits.float(), routing

    def deviation(a: tuple[torch.Tensor, dict], b: tuple[torch.Tensor, dict]) -> Deviation:
        distance = (a[0] - b[0]).abs()
        total, largest = float(distance.double().sum()), float(distance.max())
        return Deviation(total, distance.numel(), largest, *count_flips(a[1], b[1]))

    difference, noise = Deviation(), Deviation()
    tokens_per_expert = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    for prompt, continuation in zip(prompts, continuations, strict=True):
        ids = torch.cat((prompt, continuation[None]), dim=1)
        ids = ids.to(next(model.parameters()).device)
        ours, plain, reference = (run_one(one, ids) for one in (model, eager, exact))
        difference += deviation(ours, plain)
        noise += deviation(plain, reference)
        for calls in ours[1].values():
            tokens_per_expert += torch.cat(calls).flatten().bincount(minlength=NUM_EXPERTS)
    return difference, noise, tokens_per_expert


def gather(value: object, group: EpGroup) -> list | None:
    """Every rank's value on rank 0, None elsewhere."""
    if group.num_ranks == 1:
        return [value]
    values = [None] * group.num_ranks if group.rank == 0 else None
    dist.gather_object(value, values, dst=0, group=group.process_group)
    return values


def summarize(
    per_rank: list[tuple[Generation, Deviation, Deviation, torch.Tensor]],
    alone: Generation,
    explanation: str,
    group: EpGroup,
) -> Report:
    generations, differences, noises, counts = zip(*per_rank, strict=True)
    tokens = torch.cat([torch.cat(generation.tokens) for generation in generations])
    logits = torch.cat([torch.cat(generation.logits) for generation in generations])
    alone_tokens, alone_logits = torch.cat(alone.tokens), torch.cat(alone.logits)
    owners = [
        rank
        for rank in range(group.num_ranks)
        for _ in owned_experts(NUM_EXPERTS, group.num_ranks, rank)
    ]
    return Report(
        backend=explanation,
        device=str(group.device),
        num_ranks=group.num_ranks,
        prompt_bytes=sum(PROMPT_LENGTHS),
        new_tokens=len(tokens),
        tokens_per_s=len(tokens) / max(generation.seconds for generation in generations),
        one_rank_tokens_per_s=len(tokens) / alone.seconds,
        tokens_per_expert=sum(counts).tolist(),
        owner_of_expert=owners,
        difference=sum(differences, Deviation()),
        noise=sum(noises, Deviation()),
        logits_identical=_same_bits(logits, alone_logits),
        tokens_identical=torch.equal(tokens, alone_tokens),
        digest=_digest(logits, tokens),
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _digest(logits: torch.Tensor, tokens: torch.Tensor) -> str:
    digest = hashlib.sha256(logits.view(torch.int16).numpy().tobytes())
    digest.update(tokens.numpy().tobytes())
    return digest.hexdigest()


def show(report: Report) -> None:
    """Print the report to standard output."""
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(report.backend, markup=False)
    speed = Table.grid(padding=(0, 2))
    speed.add_row("ranks", f"{report.num_ranks} on {report.device}")
    speed.add_row("text", f"{report.prompt_bytes} bytes in {len(PROMPT_LENGTHS)} prompts")
    speed.add_row("generated", f"{report.new_tokens} tokens")
    speed.add_row(
        "speed",
        f"{report.tokens_per_s:.1f} tokens/s, prompts included "
        f"(one rank: {report.one_rank_tokens_per_s:.1f})",
    )
    console.print(speed)

    experts = Table(title="tokens per expert, all layers", title_justify="left", box=None)
    for name in ("expert", "rank", "tokens"):
        experts.add_column(name, justify="right")
    experts.add_column("")
    most = max(report.tokens_per_expert)
    colors = ("cyan", "magenta", "green", "yellow")
    for expert_idx, count in enumerate(report.tokens_per_expert):
        rank = report.owner_of_expert[expert_idx]
        bar = Bar(most, 0, count, width=40, color=colors[rank % len(colors)])
        experts.add_row(str(expert_idx), str(rank), str(count), bar)
    console.print(experts)

    logits = Table(title="logits", title_justify="left", box=None)
    for name in ("", "mean", "largest", "router flips"):
        logits.add_column(name, justify="right" if name else "left")
    for name, deviation in (
        ("moe-ep against the untouched model", report.difference),
        ("untouched model, BF16 against FP32", report.noise),
    ):
        flips = f"{deviation.flips} of {deviation.routings}"
        logits.add_row(name, f"{deviation.mean:.3e}", f"{deviation.largest:.3e}", flips)
    ratios = f"{report.mean_ratio:.2f}", f"{report.largest_ratio:.2f}"
    logits.add_row("ratio", *ratios)
    logits.add_row("allowed", f"{MAX_MEAN_RATIO:.2f}", f"{MAX_LARGEST_RATIO:.2f}")
    console.print(logits)

    for name, identical in (
        ("logits", report.logits_identical),
        ("tokens", report.tokens_identical),
    ):
        word = "[green]bit-identical[/] to" if identical else "[red]different[/] from"
        console.print(f"{name} are {word} the run on one rank")
    console.print(f"digest {report.digest}", highlight=False)
    for reason in report.failures():
        console.print(f"[red]failed:[/] {reason}")

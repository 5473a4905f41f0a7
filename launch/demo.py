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
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.config import Backend
from moe_ep.launch import bootstrap, torchrun
from moe_ep.launch.backends import BACKENDS, named_backend
from moe_ep.launch.demo_report import Deviation, Report, show
from moe_ep.launch.output_file import output_file
from moe_ep.megakernel.problem import owned_experts

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 16, 4
MAX_POSITIONS = 1024  # bytes of a prompt and its continuation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), help="processes (default 2)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts over all ranks")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens for each prompt")
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument(
        "--json", type=output_file, metavar="PATH", help="write the report there too"
    )


def run(args: argparse.Namespace) -> int:
    """Start torchrun with `--ranks` workers, or be one of them if torchrun started this process."""
    if args.ranks != 1 and not torchrun.is_worker():
        return torchrun.start(args, args.ranks or 2)
    lengths = prompt_lengths(args.prompts)
    if not 1 <= args.new_tokens <= MAX_POSITIONS - max(lengths):
        raise MoEEpConfigError(
            f"--new-tokens is {args.new_tokens}; allowed: 1 to {MAX_POSITIONS - max(lengths)}"
        )
    with bootstrap.session() as group:
        if args.ranks not in (None, group.num_ranks) or args.prompts % group.num_ranks:
            raise MoEEpConfigError(
                f"--ranks {args.ranks} and --prompts {args.prompts} with {group.num_ranks} "
                "processes; allowed: as many ranks as processes, and a multiple of it in prompts"
            )
        prompts = real_text_prompts(lengths)
        report = run_on_rank(group, prompts, args.new_tokens, named_backend(args.backend))
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
    prompt_seconds: float
    decode_seconds: float  # for n - 1 tokens of each prompt: the first one comes with the prompt


def run_on_rank(
    group: EpGroup, prompts: list[torch.Tensor], new_tokens: int, backend: Backend | str
) -> Report | None:
    """The whole demo, called on every rank of `group`. Rank 0 gets the report, others None."""
    from rich.console import Console

    if group.device.type == "cpu":
        torch.set_num_threads(1)  # plain python would take all cores, torchrun takes one
    share = len(prompts) // group.num_ranks
    mine = prompts[group.rank * share : (group.rank + 1) * share]
    console = Console(stderr=True, quiet=group.rank != 0)
    with console.status("loading transformers") as status, tempfile.TemporaryDirectory() as own:
        from transformers.utils import logging

        from moe_ep.integrations.transformers import replace_moe_layers

        logging.disable_progress_bar()

        def load(ranks: EpGroup) -> tuple[torch.nn.Module, str]:
            """The model with its experts on `ranks`, and what its first layer says of itself."""
            model = load_model(folder, torch.bfloat16, group.device)
            layers = replace_moe_layers(
                model, ranks, max_tokens_per_rank=MAX_POSITIONS, backend=backend
            )
            return model, next(iter(layers.values())).explain()

        status.update("writing and loading the model")
        if group.rank == 0:
            write_checkpoint(Path(own))
        folder = from_rank_0(Path(own), group)
        model, explanation = load(group)
        generate(model, [mine[0][:, :16]], 2)  # warm-up
        status.update(f"generating on {group.num_ranks} ranks")
        generation = generate(model, mine, new_tokens)
        status.update("comparing with the untouched model")
        exact = load_model(folder, torch.float32, group.device)
        eager = load_model(folder, torch.bfloat16, group.device)
        compared = compare(model, eager, exact, mine, generation.tokens)
        per_rank = gather((generation, *compared), group)
        if per_rank is None:
            return None
        # The other ranks are done; what follows has no collective.
        status.update("generating on one rank")
        alone_model, _ = load(EpGroup.single(group.device))
        generate(alone_model, [prompts[0][:, :16]], 2)
        alone = generate(alone_model, prompts, new_tokens)
    return summarize(per_rank, alone, explanation, prompts, group)


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
        max_position_embeddings=MAX_POSITIONS,
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


def prompt_lengths(num_prompts: int) -> list[int]:
    """Bytes of each prompt: all differ, so that ranks hold different numbers of tokens."""
    if not 1 <= num_prompts <= 32:
        raise MoEEpConfigError(f"--prompts is {num_prompts}; allowed: 1 to 32")
    return [448 + 16 * i for i in range(num_prompts)]


def real_text_prompts(lengths: list[int]) -> list[torch.Tensor]:
    """Bytes of the README and of Python's documentation in turn, int64 [1, L] each."""
    from importlib.metadata import metadata
    from pydoc_data import topics

    readme = Path(__file__).resolve().parent.parent / "README.md"
    manual = "\n".join(text for _, text in sorted(topics.topics.items())).encode()
    # Installed from a wheel there is no README beside the package, but its metadata holds it.
    about = readme.read_bytes() if readme.exists() else metadata("moe-ep").get_payload().encode()
    sources = [about + manual, manual]
    prompts = []
    for i, length in enumerate(lengths):
        text, sources[i % 2] = sources[i % 2][:length], sources[i % 2][length:]
        prompts.append(torch.tensor([list(text)], dtype=torch.int64))
    return prompts


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[torch.Tensor], new_tokens: int) -> Generation:
    """Greedy decoding with a KV cache, exactly `new_tokens` forwards for each prompt.

    `model.generate` would stop where a rank's texts end, and leave the others waiting.
    """
    device = next(model.parameters()).device
    # transformers before 5.18 called it by its older name.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    tokens, logits = [], []
    prompt_seconds = decode_seconds = 0.0
    for prompt in prompts:
        ids, cache = prompt.to(device), None
        chosen, seen = [], []
        marks = [time.perf_counter()]
        for _ in range(new_tokens):
            out = model(input_ids=ids, use_cache=True, **{name: cache})
            cache = out[name]
            ids = out.logits[:, -1:].argmax(dim=-1)
            seen.append(out.logits[0])
            chosen.append(ids[0].cpu())  # on a GPU the copy waits for the step
            marks.append(time.perf_counter())
        prompt_seconds += marks[1] - marks[0]
        decode_seconds += marks[-1] - marks[1]
        tokens.append(torch.cat(chosen))
        logits.append(torch.cat(seen).cpu())
    return Generation(tokens, logits, prompt_seconds, decode_seconds)


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


def from_rank_0(value: Any, group: EpGroup) -> Any:
    """Rank 0's value on every rank, once rank 0 has come here."""
    values = [value]
    if group.num_ranks > 1:
        dist.broadcast_object_list(values, src=0, group=group.process_group)
    return values[0]


def gather(value: Any, group: EpGroup) -> list[Any] | None:
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
    prompts: list[torch.Tensor],
    group: EpGroup,
) -> Report:
    generations, differences, noises, counts = zip(*per_rank, strict=True)
    tokens = torch.cat([torch.cat(generation.tokens) for generation in generations])
    logits = torch.cat([torch.cat(generation.logits) for generation in generations])
    num_bytes = sum(prompt.numel() for prompt in prompts)
    num_decoded = len(tokens) - len(prompts)
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
        num_prompts=len(prompts),
        prompt_bytes=num_bytes,
        new_tokens=len(tokens),
        prompt_bytes_per_s=num_bytes / max(g.prompt_seconds for g in generations),
        tokens_per_s=_ratio(num_decoded, max(g.decode_seconds for g in generations)),
        one_rank_tokens_per_s=_ratio(num_decoded, alone.decode_seconds),
        tokens_per_expert=sum(counts).tolist(),
        owner_of_expert=owners,
        difference=sum(differences, Deviation()),
        noise=sum(noises, Deviation()),
        logits_identical=_same_bits(logits, alone_logits),
        tokens_identical=torch.equal(tokens, alone_tokens),
        text_digest=_digest(*(prompt[0] for prompt in prompts)),
        digest=_digest(logits, tokens),
    )


def _ratio(count: int, seconds: float) -> float:
    return count / seconds if count else 0.0  # one new token: nothing was decoded


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""What the demo found, whether that passes, and how it looks in a terminal."""

from dataclasses import dataclass

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

MAX_MEAN_RATIO, MAX_LARGEST_RATIO = 1.0, 2.0
RANK_COLORS = ("cyan", "magenta", "green", "yellow")


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
    num_prompts: int
    prompt_bytes: int
    new_tokens: int  # of all prompts together
    prompt_bytes_per_s: float
    tokens_per_s: float
    one_rank_tokens_per_s: float
    tokens_per_expert: list[int]  # over all ranks and layers
    owner_of_expert: list[int]
    difference: Deviation  # replaced model against the untouched one, both BF16
    noise: Deviation  # untouched model, BF16 against FP32
    logits_identical: bool
    tokens_identical: bool
    text_digest: str  # SHA-256 of the prompts
    digest: str  # SHA-256 of logits and tokens: for the same text equal on any number of ranks

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


def show(report: Report) -> None:
    """Print the report to standard output."""
    console = Console()
    console.print(report.backend, markup=False, highlight=False, soft_wrap=True)
    speed = Table.grid(padding=(0, 2))
    speed.add_row("model", "small Qwen3-MoE of transformers, seeded and not trained")
    speed.add_row("ranks", f"{report.num_ranks} on {report.device}")
    speed.add_row(
        "text",
        f"{report.prompt_bytes} bytes in {report.num_prompts} prompts, "
        f"{report.prompt_bytes_per_s:.0f} bytes/s",
    )
    speed.add_row(
        "generated",
        f"{report.new_tokens} tokens, {report.tokens_per_s:.1f} tokens/s "
        f"(one rank: {report.one_rank_tokens_per_s:.1f})",
    )
    console.print(speed)

    experts = Table(title="tokens per expert, all layers", title_justify="left", box=None)
    for name in ("expert", "rank", "tokens"):
        experts.add_column(name, justify="right")
    experts.add_column("")
    most = max(report.tokens_per_expert)
    for expert_idx, count in enumerate(report.tokens_per_expert):
        rank = report.owner_of_expert[expert_idx]
        bar = Bar(most, 0, count, width=40, color=RANK_COLORS[rank % len(RANK_COLORS)])
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
    console.print(
        f"SHA-256 of the text           {report.text_digest}", highlight=False, soft_wrap=True
    )
    console.print(f"SHA-256 of logits and tokens  {report.digest}", highlight=False, soft_wrap=True)
    for reason in report.failures():
        console.print(f"[red]failed:[/] {reason}")

"""`moe-ep estimate`: bytes that one rank needs for a layer, before anything is allocated.

Weights from `WeightFormat`; buffers from what one call of the split path (`moe_ep/split.py` over
`comm/torch_transport.py`) holds, phase by phase. `--kernel grouped`: prepared weights, and on one
rank the workspace, as `moe_ep/grouped_memory.py` allocates them. The mega kernel's from
`megakernel/workspace.py`, region by region. Plain integers: no GPU, no process group.

Letters: R ranks, C capacity (tokens per rank), K slots, H hidden, I intermediate, e local experts,
N tokens received, P pool rows (received slots whose expert is here).
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.config import GroupedGemmConfig
from moe_ep.grouped_limits import layer_misfit
from moe_ep.grouped_memory import prepared_bytes, workspace_regions
from moe_ep.launch.geometries import GEOMETRIES, geometry
from moe_ep.megakernel.mega_spec import make_buckets, make_layout
from moe_ep.megakernel.problem import WEIGHT_FORMATS, MoEShape, owned_experts, weight_format
from moe_ep.megakernel.workspace import aligned_bytes

_BF16, _FP32, _INT64 = 2, 4, 8
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
PHASES = ("dispatch", "experts", "combine")
ROUTINGS = ("even", "worst")
KERNELS = ("torch", "grouped")


@dataclass(frozen=True)
class Region:
    """One allocation of a rank, in bytes, and the phases of a call in which it is alive."""

    name: str
    num_bytes: int
    note: str
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an estimate is for. Raises `MoEEpConfigError` naming the argument that does not fit."""

    shape: MoEShape
    weights_format: str
    num_ranks: int
    max_tokens_per_rank: int
    parallel: str = "ep"
    kernel: str = "torch"

    def __post_init__(self) -> None:
        fmt = weight_format(self.weights_format)
        for name in ("num_ranks", "max_tokens_per_rank"):
            if getattr(self, name) < 1:
                raise MoEEpConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.parallel not in ("ep", "tp"):
            raise MoEEpConfigError(f"parallel must be 'ep' or 'tp', got {self.parallel!r}")
        for name in ("hidden", "intermediate"):
            value = getattr(self.shape, name)
            if value % fmt.k_multiple:
                raise MoEEpConfigError(
                    f"{name} {value} does not fit weights {fmt.name}; allowed: multiples of "
                    f"{fmt.k_multiple}"
                )
        multiple = self.num_ranks * max(1, fmt.sf_cols)
        if self.parallel == "tp" and self.shape.intermediate % multiple:
            raise MoEEpConfigError(
                f"intermediate {self.shape.intermediate} does not divide over {self.num_ranks} "
                f"ranks in whole scale blocks; allowed: multiples of {multiple}"
            )
        if self.kernel not in KERNELS:
            raise MoEEpConfigError(f"kernel must be one of {KERNELS}, got {self.kernel!r}")
        misfit = self.kernel == "grouped" and layer_misfit(
            self.shape,
            self.weights_format,
            GroupedGemmConfig(),
            parallel=self.parallel,
            num_ranks=self.num_ranks,
        )
        if misfit:
            raise MoEEpConfigError(misfit)

    @property
    def num_local_experts(self) -> int:
        """Of rank 0, which owns as many as any rank."""
        if self.parallel == "tp":
            return self.shape.num_experts
        return len(owned_experts(self.shape.num_experts, self.num_ranks, rank=0))

    @property
    def local_intermediate(self) -> int:
        return self.shape.intermediate // (self.num_ranks if self.parallel == "tp" else 1)

    @property
    def fc1_rows(self) -> int:
        return self.shape.num_fc1_halves * self.local_intermediate


def weight_regions(problem: Problem) -> list[Region]:
    """Weights of the rank that holds most. Gate and up are blocked separately, as checkpoints are.
    Biases are not counted."""
    fmt, shape = weight_format(problem.weights_format), problem.shape
    num_experts, halves = problem.num_local_experts, shape.num_fc1_halves
    if problem.kernel == "grouped":
        return [_prepared_weights(problem)]
    hidden, intermediate = shape.hidden, problem.local_intermediate
    regions = [
        Region(
            "w13",
            num_experts * halves * fmt.num_bytes(intermediate, hidden),
            f"{num_experts} experts x [{halves * intermediate}, {hidden}] {fmt.name}",
        ),
        Region(
            "w2",
            num_experts * fmt.num_bytes(hidden, intermediate),
            f"{num_experts} experts x [{hidden}, {intermediate}] {fmt.name}",
        ),
    ]
    if fmt.has_global_scale:
        note = f"{num_experts} experts x {halves + 1} matrices, FP32"
        regions.append(Region("global scales", num_experts * (halves + 1) * _FP32, note))
    return regions


def _prepared_weights(problem: Problem) -> Region:
    """As both Hopper kernels read them."""
    local_shape = replace(problem.shape, intermediate=problem.local_intermediate)
    num_experts, fmt = problem.num_local_experts, problem.weights_format
    note = f"{num_experts} experts in {fmt} tiles, padded, with their scales"
    return Region("prepared weights", prepared_bytes(local_shape, fmt, num_experts), note)


def buffer_regions(problem: Problem, routing: str = "even") -> list[Region]:
    """What one call of the split path allocates when every rank brings C tokens.

    routing  "even": every expert gets as many slots as any other; "worst": every token of every
             rank goes to this rank's experts, one of which gets them all
    """
    shape, num_ranks, capacity = problem.shape, problem.num_ranks, problem.max_tokens_per_rank
    if problem.kernel == "grouped" and num_ranks == 1 and problem.parallel == "ep":
        return _workspace(problem)
    hidden, top_k = shape.hidden, shape.top_k
    is_tp = problem.parallel == "tp"
    term_bytes = _FP32 if is_tp else _BF16
    num_all = num_ranks * capacity
    # A token goes once to each rank that needs it.
    num_received = num_all
    if not is_tp and routing == "even":
        num_received = capacity * min(num_ranks, top_k)
    num_sent = num_all if is_tp else capacity * min(num_ranks, top_k)
    if is_tp:
        num_pool = num_all * top_k
    elif routing == "even":
        num_pool = capacity * top_k
    else:
        num_pool = num_all * min(top_k, problem.num_local_experts)
    num_largest = num_all if routing == "worst" else -(-num_pool // problem.num_local_experts)
    # A row of the message: H BF16, then K ids and (tp) K routing weights of 4 bytes each.
    row_bytes = 4 * ((hidden + 1) // 2 + top_k * (2 if is_tp else 1))

    after_dispatch, combine = ("experts", "combine"), ("combine",)
    regions = []
    if num_ranks > 1:
        regions += [
            Region("sent tokens", num_sent * row_bytes, f"[{num_sent}, H] BF16 + ids", PHASES[:1]),
            Region("received tokens", num_received * row_bytes, f"[{num_received}, H] BF16 + ids"),
        ]
    regions += [
        Region(
            "dispatch plan",
            6 * num_received * top_k * _INT64,
            f"6 x [{num_received}, {top_k}] int64",
            after_dispatch,
        ),
        Region("pool", num_pool * hidden * _BF16, f"[{num_pool}, H] BF16", after_dispatch),
        Region("terms", num_pool * hidden * term_bytes, f"[{num_pool}, H]", after_dispatch),
        _between_gemms(problem, num_pool, num_largest),
        Region("terms in slot order", num_pool * hidden * term_bytes, f"[{num_pool}, H]", combine),
    ]
    if is_tp:
        num_back = num_all if num_ranks > 1 else 0
        num_sums = num_received
    else:
        num_back = 2 * capacity * top_k if num_ranks > 1 else 0  # as received, then by slot
        num_sums = capacity
    if num_back:
        note = f"[{num_back}, H]"
        regions.append(Region("rows back", num_back * hidden * term_bytes, note, combine))
    note = f"3 x [{num_sums}, H] FP32"
    regions.append(Region("sum over the slots", 3 * num_sums * hidden * _FP32, note, combine))
    return regions


def _workspace(problem: Problem) -> list[Region]:
    """What layers of one geometry share on one rank; their calls allocate nothing else."""
    regions = workspace_regions(
        problem.shape, problem.num_local_experts, problem.max_tokens_per_rank
    )
    return [Region(r.name, r.num_bytes, f"{list(r.shape)} {r.dtype}") for r in regions]


def _between_gemms(problem: Problem, num_pool: int, num_largest: int) -> Region:
    """What the experts need beside rows and terms."""
    if problem.kernel == "grouped":
        num_bytes = num_pool * problem.local_intermediate * _BF16
        return Region("hidden activations", num_bytes, f"[{num_pool}, I] BF16", ("experts",))
    num_bytes = _expert_bytes(problem, num_largest)
    note = f"decoded matrix, FC1 and FC2 of {num_largest} rows"
    return Region("one expert", num_bytes, note, ("experts",))


def _expert_bytes(problem: Problem, num_rows: int) -> int:
    """Working set of the largest expert in `reference.py` on a CPU: the larger of FC1 and FC2.

    A quantised matrix is decoded to FP32 whole; a BF16 one is upcast in pieces, not counted here.
    """
    hidden, intermediate, fc1_rows = (
        problem.shape.hidden,
        problem.local_intermediate,
        problem.fc1_rows,
    )
    w13, w2 = fc1_rows * hidden, hidden * intermediate
    if problem.weights_format == "bf16":
        w13 = w2 = 0
    fc1 = _FP32 * (w13 + num_rows * (hidden + fc1_rows))
    fc2 = _FP32 * (w2 + num_rows * (hidden + intermediate + fc1_rows))
    return max(fc1, fc2) + _BF16 * num_rows * intermediate


def mega_regions(problem: Problem) -> list[Region]:
    """What the mega kernel holds all the time, whatever the routing: weights as it reads them, and
    every region of the workspace that its builds share, in whole alignments.

    Raises `MoEEpConfigError` for what it does not run.
    """
    shape, num_ranks, capacity = problem.shape, problem.num_ranks, problem.max_tokens_per_rank
    buckets = make_buckets(problem.weights_format, shape, capacity, num_ranks, problem.parallel)
    workspace = make_layout(shape, num_ranks, capacity, buckets, problem.parallel)
    return [
        _prepared_weights(problem),
        *(
            Region(r.name, aligned_bytes(r.num_bytes), f"{r.scope} {list(r.shape)} {r.dtype}")
            for r in workspace.regions
        ),
    ]


def peak_bytes(regions: list[Region]) -> int:
    """The largest sum of regions alive in one phase."""
    return max(sum(r.num_bytes for r in regions if phase in r.phases) for phase in PHASES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=GEOMETRIES, default="v3", help="default: v3")
    for name in ("num-experts", "top-k", "hidden", "intermediate"):
        parser.add_argument(f"--{name}", type=int, help="instead of the geometry's")
    parser.add_argument("--activation", help="name of an activation (default: swiglu)")
    parser.add_argument("--weights-format", choices=WEIGHT_FORMATS, default="nvfp4")
    parser.add_argument("--ranks", type=int, default=8, help="EP size (default: 8)")
    parser.add_argument(
        "--max-tokens-per-rank", type=int, default=512, help="capacity (default: 512)"
    )
    parser.add_argument("--parallel", choices=("ep", "tp"), default="ep")
    parser.add_argument(
        "--kernel",
        choices=KERNELS,
        default="torch",
        help="of the split path (default: torch); the mega kernel's bytes are told besides",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    known = geometry(args.geometry)
    fields = ("num_experts", "top_k", "hidden", "intermediate", "activation")
    given = {name: getattr(args, name) for name in fields}
    problem = Problem(
        shape=MoEShape(
            **{n: getattr(known, n) if value is None else value for n, value in given.items()}
        ),
        weights_format=args.weights_format,
        num_ranks=args.ranks,
        max_tokens_per_rank=args.max_tokens_per_rank,
        parallel=args.parallel,
        kernel=args.kernel,
    )
    weights = weight_regions(problem)
    buffers = {routing: buffer_regions(problem, routing) for routing in ROUTINGS}
    mega, why_not = [], ""
    try:
        mega = mega_regions(problem)
    except MoEEpConfigError as error:
        why_not = str(error)
    if args.json:
        print(json.dumps(_as_json(problem, weights, buffers, mega, why_not), indent=2))
    else:
        _print_table(problem, weights, buffers, mega, why_not)
    return 0


def _as_json(
    problem: Problem,
    weights: list[Region],
    buffers: dict[str, list[Region]],
    mega: list[Region],
    why_not: str,
) -> dict[str, object]:
    weights_bytes = sum(region.num_bytes for region in weights)
    mega_report = {
        "total_bytes": sum(region.num_bytes for region in mega),
        "regions": [asdict(region) for region in mega],
    }
    return {
        "problem": asdict(problem),
        "weights": {"bytes": weights_bytes, "regions": [asdict(region) for region in weights]},
        "split": {
            routing: {
                "peak_bytes": peak_bytes(regions),
                "total_bytes": weights_bytes + peak_bytes(regions),
                "regions": [asdict(region) for region in regions],
            }
            for routing, regions in buffers.items()
        },
        "mega": mega_report if mega else {"reason": why_not},
    }


def _print_table(
    problem: Problem,
    weights: list[Region],
    buffers: dict[str, list[Region]],
    mega: list[Region],
    why_not: str,
) -> None:
    from rich.console import Console
    from rich.table import Table

    shape = problem.shape
    table = Table(
        title=f"one rank of {problem.num_ranks}, {problem.parallel}: E={shape.num_experts} "
        f"K={shape.top_k} H={shape.hidden} I={shape.intermediate}, "
        f"{problem.max_tokens_per_rank} tokens per rank",
        caption="Peak: the largest sum of buffers alive at once, in one call. even: all experts "
        "get the same; worst: every token of every rank comes here. With the grouped kernel on one "
        "rank, and in the mega kernel, layers of one geometry share the buffers.",
    )
    table.add_column("region")
    table.add_column("even", justify="right")
    table.add_column("worst", justify="right")
    table.add_column("what (even)")
    for region in weights:
        size = format_bytes(region.num_bytes)
        table.add_row(region.name, size, size, region.note)
    weights_bytes = sum(region.num_bytes for region in weights)
    size = format_bytes(weights_bytes)
    table.add_row("weights", size, size, style="bold", end_section=True)
    for even, worst in zip(buffers["even"], buffers["worst"], strict=True):
        sizes = format_bytes(even.num_bytes), format_bytes(worst.num_bytes)
        table.add_row(even.name, *sizes, even.note)
    peaks = [peak_bytes(buffers[routing]) for routing in ROUTINGS]
    table.add_row("split: peak of the buffers", *map(format_bytes, peaks), style="bold")
    totals = [format_bytes(weights_bytes + peak) for peak in peaks]
    table.add_row("split: weights and peak", *totals, style="bold", end_section=True)
    for region in mega:
        size = format_bytes(region.num_bytes)
        table.add_row(region.name, size, size, region.note)
    if mega:
        size = format_bytes(sum(region.num_bytes for region in mega))
        table.add_row("mega: weights and workspace", size, size, style="bold")
    else:
        table.add_row("mega", "-", "-", why_not)
    Console().print(table)


def format_bytes(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"

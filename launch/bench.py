"""`moe-ep bench`: one layer's latency over the tokens per rank, against what the device allows.

For every geometry, format, backend and number of tokens: check the values against the
specification, then time `forward` as `timing.py` says. The limit is the largest of what `work.py`
counts over the device's peaks. With --stages the mega kernel is also built with time stamps, see
`stages.py`.

Letters as everywhere: T tokens of a rank, K slots, H hidden, I intermediate.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from moe_ep import reference
from moe_ep.arguments import check_int
from moe_ep.backends import supports
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError, MoEEpUnavailableError
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaConfig
from moe_ep.inputs import MoEInputs
from moe_ep.launch import bootstrap, torchrun
from moe_ep.launch.backends import BACKENDS, BackendNames, named_backend
from moe_ep.launch.bench_report import MAX_ERROR, provenance, show
from moe_ep.launch.geometries import GEOMETRIES
from moe_ep.launch.output_file import output_file
from moe_ep.launch.peaks import Peaks, device_peaks
from moe_ep.launch.random_layer import random_weights, shard_shape
from moe_ep.launch.stages import Stages, StampedLayer
from moe_ep.launch.timing import all_gather, all_reduce, host_seconds, time_call
from moe_ep.launch.work import most_work
from moe_ep.layer import MoEEpLayer
from moe_ep.megakernel.problem import PARALLEL_MODES, WEIGHT_FORMATS, MoEShape
from moe_ep.random_inputs import random_inputs
from moe_ep.weights import MoEWeights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", nargs="+", choices=GEOMETRIES, default=["tiny"])
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine")
    parser.add_argument(
        "--experts-per-rank",
        type=int,
        help="shrink the layer to this many experts per rank: one EP8 shard of v3 is 32",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 8, 32, 128], help="tokens per rank"
    )
    parser.add_argument(
        "--parallel",
        choices=PARALLEL_MODES,
        default="ep",
        help="what ranks divide: the experts, or every expert's intermediate",
    )
    parser.add_argument("--skew", action="store_true", help="every second token has expert 0")
    parser.add_argument(
        "--backend",
        nargs="+",
        action=BackendNames,
        default=["auto"],
        metavar="NAME",
        help=f"of {', '.join(BACKENDS)} (default: auto)",
    )
    parser.add_argument("--weights-format", nargs="+", choices=WEIGHT_FORMATS, default=["bf16"])
    parser.add_argument("--iterations", type=int, default=50, help="timed calls of each kind")
    parser.add_argument(
        "--graph", action="store_true", help="replay a CUDA graph where the backend allows one"
    )
    parser.add_argument("--eager", action="store_true", help="with --graph: eager calls as well")
    parser.add_argument(
        "--stages",
        action="store_true",
        help="mega, and the fused transport: time of each stage, from stamps in the kernel",
    )
    parser.add_argument("--json", type=output_file, metavar="PATH", help="write the results")
    parser.add_argument(
        "--plot", type=output_file, metavar="PATH", help="draw them (needs matplotlib)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--comm",
        action="store_true",
        help="instead: the transports alone, tokens out and terms back",
    )
    instead.add_argument(
        "--cpu-ratio",
        action="store_true",
        help="instead: the CPU layer's time over that of its FP32 matmuls alone",
    )


def run(args: argparse.Namespace) -> int:
    """0 if every case ran and had the right values, else 1."""
    if args.cpu_ratio:
        from moe_ep.launch import cpu_ratio

        cpu_ratio.run()
        return 0
    for option, counts in (
        ("--tokens", args.tokens),
        ("--iterations", [args.iterations]),
        ("--ranks", [args.ranks]),
    ):
        for count in counts:
            check_int(option, count, 1)
    if args.plot and find_spec("matplotlib") is None:
        raise MoEEpUnavailableError("--plot needs matplotlib (pip install 'moe-ep[plot]')")
    if args.ranks > 1 and not torchrun.is_worker():
        return torchrun.start(args, args.ranks)
    if args.comm:
        from moe_ep.launch import bench_comm

        with bootstrap.session() as group:
            results = bench_comm.run(args, group)
            if group.rank == 0:
                bench_comm.report(results)
        return 0
    with bootstrap.session() as group:
        record = bench_on_rank(args, group)
    if group.rank == 0:
        show(record)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
        if args.plot:
            from moe_ep.launch.plot import plot

            plot(record, args.plot)
    is_wrong = any(result["error"] > MAX_ERROR for result in record["results"])
    return 1 if record["skipped"] or is_wrong else 0


def bench_on_rank(args: argparse.Namespace, group: EpGroup) -> dict[str, object]:
    """Every case that was asked for, on every rank of `group`: the record that JSON holds."""
    for option in ("graph", "stages"):
        if getattr(args, option) and group.device.type != "cuda":
            raise MoEEpConfigError(f"--{option} needs a CUDA device, got {group.device}")
    cases, skipped = [], []
    for name in args.geometry:
        shape = shard_shape(name, args.experts_per_rank, group.num_ranks)
        for fmt in args.weights_format:
            for backend in args.backend:
                answer = supports(
                    *(shape, fmt, named_backend(backend), group.device),
                    parallel=args.parallel,
                    num_ranks=group.num_ranks,
                )
                case = Case(name, shape, fmt, backend)
                if answer.ok:
                    cases.append(case)
                else:
                    skipped.append(case.skipped(answer.reason))
    peaks = device_peaks(group.device) if cases else None  # measuring them takes a second
    results, weights, made = [], None, None
    num_steps = len(cases) * len(args.tokens)
    with Progress(console=Console(stderr=True), transient=True, disable=group.rank > 0) as progress:
        bar = progress.add_task("benching", total=num_steps)
        for case in cases:
            if made != (case.shape, case.weights_format):
                weights = None  # let go before the next are made
                weights = random_weights(*(case.shape, case.weights_format, group), args.parallel)
                made = (case.shape, case.weights_format)
            try:
                found = bench_case(args, case, weights, group, peaks, lambda: progress.advance(bar))
            except MoEEpUnavailableError as error:
                skipped.append(case.skipped(str(error)))
            else:
                results += found
    return provenance(group, peaks) | {
        "results": [asdict(result) for result in results],
        "skipped": skipped,
    }


@dataclass(frozen=True)
class Case:
    """What one layer is built for."""

    geometry: str
    shape: MoEShape
    weights_format: str
    backend: str

    def skipped(self, reason: str) -> dict[str, str]:
        return {
            "geometry": self.geometry,
            "weights_format": self.weights_format,
            "backend": self.backend,
            "reason": reason,
        }


@dataclass(frozen=True)
class Result:
    """One case. Times in microseconds, of the slowest rank; shares of the device's peaks."""

    geometry: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    num_ranks: int
    parallel: str
    weights_format: str
    backend: str
    is_graph: bool
    is_skewed: bool
    tokens_per_rank: int
    error: float  # relative L2 distance to the specification
    median_us: float
    p99_us: float
    host_us: float | None  # of an eager call on a GPU: what it keeps the host
    limit_us: float
    num_bytes: int  # of the rank with the most
    num_flops: int
    num_link_bytes: int
    memory_share: float  # num_bytes / median / peak
    matmul_share: float
    link_share: float
    stages: Stages | None


def bench_case(
    args: argparse.Namespace,
    case: Case,
    weights: MoEWeights,
    group: EpGroup,
    peaks: Peaks,
    advance: Callable[[], None],
) -> list[Result]:
    """Check and time one layer for every number of tokens. Collective."""
    shape = case.shape
    layer = MoEEpLayer(
        shape,
        weights,
        max_tokens_per_rank=max(args.tokens),
        backend=named_backend(case.backend),
        group=group,
    )
    layer.warmup()
    stamped = None
    if args.stages and isinstance(layer.backend, MegaConfig):
        stamped = StampedLayer(shape, weights, group, max(args.tokens))
    results = []
    for num_tokens in args.tokens:
        inputs = random_inputs(shape, num_tokens, group, is_skewed=args.skew)
        ids = all_gather(inputs.topk_ids, group)
        work = most_work(shape, case.weights_format, ids, num_tokens, group, args.parallel)
        limits = work.seconds(peaks)
        error = output_error(layer, shape, weights, inputs, group)
        stages = stamped.measure(inputs) if stamped else None
        for is_graph, seconds, host_us in time_layer(args, layer, inputs, group):
            median = float(seconds.median())
            result = Result(
                geometry=case.geometry,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                num_ranks=group.num_ranks,
                parallel=args.parallel,
                weights_format=case.weights_format,
                backend=case.backend,
                is_graph=is_graph,
                is_skewed=args.skew,
                tokens_per_rank=num_tokens,
                error=error,
                median_us=1e6 * median,
                p99_us=1e6 * float(seconds.quantile(0.99)),
                host_us=host_us,
                limit_us=1e6 * max(limits.values()),
                num_bytes=work.num_bytes,
                num_flops=work.num_flops,
                num_link_bytes=work.num_link_bytes,
                **{f"{name}_share": limit / median for name, limit in limits.items()},
                stages=stages,
            )
            results.append(result)
        advance()
    layer.check()
    if stamped:
        stamped.destroy()
    layer.destroy()
    return results


def time_layer(
    args: argparse.Namespace, layer: MoEEpLayer, inputs: MoEInputs, group: EpGroup
) -> list[tuple[bool, torch.Tensor, float | None]]:
    """(whether in a graph, seconds of each call, microseconds of the host or None) of each kind of
    call that was asked for and that the backend allows. Collective."""
    out = torch.empty_like(inputs.hidden_states)
    num_tokens = len(out)

    def call() -> None:
        layer.forward(inputs, out=out, max_tokens=num_tokens)

    kinds: list[tuple[bool, torch.Tensor, float | None]] = []
    if args.graph:
        try:
            kinds.append((True, time_call(call, group, args.iterations, True), None))
        except MoEEpStateError:
            pass  # it cannot be captured, and is timed eagerly
    if args.eager or not kinds:
        seconds = time_call(call, group, args.iterations, False)
        host_us = None
        if group.device.type == "cuda":
            host_us = 1e6 * host_seconds(call, group, args.iterations)
        kinds.append((False, seconds, host_us))
    return kinds


def output_error(
    layer: MoEEpLayer, shape: MoEShape, weights: MoEWeights, inputs: MoEInputs, group: EpGroup
) -> float:
    """Relative L2 distance of the layer's output to the specification, of the worst rank.

    Every rank computes its own experts' terms for all tokens with `reference`, and the weighted
    terms are summed over ranks: no step of the layer's transport or kernels is used.
    """
    x_TH, ids_TK, weights_TK = (
        all_gather(tensor, group)
        for tensor in (inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)
    )
    want_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for local_expert_idx, expert_idx in enumerate(weights.expert_ids):
        tokens, slots = (ids_TK == expert_idx).nonzero(as_tuple=True)
        if len(tokens):
            terms = reference.expert_terms(
                x_TH[tokens], weights, local_expert_idx, shape.activation
            )
            want_TH[tokens] += terms * weights_TK[tokens, slots, None]
    all_reduce(want_TH, dist.ReduceOp.SUM, group)
    num_tokens = len(inputs.hidden_states)
    want_TH = want_TH[group.rank * num_tokens :][:num_tokens]
    got_TH = layer.forward(inputs).float()
    error = ((got_TH - want_TH).norm() / want_TH.norm()).reshape(1)
    # NaN must not pass as the smaller value of a maximum.
    error = error.nan_to_num(nan=torch.inf)
    return float(all_reduce(error, dist.ReduceOp.MAX, group))

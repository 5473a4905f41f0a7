"""`moe-ep bench`: one layer's latency over the tokens per rank, against what the device allows.

For every format, backend and number of tokens: check the values against the specification, then
time `forward`. Before each call the L2 cache is flushed and a one-element all-reduce in the stream
lets all ranks start together; a call lasts as long as its slowest rank. The limit is the larger of
bytes over memory bandwidth and operations over matmul peak, on the rank with the most of either:

    bytes        weights of every local expert that has a token, each once; rows in, terms out,
                 terms read again for the sum, and the result
    operations   2 P H (fc1_rows + I), P = rows (token, slot) that arrive at the rank

Letters as everywhere: T tokens of a rank, K slots, H hidden, I intermediate, P rows.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from moe_ep import reference
from moe_ep.backends import supports
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.inputs import MoEInputs
from moe_ep.launch import bootstrap, torchrun
from moe_ep.launch.backends import BACKENDS, named_backend
from moe_ep.launch.geometries import GEOMETRIES, geometry
from moe_ep.launch.peaks import Peaks, device_peaks
from moe_ep.layer import MoEEpLayer
from moe_ep.megakernel.problem import WEIGHT_FORMATS, MoEShape, owned_experts, weight_format
from moe_ep.weights import MoEWeights

# Relative L2 error of the output against the specification. Both round each term and the sum to
# BF16 (0.0017 each); where the sums before them differ in order, some roundings fall apart.
MAX_ERROR = 0.004
# Written between calls on a CPU; larger than the last-level caches we know.
CPU_FLUSH_BYTES = 2**26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=GEOMETRIES, default="tiny")
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine")
    parser.add_argument(
        "--experts-per-rank",
        type=int,
        help="shrink the layer to this many experts per rank: one EP8 shard of v3 is 32",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 8, 32, 128], help="tokens per rank"
    )
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=["auto"])
    parser.add_argument("--weights-format", nargs="+", choices=WEIGHT_FORMATS, default=["bf16"])
    parser.add_argument("--iterations", type=int, default=50, help="timed calls of each kind")
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw them (needs matplotlib)")
    parser.add_argument(
        "--comm",
        action="store_true",
        help="instead: the transports alone, tokens out and terms back",
    )
    parser.add_argument(
        "--cpu-ratio",
        action="store_true",
        help="instead: the CPU layer's time over that of its FP32 matmuls alone",
    )


def run(args: argparse.Namespace) -> int:
    """0 if every case ran and had the right values, else 1."""
    if args.cpu_ratio:
        from moe_ep.launch import cpu_ratio

        return cpu_ratio.run()
    if min(args.tokens) < 1 or args.iterations < 1:
        raise MoEEpConfigError(
            f"--tokens {args.tokens} and --iterations {args.iterations} must be at least 1"
        )
    if args.ranks > 1 and not torchrun.is_worker():
        return torchrun.start(args, args.ranks)
    if args.comm:
        from moe_ep.launch import bench_comm

        with bootstrap.session() as group:
            results = bench_comm.run(args, group)
            if group.rank == 0:
                bench_comm.report(args, results)
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
    if args.graph and group.device.type != "cuda":
        raise MoEEpConfigError(f"--graph needs a CUDA device, got {group.device}")
    shape = bench_shape(args.geometry, args.experts_per_rank, group.num_ranks)
    peaks = device_peaks(group.device)
    results, skipped = [], []
    for fmt in args.weights_format:
        weights = random_weights(shape, fmt, group)
        for name in args.backend:
            can_run = supports(
                shape, fmt, named_backend(name), group.device, num_ranks=group.num_ranks
            )
            if can_run.ok:
                results += bench_backend(args, shape, weights, name, group, peaks)
            else:
                skipped.append({"backend": name, "weights_format": fmt, "reason": can_run.reason})
    return provenance(group, peaks) | {
        "results": [asdict(result) for result in results],
        "skipped": skipped,
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
    weights_format: str
    backend: str
    is_graph: bool
    tokens_per_rank: int
    error: float  # relative L2 distance to the specification
    median_us: float
    p99_us: float
    limit_us: float
    num_bytes: int  # of the rank with the most
    num_flops: int
    memory_share: float  # num_bytes / median / peak
    matmul_share: float


def bench_shape(name: str, experts_per_rank: int | None, num_ranks: int) -> MoEShape:
    """The geometry, or its shard: `experts_per_rank` experts on each rank, the same top-k."""
    shape = geometry(name)
    if experts_per_rank is None:
        return shape
    num_experts = experts_per_rank * num_ranks
    if not shape.top_k <= num_experts <= shape.num_experts:
        raise MoEEpConfigError(
            f"--experts-per-rank {experts_per_rank} on {num_ranks} ranks makes {num_experts} "
            f"experts; allowed for {name}: {shape.top_k} to {shape.num_experts}"
        )
    return replace(shape, num_experts=num_experts)


def random_weights(shape: MoEShape, fmt: str, group: EpGroup) -> MoEWeights:
    """This rank's experts with normal entries; activations keep the size of the tokens."""
    ids = owned_experts(shape.num_experts, group.num_ranks, group.rank)
    generator = torch.Generator(group.device).manual_seed(1 + group.rank)

    def normal(rows: int, cols: int) -> torch.Tensor:
        w = torch.empty(len(ids), rows, cols, dtype=torch.bfloat16, device=group.device)
        return w.normal_(std=cols**-0.5, generator=generator)

    dense = MoEWeights.from_dense(
        normal(shape.fc1_rows, shape.hidden),
        normal(shape.hidden, shape.intermediate),
        is_gated=shape.activation.is_gated,
    )
    weights = dense if fmt == "bf16" else dense.quantize(fmt)
    return replace(
        weights,
        num_experts=shape.num_experts,
        expert_ids=tuple(ids),
        rank=group.rank,
        num_ranks=group.num_ranks,
    )


def random_inputs(shape: MoEShape, num_tokens: int, group: EpGroup) -> MoEInputs:
    """Normal tokens, uniform routing: K different experts for each token."""
    generator = torch.Generator(group.device).manual_seed(1000 * num_tokens + group.rank)
    device = group.device
    x_TH = torch.randn(num_tokens, shape.hidden, device=device, generator=generator)
    scores_TE = torch.rand(num_tokens, shape.num_experts, device=device, generator=generator)
    top = scores_TE.topk(shape.top_k, dim=-1)
    return MoEInputs(x_TH.to(torch.bfloat16), top.indices, top.values.softmax(dim=-1))


def bench_backend(
    args: argparse.Namespace,
    shape: MoEShape,
    weights: MoEWeights,
    backend_name: str,
    group: EpGroup,
    peaks: Peaks,
) -> list[Result]:
    """Check and time one backend for every number of tokens. Collective."""
    layer = MoEEpLayer(
        shape,
        weights,
        max_tokens_per_rank=max(args.tokens),
        backend=named_backend(backend_name),
        group=group,
    )
    layer.warmup()
    results = []
    for num_tokens in args.tokens:
        inputs = random_inputs(shape, num_tokens, group)
        ids = all_gather(inputs.topk_ids, group)
        num_bytes, num_flops = most_work(shape, weights, ids, num_tokens, group)
        error = output_error(layer, shape, weights, inputs, group)
        seconds = time_forward(layer, inputs, group, args.iterations, args.graph)
        median = float(seconds.median())
        limit = max(num_bytes / peaks.bytes_per_s, num_flops / peaks.flops_per_s)
        results.append(
            Result(
                geometry=args.geometry,
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                num_ranks=group.num_ranks,
                weights_format=weights.weights_format,
                backend=backend_name,
                is_graph=args.graph,
                tokens_per_rank=num_tokens,
                error=error,
                median_us=1e6 * median,
                p99_us=1e6 * float(seconds.quantile(0.99)),
                limit_us=1e6 * limit,
                num_bytes=num_bytes,
                num_flops=num_flops,
                memory_share=num_bytes / median / peaks.bytes_per_s,
                matmul_share=num_flops / median / peaks.flops_per_s,
            )
        )
    layer.destroy()
    return results


def most_work(
    shape: MoEShape, weights: MoEWeights, ids: torch.Tensor, num_tokens: int, group: EpGroup
) -> tuple[int, int]:
    """(bytes, operations) of the rank with the most of each; the module says what is counted."""
    fmt = weight_format(weights.weights_format)
    expert_bytes = fmt.num_bytes(shape.fc1_rows, shape.hidden)
    expert_bytes += fmt.num_bytes(shape.hidden, shape.intermediate)
    rows_per_expert = ids.flatten().bincount(minlength=shape.num_experts)
    local = rows_per_expert[list(weights.expert_ids)]
    num_rows, num_hit = int(local.sum()), int((local > 0).sum())
    num_row_moves = 2 * num_rows + num_tokens * (shape.top_k + 1)
    work = torch.tensor(
        [
            num_hit * expert_bytes + 2 * shape.hidden * num_row_moves,
            2 * num_rows * shape.hidden * (shape.fc1_rows + shape.intermediate),
        ],
        device=group.device,
    )
    num_bytes, num_flops = all_reduce(work, dist.ReduceOp.MAX, group).tolist()
    return num_bytes, num_flops


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


def time_forward(
    layer: MoEEpLayer, inputs: MoEInputs, group: EpGroup, iterations: int, use_graph: bool
) -> torch.Tensor:
    """Seconds of each call on the slowest rank, FP64 [iterations]."""
    out = torch.empty_like(inputs.hidden_states)

    def call() -> None:
        layer.forward(inputs, out=out)

    with torch.inference_mode():
        for _ in range(3):
            call()
        if group.device.type == "cuda":
            seconds = _gpu_seconds(_captured(call) if use_graph else call, group, iterations)
        else:
            seconds = _cpu_seconds(call, group, iterations)
    times = torch.tensor(seconds, dtype=torch.float64, device=group.device)
    return all_reduce(times, dist.ReduceOp.MAX, group).cpu()


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _gpu_seconds(call: Callable[[], None], group: EpGroup, iterations: int) -> list[float]:
    l2_bytes = torch.cuda.get_device_properties(group.device).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=group.device)
    flag = torch.zeros(1, device=group.device)
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(iterations)] for _ in range(2)
    )
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        all_reduce(flag, dist.ReduceOp.SUM, group)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(group.device)
    return [s.elapsed_time(e) / 1e3 for s, e in zip(starts, ends, strict=True)]


def _cpu_seconds(call: Callable[[], None], group: EpGroup, iterations: int) -> list[float]:
    flush = torch.empty(CPU_FLUSH_BYTES, dtype=torch.uint8)
    flag = torch.zeros(1)
    seconds = []
    for _ in range(iterations):
        flush.zero_()
        all_reduce(flag, dist.ReduceOp.SUM, group)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def all_gather(tensor: torch.Tensor, group: EpGroup) -> torch.Tensor:
    """Tensors of equal shape [n, ...] of every rank, in rank order: [ranks * n, ...]."""
    if group.num_ranks == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.num_ranks)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return torch.cat(parts)


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp, group: EpGroup) -> torch.Tensor:
    """`tensor`, reduced in place over the ranks."""
    if group.num_ranks > 1:
        dist.all_reduce(tensor, op, group=group.process_group)
    return tensor


def provenance(group: EpGroup, peaks: Peaks) -> dict[str, object]:
    """What a figure must carry: device, date, commit, versions, peaks."""
    is_cuda = group.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(group.device) if is_cuda else cpu_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peaks": asdict(peaks),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "CPU")


def git_commit() -> str:
    """Short hash of the checkout this file lies in, '+' if it has changes; 'unknown' without."""
    command = ["git", "describe", "--always", "--dirty=+", "--match", ""]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def show(record: dict[str, object]) -> None:
    """Print the results to standard output, one line a case."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, 120)  # one line a case, also where output is a file
    peaks = record["peaks"]
    console.print(
        f"{record['device']}, {record['date']}, commit {record['commit']}, "
        f"torch {record['torch']}; peaks ({peaks['source']}): "
        f"{peaks['bytes_per_s'] / 1e12:.3g} TB/s, {peaks['flops_per_s'] / 1e12:.3g} TFLOP/s",
        markup=False,
        highlight=False,
    )
    table = Table(box=None)
    columns = "geometry ranks format backend tokens median p99 limit memory matmul error"
    for name in columns.split():
        table.add_column(name, justify="left" if name in ("geometry", "format") else "right")
    for result in record["results"]:
        table.add_row(
            f"{result['geometry']} E={result['num_experts']} K={result['top_k']}",
            str(result["num_ranks"]),
            result["weights_format"],
            result["backend"] + (" graph" if result["is_graph"] else ""),
            str(result["tokens_per_rank"]),
            f"{result['median_us']:.1f} us",
            f"{result['p99_us']:.1f} us",
            f"{result['limit_us']:.1f} us",
            f"{result['memory_share']:.1%}",
            f"{result['matmul_share']:.1%}",
            f"{result['error']:.1e}" + (" WRONG" if result["error"] > MAX_ERROR else ""),
        )
    console.print(table)
    for case in record["skipped"]:
        console.print(
            f"not run: {case['backend']} with {case['weights_format']}: {case['reason']}",
            markup=False,
        )

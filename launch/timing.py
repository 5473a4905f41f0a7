"""Times of a call on all ranks: L2 cold, ranks aligned, the slowest rank counts.

Before each call more memory than the caches hold is read (written, it would still go to memory
while the call runs), and a one-element all-reduce in the stream lets all ranks start together.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_ep.comm.group import EpGroup

# Read between calls on a CPU; larger than the last-level caches we know.
CPU_FLUSH_BYTES = 2**26
NUM_L2_FLUSHED = 8  # times its L2 cache on a GPU
NUM_WARM_CALLS = 10  # on a GPU, until clocks are up


def time_call(
    call: Callable[[], object],
    group: EpGroup,
    iterations: int,
    use_graph: bool,
    *,
    before: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Seconds of each call on the slowest rank, FP64 [iterations]. Collective.

    use_graph   replay a CUDA graph of the call; raises what the call raises in a capture
    before      done ahead of each call and not timed
    """
    before = before or (lambda: None)
    with torch.inference_mode():
        for _ in range(3):
            before()
            call()
        if group.device.type == "cuda":
            timed = captured(call) if use_graph else call
            seconds = _gpu_seconds(timed, before, group, iterations)
        else:
            seconds = _cpu_seconds(call, before, group, iterations)
    times = torch.tensor(seconds, dtype=torch.float64, device=group.device)
    return all_reduce(times, dist.ReduceOp.MAX, group).cpu()


def host_seconds(call: Callable[[], object], group: EpGroup, iterations: int) -> float:
    """Median seconds that a call keeps the host, with the GPU idle before it; the slowest rank's.
    Collective."""
    seconds = []
    with torch.inference_mode():
        for _ in range(iterations):
            torch.cuda.synchronize(group.device)
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize(group.device)
    median = torch.tensor(sorted(seconds)[iterations // 2], device=group.device)
    return float(all_reduce(median, dist.ReduceOp.MAX, group))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A replay of the call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def flush_buffer(device: torch.device) -> torch.Tensor:
    """What to `sum()` so that the L2 cache holds nothing of a call, in FP32."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(NUM_L2_FLUSHED * l2_bytes // 4, device=device)


def _gpu_seconds(
    call: Callable[[], object], before: Callable[[], object], group: EpGroup, iterations: int
) -> list[float]:
    flush = flush_buffer(group.device)
    flag = torch.zeros(1, device=group.device)
    num_calls = NUM_WARM_CALLS + iterations
    starts, ends = (
        [torch.cuda.Event(enable_timing=True) for _ in range(num_calls)] for _ in range(2)
    )
    for start, end in zip(starts, ends, strict=True):
        before()
        flush.sum()
        all_reduce(flag, dist.ReduceOp.SUM, group)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(group.device)
    pairs = list(zip(starts, ends, strict=True))[NUM_WARM_CALLS:]
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _cpu_seconds(
    call: Callable[[], object], before: Callable[[], object], group: EpGroup, iterations: int
) -> list[float]:
    flush = torch.zeros(CPU_FLUSH_BYTES // 4)
    flag = torch.zeros(1)
    seconds = []
    for _ in range(iterations):
        before()
        flush.sum()
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
    """`tensor`, reduced in place over the ranks; virtual ones are all here."""
    if group.num_ranks > 1 and not group.is_virtual:
        dist.all_reduce(tensor, op, group=group.process_group)
    return tensor

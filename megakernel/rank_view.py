"""What a CTA knows of its rank: who it is, and where the regions of `workspace.py` lie."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from moe_ep.comm.device import Watch, int32_ptr, int64_ptr
from moe_ep.comm.ptx import prefetch_l2
from moe_ep.megakernel import protocol
from moe_ep.megakernel.workspace import Workspace

CACHE_LINE = 128  # bytes, of L2


@dataclass(frozen=True)
class Threads:
    """The threads of a CTA that do a phase together. `barrier_id` 0 is that of the whole CTA."""

    idx: Int32
    num_threads: int
    barrier_id: int

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.num_threads)


@dataclass(frozen=True)
class RankInputs:
    """One rank's call, as addresses: x [T, H] BF16, topk_ids [T, K] int32 or int64, topk_weights
    [T, K] FP32, out [T, H] BF16, all contiguous. `num_tokens`: T, or -1 - code to refuse."""

    x: Int64
    topk_ids: Int64
    topk_weights: Int64
    out: Int64
    num_tokens: Int32


@dataclass(frozen=True)
class RankView:
    """A CTA's rank in this launch.

    layout   of the workspace, host integers
    heap     address of this rank's symmetric regions
    local    address of its local regions
    peers    shared memory, [num_ranks] Int64: address of each rank's symmetric regions from here
    step     number of this launch, counted from 1
    stamps   address of this CTA's time stamps, [len(Moment)] Int64, or None to take none
    """

    layout: Workspace
    rank: Int32
    cta: Int32
    num_ctas: Int32
    heap: Int64
    local: Int64
    peers: cute.Pointer
    step: Int32
    watch: Watch
    stamps: Int64 | None = None

    @cute.jit
    def mark(self, moment: cutlass.Constexpr, threads: Threads):
        """Where time stamps are asked for, and only there: the first thread notes the time."""
        if const_expr(self.stamps is not None):
            if threads.idx == 0:
                now = Int64(cute.arch.globaltimer())
                (int64_ptr(self.stamps) + int(moment)).store(now)

    def address(self, region: str) -> Int64:
        """Of this rank's own region."""
        base = self.heap if self._is_symmetric(region) else self.local
        return base + self.layout.offsets[region]

    def peer_address(self, rank: Int32, region: str) -> Int64:
        """Of that rank's symmetric region."""
        assert self._is_symmetric(region)
        return (self.peers + rank).load() + self.layout.offsets[region]

    def counter(self, index) -> Int64:
        """Address of a counter in this step's bank."""
        bank = protocol.bank(self.step) * self.layout.counters.num_counters
        return self.address("counters") + Int64(bank + index) * 4

    def clear_other_bank(self, threads: Threads) -> None:
        """Zero the counters that the next step uses; the last step's users ended with it."""
        num_counters = self.layout.counters.num_counters
        other = self.address("counters") + Int64(1 - protocol.bank(self.step)) * num_counters * 4
        stride = self.num_ctas * threads.num_threads
        _clear(other, self.cta * threads.num_threads + threads.idx, num_counters, stride)

    def _is_symmetric(self, region: str) -> bool:
        return any(r.name == region and r.scope == "symmetric" for r in self.layout.regions)


@cute.jit
def _clear(address: Int64, first: Int32, end, stride: Int32):
    for index in range(first, end, stride):
        (int32_ptr(address) + index).store(Int32(0))


@cute.jit
def load_peers(peers: cute.Pointer, table: Int64, num_ranks, threads: Threads):
    """Copy the heap addresses of all ranks into shared memory; the caller synchronises."""
    for rank in range(threads.idx, num_ranks, threads.num_threads):
        (peers + rank).store((int64_ptr(table) + rank).load())


@cute.jit
def load_step(local: Int64, offset: int) -> Int32:
    """Number of this launch: one more than the workspace has seen."""
    return int32_ptr(local + offset).load() + 1


@cute.jit
def prefetch(address: Int64, num_bytes: Int32, line: Int32):
    """One line of an array into L2, if it has so many."""
    if line * CACHE_LINE < num_bytes:
        prefetch_l2(address + Int64(line) * CACHE_LINE)

"""A flag sent to and fro between two ranks: what one signal through symmetric memory takes.

Thread 0 of each rank, system scope: rank 0 sets rank 1's flag and waits for its own, rank 1 waits
and answers. Two virtual ranks are two CTAs of one launch.
"""

from dataclasses import dataclass
from enum import IntEnum

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from moe_ep.comm.device import Watch, int32_ptr, int64_ptr
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.post_mortem import RECORD_WORDS, PostMortem
from moe_ep.comm.symmetric import heap_of
from moe_ep.megakernel.compile_cache import CompiledFunction, KernelBuild, compile_for_sm90, load

NUM_RANKS = 2
WARP_SIZE = 32


class Phase(IntEnum):
    FLAG = 1


@dataclass(frozen=True, kw_only=True)
class PingPongSpec:
    """num_launched   ranks in one launch: 1, or both of a virtual group"""

    num_launched: int


class PingPongKernel:
    def __init__(self, spec: PingPongSpec) -> None:
        self.num_launched = spec.num_launched

    @cute.jit
    def __call__(
        self,
        flags: Int64,
        local: Int64,
        record: Int64,
        timeout_ns: Int64,
        first_rank: Int32,
        first_step: Int32,
        num_rounds: Int32,
        stream: cuda.CUstream,
    ):
        """flags: [2] Int64, address of each rank's flag; local: [launched, 2] Int64, abort word and
        nanoseconds taken."""
        self.kernel(*(flags, local, record, timeout_ns, first_rank, first_step, num_rounds)).launch(
            grid=[self.num_launched, 1, 1],
            block=[WARP_SIZE, 1, 1],
            stream=stream,
            cooperative=True,
        )

    @cute.kernel
    def kernel(
        self,
        flags: Int64,
        local: Int64,
        record: Int64,
        timeout_ns: Int64,
        first_rank: Int32,
        first_step: Int32,
        num_rounds: Int32,
    ):
        thread_idx, _, _ = cute.arch.thread_idx()
        launched, _, _ = cute.arch.block_idx()
        rank = first_rank + launched
        own_local = local + Int64(launched) * 16
        gave_up = cutlass.memory.SmemAllocator().allocate_array(Int32)
        watch = Watch(
            is_bounded=True,
            rank=rank,
            step=first_step,
            abort=own_local,
            record=record + Int64(launched) * (RECORD_WORDS * 4),
            timeout_ns=timeout_ns,
            gave_up=gave_up,
        )
        if thread_idx == 0:
            own = (int64_ptr(flags) + rank).load()
            peer = (int64_ptr(flags) + 1 - rank).load()
            alive = Int32(1)
            start = Int64(cute.arch.globaltimer())
            for number in range(num_rounds):
                step = first_step + number
                if alive == 1:
                    if rank == 0:
                        self.set(peer, step)
                    alive = watch.wait_reached(own, step, Phase.FLAG, 1 - rank, scope="sys")
                    if (rank == 1) & (alive == 1):
                        self.set(peer, step)
            (int64_ptr(own_local) + 1).store(Int64(cute.arch.globaltimer()) - start)

    @cute.jit
    def set(self, flag: Int64, step: Int32):
        cute.arch.store(int32_ptr(flag), step, sem="release", scope="sys")


def compile_ping_pong(spec: PingPongSpec) -> CompiledFunction:
    addresses, sizes = [Int64(0)] * 4, [Int32(1)] * 3
    return compile_for_sm90(PingPongKernel(spec), *addresses, *sizes, make_fake_stream())


def ping_pong_build(spec: PingPongSpec) -> KernelBuild:
    return KernelBuild("ping_pong", spec, compile_ping_pong)


class PingPong:
    """The kernel and its flags, for a group of two ranks, virtual or real. Collective.

    Raises `MoEEpConfigError` for a group of another size.
    """

    def __init__(self, group: EpGroup, timeout_s: float = 10.0) -> None:
        if group.num_ranks != NUM_RANKS:
            raise MoEEpConfigError(
                f"a ping-pong is between {NUM_RANKS} ranks, the group has {group.num_ranks}"
            )
        num_launched = NUM_RANKS if group.is_virtual else 1
        self._kernel = load(ping_pong_build(PingPongSpec(num_launched=num_launched)))
        self._group, self._heap = group, heap_of(group)
        self._buffer = self._heap.allocate(group, "ping-pong", 4)
        self._flags = torch.tensor(self._buffer.addresses, device=group.device)
        self._local = torch.zeros(num_launched, 2, dtype=torch.int64, device=group.device)
        self._post_mortem = PostMortem(num_launched)
        self._timeout_ns, self._step = int(timeout_s * 1e9), 1

    def round_trip_us(self, num_rounds: int) -> float:
        """Microseconds of one round trip, the mean of `num_rounds`. Collective; waits for the GPU.

        Raises `MoEEpTimeoutError` naming the peer that did not answer.
        """
        first_rank = 0 if self._group.is_virtual else self._group.rank
        self._kernel(
            *(self._flags.data_ptr(), self._local.data_ptr(), self._post_mortem.address),
            *(self._timeout_ns, first_rank, self._step, num_rounds),
            cuda.CUstream(torch.cuda.current_stream(self._group.device).cuda_stream),
        )
        self._step += num_rounds
        torch.cuda.synchronize(self._group.device)
        self._post_mortem.check({int(Phase.FLAG): "ping-pong"}, top_k=1)
        return float(self._local[0, 1]) / num_rounds / 1e3

    def destroy(self) -> None:
        self._heap.free(self._buffer)

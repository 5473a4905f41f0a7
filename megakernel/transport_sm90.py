"""Dispatch and combine as a kernel of their own: the first rung of the mega kernel, and its test.

    terms[t, k] = bf16(x[t] * scale[topk_ids[t, k]])      computed where the expert lives
    out[t]      = bf16(sum over k of topk_weights[t, k] * terms[t, k])

Several virtual ranks may share one launch on one GPU: rank = CTA / ctas_per_rank, each with its own
heap and local regions in plain memory, so that every protocol of 2, 4 or 8 ranks runs without a
second GPU. All CTAs must be resident: the launch is cooperative.

    warps  role       waits on                         signals
    all    stage      -                                routed; staged, arrived
    all    scan       routed of all ranks              (shared memory)
    0      bring      arrived, src_meta of its rows    tokens_arrived
    1..7   scale      src_meta, tokens_arrived         -
    all    drain      drained of all ranks             finished, drained
    all    reduce     -                                -

Shared memory: `DispatchStorage`, then two rows of H BF16.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from moe_ep.comm import ptx
from moe_ep.comm.device import Watch, int32_ptr, int64_ptr
from moe_ep.comm.post_mortem import RECORD_WORDS
from moe_ep.megakernel import protocol, schedule
from moe_ep.megakernel.combine import Combine
from moe_ep.megakernel.compile_cache import CompiledFunction, KernelBuild, compile_for_sm90
from moe_ep.megakernel.dispatch import (
    NUM_LOADS_IN_FLIGHT,
    NUM_ROW_BUFFERS,
    WARP_SIZE,
    Dispatch,
)
from moe_ep.megakernel.protocol import Moment, Phase
from moe_ep.megakernel.rank_view import RankInputs, RankView, Threads, load_peers, load_step
from moe_ep.megakernel.routing import Routing
from moe_ep.megakernel.workspace import Workspace

NUM_THREADS = 256
NUM_SCALE_WARPS = NUM_THREADS // WARP_SIZE - 1
VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class TransportSpec:
    """What the compiled kernel depends on.

    num_experts   E over all ranks
    num_launched  ranks in one launch: 1, or all of a virtual group
    is_bounded    whether waits end when the time is up
    combines      False ends the kernel after the pull: for measuring dispatch alone
    has_stamps    whether each CTA notes when it reached each `protocol.Moment`
    """

    layout: Workspace
    num_experts: int
    num_launched: int = 1
    ids_are_int64: bool = False
    is_bounded: bool = True
    combines: bool = True
    has_stamps: bool = False


class TransportSm90:
    """The kernel of one `TransportSpec`."""

    def __init__(self, spec: TransportSpec) -> None:
        self.spec = spec
        self.layout = spec.layout
        self.routing = Routing(spec.layout, spec.num_experts, spec.ids_are_int64)
        self.dispatch = Dispatch(self.routing)
        self.combine = Combine(self.dispatch)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        out: Int64,
        num_tokens: Int64,
        scale: Int64,
        heaps: Int64,
        local: Int64,
        record: Int64,
        timeout_ns: Int64,
        stamps: Int64,
        first_rank: Int32,
        ctas_per_rank: Int32,
        late_rank: Int32,
        late_ns: Int64,
        stream: cuda.CUstream,
    ):
        """Addresses: inputs of the first launched rank, those of the next a capacity later.

        num_tokens   [launched] Int32 on the device
        scale        [E] FP32
        heaps        [R] Int64, address of every rank's symmetric regions
        local        local regions of the first launched rank, the next `num_bytes("local")` later
        record       its post-mortem record
        stamps       [CTAs, len(Moment)] Int64, unused without `has_stamps`
        late_rank    starts `late_ns` nanoseconds late, or if that is negative never: for tests
        """
        row_words = self.dispatch.row_bytes // 2 * NUM_ROW_BUFFERS

        @cute.struct
        class SharedStorage:
            dispatch: self.dispatch.storage()
            rows: cute.struct.Align[cute.struct.MemRange[BFloat16, row_words], 128]

        self.shared_storage = SharedStorage
        self.kernel(
            *(x, topk_ids, topk_weights, out, num_tokens, scale, heaps, local, record),
            *(timeout_ns, stamps, first_rank, ctas_per_rank, late_rank, late_ns),
        ).launch(
            grid=[ctas_per_rank * self.spec.num_launched, 1, 1],
            block=[NUM_THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            cooperative=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        out: Int64,
        num_tokens: Int64,
        scale: Int64,
        heaps: Int64,
        local: Int64,
        record: Int64,
        timeout_ns: Int64,
        stamps: Int64,
        first_rank: Int32,
        ctas_per_rank: Int32,
        late_rank: Int32,
        late_ns: Int64,
    ):
        thread_idx, _, _ = cute.arch.thread_idx()
        cta_idx, _, _ = cute.arch.block_idx()
        layout = self.layout
        shared = cutlass.memory.SmemAllocator().allocate(self.shared_storage)
        storage = shared.dispatch
        threads = Threads(thread_idx, NUM_THREADS, 0)

        launched = cta_idx // ctas_per_rank
        rank = first_rank + launched
        rank_local = local + Int64(launched) * layout.num_bytes("local")
        tokens = Int64(launched) * layout.max_tokens_per_rank
        id_bytes = self.routing.id_bytes
        inputs = RankInputs(
            x=x + tokens * self.dispatch.row_bytes,
            topk_ids=topk_ids + tokens * (layout.top_k * id_bytes),
            topk_weights=topk_weights + tokens * (layout.top_k * 4),
            out=out + tokens * self.dispatch.row_bytes,
            num_tokens=(int32_ptr(num_tokens) + launched).load(),
        )
        step = load_step(rank_local, layout.offsets["step"])
        watch = Watch(
            is_bounded=self.spec.is_bounded,
            rank=rank,
            step=step,
            abort=rank_local + layout.offsets["abort"],
            record=record + Int64(launched) * (RECORD_WORDS * 4),
            timeout_ns=timeout_ns,
            gave_up=storage.gave_up.data_ptr(),
        )
        view = RankView(
            layout=layout,
            rank=rank,
            cta=cta_idx % ctas_per_rank,
            num_ctas=ctas_per_rank,
            heap=(int64_ptr(heaps) + rank).load(),
            local=rank_local,
            peers=storage.peers.data_ptr(),
            step=step,
            watch=watch,
            stamps=stamps + Int64(cta_idx) * (len(Moment) * 8) if self.spec.has_stamps else None,
        )
        view.mark(Moment.STARTED, threads)
        takes_part = Int32(1)
        if rank == late_rank:
            start = Int64(cute.arch.globaltimer())
            while cute.arch.globaltimer() - start < late_ns:
                pass
            if late_ns < 0:
                takes_part = Int32(0)
        if takes_part == 1:
            self.run(view, inputs, storage, shared.rows.data_ptr().toint(), scale, heaps, threads)

    @cute.jit
    def run(self, view, inputs, storage, buffers: Int32, scale: Int64, heaps: Int64, threads):
        if threads.idx == 0:
            self.dispatch.init(storage)
        load_peers(view.peers, heaps, self.layout.num_ranks, threads)
        view.clear_other_bank(threads)
        threads.sync()
        if const_expr(self.layout.num_ranks > 1):
            self.dispatch.stage(view, inputs, threads)
        view.mark(Moment.STAGED, threads)
        self.dispatch.wait(view, storage, threads)
        view.mark(Moment.ROUTED, threads)
        self.dispatch.scan(view, inputs, storage, threads)
        view.mark(Moment.SCANNED, threads)

        self.dispatch.bring_few(view, inputs, storage, threads)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            self.dispatch.bring_many(view, inputs, storage, buffers)
            view.mark(Moment.BROUGHT, threads)
        else:
            if const_expr(self.spec.combines):
                self.scale_rows(view, inputs, storage, scale, warp - 1)
        self.combine.drain(view, storage, threads)
        view.mark(Moment.DRAINED, threads)
        if const_expr(self.spec.combines):
            self.combine.reduce(view, inputs, storage, threads)
            view.mark(Moment.ENDED, threads)

    @cute.jit
    def scale_rows(self, view, inputs, storage, scale: Int64, warp: Int32):
        """One warp in place of the GEMMs: its rows' terms, to their tokens' owners."""
        num_rows = storage.num_rows.data_ptr().load()
        first = view.cta * NUM_SCALE_WARPS + warp
        share, extra = divmod(self.spec.num_experts, self.layout.num_ranks)
        first_expert = view.rank * share + cutlass.min(view.rank, Int32(extra))
        for row in range(first, num_rows, view.num_ctas * NUM_SCALE_WARPS):
            entry = view.address("src_meta") + Int64(row) * 8
            alive, meta = view.watch.wait_tag(entry, view.step, Phase.ROUTE, view.rank)
            if Int32(cute.arch.vote_all_sync(alive == 1)) == 1:
                index = meta & protocol.SLOT_MASK
                capacity, top_k = self.layout.max_tokens_per_rank, self.layout.top_k
                source, token, slot = protocol.slot_source(index, capacity, top_k)
                loaded = self.routing.routed_id(view, inputs, source, token * top_k + slot)
                expert = self.routing.local_expert(view, loaded)
                tile, tile_rows = self.dispatch.tile_of(storage, expert, row)
                arrived = view.counter(self.layout.counters.tokens_arrived + tile)
                view.watch.wait_reached(arrived, tile_rows, Phase.TOKENS, source)
                scales = cute.make_ptr(Float32, scale, cute.AddressSpace.gmem)
                factor = (scales + first_expert + expert).load()
                row_bytes = self.dispatch.row_bytes
                pool = view.address("pool") + Int64(row) * row_bytes
                slots = Int64(token * top_k + slot) * row_bytes
                terms = view.peer_address(source, "terms") + slots
                self.scale_row(pool, terms, factor)

    @cute.jit
    def scale_row(self, source: Int64, target: Int64, factor: Float32):
        num_vectors, stride = self.layout.hidden // 8, WARP_SIZE
        for base in range(cute.arch.lane_idx(), num_vectors, stride * NUM_LOADS_IN_FLIGHT):
            loaded = []
            for i in cutlass.range_constexpr(NUM_LOADS_IN_FLIGHT):
                # Past the end the first vector is read again and not stored.
                vector = base + i * stride
                vector = schedule.select(vector < num_vectors, vector, base)
                loaded.append(ptx.ld_global_v4(source + Int64(vector) * VECTOR_BYTES))
            for i in cutlass.range_constexpr(NUM_LOADS_IN_FLIGHT):
                vector = base + i * stride
                if vector < num_vectors:
                    ptx.st_global(
                        target + Int64(vector) * VECTOR_BYTES, scaled_words(loaded[i], factor)
                    )


def scaled_words(words: list, factor: Float32) -> list:
    """Eight BF16 times FP32, each rounded to BF16."""
    scaled = []
    for word in words:
        low = ptx.mul_rn(ptx.as_float(word << 16), factor)
        high = ptx.mul_rn(ptx.as_float(word & 0xFFFF0000), factor)
        scaled.append(ptx.cvt_bf16x2(low, high))
    return scaled


def compile_transport(spec: TransportSpec) -> CompiledFunction:
    addresses, sizes = [Int64(0)] * 11, [Int32(1)] * 3
    return compile_for_sm90(TransportSm90(spec), *addresses, *sizes, Int64(0), make_fake_stream())


def transport_build(spec: TransportSpec) -> KernelBuild:
    return KernelBuild("transport", spec, compile_transport)

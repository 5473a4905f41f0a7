"""A whole MoE layer in one persistent launch on Hopper: dispatch, FC1, FC2, combine.

    hidden[p, :]   = activation(scale_e * x[token(p), :] W13_e^T + bias_e)           BF16 [P, I]
    terms[t, k, :] = scale_e * hidden[p(t, k), :] W2_e^T + bias_e                    BF16 [T, K, H]
    out[t, :]      = sum over k of topk_weights[t, k] * terms[t, k, :], slot order   BF16 [T, H]

p runs over the pool, one row for each slot of any rank whose expert e is here, sorted by expert. A
step follows `protocol.py` (phases A to G), the order of work is `schedule.fused_items`.

role      warps       registers  waits on                           signals
all       20          launch     routed (peers)                     routed, staged, arrived
weights   0           producer   ring empty, record empty           ring full, record full
tokens    1           producer   record full, tokens_arrived or     ring full, record empty
                                 fc1_done, ring empty
dispatch  2           producer   arrived (peers), src_meta,         src_meta, tokens_arrived,
                                 bulk copies                        lent stages empty, NAME_BROUGHT
spare     3           producer   (before they part: FC1's first weights into L2)
math      4 a group   math       of few tokens or the first rows:   tokens_arrived, src_meta;
                                 arrived (peers), src_meta;         ring full (`first_stages`);
                                 ring full, record full;            ring empty, record empty,
                                 at the end finished, drained       fc1_done; finished, drained

All warps stage, wait and scan before they part: every CTA then knows rows, place and tiles of each
expert, so that each finds the items by itself.

pipeline        producer -> consumer        full                empty           depth
ring            weights, tokens -> math     2 arrivals + bytes  math warps      knobs.stages
records         weights -> tokens, math     1                   math warps + 1  2
tokens_arrived  dispatch -> tokens          rows of the tile    next step       one a token tile
fc1_done        math -> tokens              slices * warps      next step       one a token tile

shared memory   barriers; item records; `DispatchStorage`; ring tokens [stages][width][128] BF16;
                ring weights [stages][slices][warpgroups][tile]; row buffers of dispatch. Where
                these do not fit they lie in the ring's last stages, whose empty barriers open when
                this CTA has brought its rows.

A rank that is given up (time-out) goes on to its end without waiting: every ring fills and drains.
What it computes is void and nobody sums it, as it never signals that it has drained.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from moe_ep.comm.device import Watch, count, int32_ptr, int64_ptr
from moe_ep.comm.ptx import EVICT_FIRST, EVICT_NORMAL
from moe_ep.megakernel import protocol, schedule
from moe_ep.megakernel.combine import Combine
from moe_ep.megakernel.combine_tp import CombineTp
from moe_ep.megakernel.compile_cache import CompiledFunction, compile_for_sm90
from moe_ep.megakernel.decode import make_decoder
from moe_ep.megakernel.dispatch import WARP_SIZE, Dispatch
from moe_ep.megakernel.epilogue_sm90 import EpilogueSm90
from moe_ep.megakernel.first_stages import FirstStages
from moe_ep.megakernel.item_list import (
    FIRST_ROW,
    FIRST_SLICE,
    NUM_ROWS,
    NUM_SLICES,
    TILE,
    ItemList,
)
from moe_ep.megakernel.item_ring import (
    END,
    EXPERT,
    NUM_BARS,
    NUM_RECORDS,
    RECORD_WORDS,
    ItemRing,
)
from moe_ep.megakernel.knobs import THREADS_PER_WARPGROUP
from moe_ep.megakernel.mainloop_sm90 import MainloopSm90
from moe_ep.megakernel.mega_spec import MAX_LENDING_WIDTH, MegaSpec
from moe_ep.megakernel.protocol import Moment, Phase
from moe_ep.megakernel.rank_view import (
    RankInputs,
    RankView,
    Threads,
    load_peers,
    load_step,
    prefetch,
)
from moe_ep.megakernel.routing import Routing
from moe_ep.megakernel.tiles import num_slabs

WEIGHTS_WARP, TOKENS_WARP, DISPATCH_WARP, SPARE_WARP = 0, 1, 2, 3
WARPS_PER_WARPGROUP = 4
# Named barriers; 0 is that of the whole CTA.
NAME_MATH, NAME_BROUGHT = 1, 2
SLABS_AHEAD = 3  # of an item's end, when the next one is taken: about 3 us
RECORD_BYTES = 64  # of a post-mortem record


class MegaMoESm90:
    """The kernel of one `MegaSpec`."""

    def __init__(self, spec: MegaSpec) -> None:
        self.spec = spec
        self.layout = spec.layout
        self.knobs = spec.knobs
        self.fc1, self.fc2 = spec.fc1, spec.fc2
        self.mainloop = MainloopSm90(spec.weights_format, spec.knobs)
        self.routing = Routing(spec.layout, spec.num_experts, spec.ids_are_int64)
        self.dispatch = Dispatch(self.routing)
        slots_in_flight = 32 if spec.knobs.math_registers > 128 else 16
        self.combine = Combine(self.dispatch, slots_in_flight)
        self.combine_tp = CombineTp(self.dispatch)
        self.epilogues = tuple(
            EpilogueSm90(
                gemm.activation, gemm.num_channels, has_bias=gemm.has_bias, is_fp32=gemm.is_fp32
            )
            for gemm in (spec.fc1, spec.fc2)
        )
        self.fc1_slabs = num_slabs(spec.layout.hidden)
        self.fc2_slabs = num_slabs(spec.layout.intermediate)
        self.first_stages = FirstStages(spec, self.dispatch, self.fc1_slabs)
        self.num_math_warps = WARPS_PER_WARPGROUP * spec.knobs.num_math_warpgroups
        self.num_math_threads = THREADS_PER_WARPGROUP * spec.knobs.num_math_warpgroups
        self.item_list = ItemList(spec)
        self.items = ItemRing(2 * spec.knobs.stages, TILE + 1, self.num_math_warps + 1)
        self.tile_slices = self.fc1.num_slices * self.num_math_warps  # fc1_done of a finished tile

    @cute.jit
    def __call__(
        self,
        x: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        out: Int64,
        token_counts: Int64,
        w13: Int64,
        w13_alpha: Int64,
        b13: Int64,
        w2: Int64,
        w2_alpha: Int64,
        b2: Int64,
        heaps: Int64,
        local: Int64,
        record: Int64,
        timeout_ns: Int64,
        late_ns: Int64,
        stamps: Int64,
        num_tokens: Int32,
        late_rank: Int32,
        first_rank: Int32,
        ctas_per_rank: Int32,
        zero: Int32,
        stream: cuda.CUstream,
    ):
        """Addresses; of several launched ranks those of the first, the next rank's a capacity (x,
        topk_ids, topk_weights, out) or its experts (weights) later.

        num_tokens   T of the one launched rank, or -1 - code for one that refuses
        token_counts [launched] Int32 on the device: the same of several ranks
        heaps        [R] Int64, address of every rank's symmetric regions
        local        local regions of the first launched rank, the next `num_bytes("local")` later
        record       its post-mortem record
        stamps       [CTAs, len(Moment)] Int64, time stamps of a build that takes them
        late_rank    virtual ranks only: starts `late_ns` late, or if that is negative never
        zero         0 at run time: it keeps constants in registers
        """
        ring_layout = self.mainloop.stage_layout()
        copies = []
        for region, columns in (
            ("pool", self.layout.hidden),
            ("hidden", self.layout.intermediate),
        ):
            copies.append(self.mainloop.token_copies(self.rows_of(local, region, columns)))
        (pool_small, pool_small_rows), (pool_wide, pool_wide_rows) = copies[0]
        (hidden_small, hidden_small_rows), (hidden_wide, hidden_wide_rows) = copies[1]
        stages = self.knobs.stages
        own_buffer_bytes = 16 if self.spec.num_lent_stages else self.spec.row_buffer_bytes

        @cute.struct
        class SharedStorage:
            # ring full, ring empty; record full, record empty
            bars: cute.struct.MemRange[Int64, 2 * stages + NUM_BARS]
            records: cute.struct.MemRange[Int32, NUM_RECORDS * RECORD_WORDS]
            dispatch: self.dispatch.storage()
            tokens: cute.struct.Align[
                cute.struct.MemRange[BFloat16, cute.cosize(ring_layout)], 1024
            ]
            weights: cute.struct.Align[
                cute.struct.MemRange[Uint32, stages * self.mainloop.stage_words], 128
            ]
            rows: cute.struct.Align[cute.struct.MemRange[Uint32, own_buffer_bytes // 4], 128]

        self.storage = SharedStorage
        self.kernel(
            *(pool_small, pool_small_rows, pool_wide, pool_wide_rows),
            *(hidden_small, hidden_small_rows, hidden_wide, hidden_wide_rows),
            *(x, topk_ids, topk_weights, out, token_counts),
            *(w13, w13_alpha, b13, w2, w2_alpha, b2),
            *(heaps, local, record, timeout_ns, late_ns, stamps),
            *(num_tokens, late_rank, first_rank, ctas_per_rank, zero),
            self.mainloop.make_mmas(),
        ).launch(
            grid=[ctas_per_rank * self.spec.num_launched, 1, 1],
            block=[self.knobs.num_threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            cooperative=True,
        )

    def rows_of(self, local: Int64, region: str, columns: int):
        """BF16 (pool rows, columns, launched ranks) of a local region."""
        pointer = cute.make_ptr(
            BFloat16,
            local + self.layout.offsets[region],
            cute.AddressSpace.gmem,
            assumed_align=128,
        )
        shape = (self.layout.num_pool_rows, columns, self.spec.num_launched)
        strides = (columns, 1, self.layout.num_bytes("local") // 2)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))

    @cute.kernel
    def kernel(
        self,
        pool_small: cute.CopyAtom,
        pool_small_rows: cute.Tensor,
        pool_wide: cute.CopyAtom,
        pool_wide_rows: cute.Tensor,
        hidden_small: cute.CopyAtom,
        hidden_small_rows: cute.Tensor,
        hidden_wide: cute.CopyAtom,
        hidden_wide_rows: cute.Tensor,
        x: Int64,
        topk_ids: Int64,
        topk_weights: Int64,
        out: Int64,
        token_counts: Int64,
        w13: Int64,
        w13_alpha: Int64,
        b13: Int64,
        w2: Int64,
        w2_alpha: Int64,
        b2: Int64,
        heaps: Int64,
        local: Int64,
        record: Int64,
        timeout_ns: Int64,
        late_ns: Int64,
        stamps: Int64,
        num_tokens: Int32,
        late_rank: Int32,
        first_rank: Int32,
        ctas_per_rank: Int32,
        zero: Int32,
        mmas: list,
    ):
        thread_idx, _, _ = cute.arch.thread_idx()
        cta_idx, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.storage)
        bars = shared.bars.data_ptr()
        layout = self.layout

        launched = cta_idx // ctas_per_rank
        rank = first_rank + launched
        rank_local = local + Int64(launched) * layout.num_bytes("local")
        tokens = Int64(launched) * layout.max_tokens_per_rank
        id_bytes = self.routing.id_bytes
        if const_expr(self.spec.num_launched > 1):
            num_tokens = (int32_ptr(token_counts) + launched).load()
        inputs = RankInputs(
            x=x + tokens * self.dispatch.row_bytes,
            topk_ids=topk_ids + tokens * (layout.top_k * id_bytes),
            topk_weights=topk_weights + tokens * (layout.top_k * 4),
            out=out + tokens * self.dispatch.row_bytes,
            num_tokens=num_tokens,
        )
        # The first cold reads, together: ids delay the weights, and x would come behind those.
        prefetch(inputs.topk_ids, num_tokens * (layout.top_k * id_bytes), thread_idx)
        line = cta_idx % ctas_per_rank * self.knobs.num_threads + thread_idx
        prefetch(inputs.x, num_tokens * self.dispatch.row_bytes, line)
        step = load_step(rank_local, layout.offsets["step"])
        view = RankView(
            layout=layout,
            rank=rank,
            cta=cta_idx % ctas_per_rank,
            num_ctas=ctas_per_rank,
            heap=(int64_ptr(heaps) + rank).load(),
            local=rank_local,
            peers=shared.dispatch.peers.data_ptr(),
            step=step,
            watch=Watch(
                is_bounded=self.spec.is_bounded,
                rank=rank,
                step=step,
                abort=rank_local + layout.offsets["abort"],
                record=record + Int64(launched) * RECORD_BYTES,
                timeout_ns=timeout_ns,
                gave_up=shared.dispatch.gave_up.data_ptr(),
            ),
            stamps=stamps + Int64(cta_idx) * (8 * len(Moment)) if self.spec.takes_stamps else None,
        )
        takes_part = Int32(1)
        if const_expr(self.spec.num_launched > 1):
            if rank == late_rank:
                start = Int64(cute.arch.globaltimer())
                while cute.arch.globaltimer() - start < late_ns:
                    pass
                if late_ns < 0:
                    takes_part = Int32(0)
        if takes_part == 1:
            if warp == WEIGHTS_WARP:
                self.init_barriers(bars)
                for atom in (pool_small, pool_wide, hidden_small, hidden_wide):
                    cpasync.prefetch_descriptor(atom)
            first_expert = self.experts_before(rank) - self.experts_before(first_rank)
            if const_expr(self.knobs.max_tile_width <= MAX_LENDING_WIDTH):
                if (warp == SPARE_WARP) & (num_tokens * layout.top_k >= layout.num_local_experts):
                    self.prefetch_weights(view, w13 + Int64(first_expert) * self.fc1.expert_bytes)
            self.route(view, inputs, shared.dispatch, heaps, thread_idx)
            weights = (
                w13 + Int64(first_expert) * self.fc1.expert_bytes,
                w2 + Int64(first_expert) * self.fc2.expert_bytes,
            )
            factors = (
                *(w13_alpha + Int64(first_expert) * 8, w2_alpha + Int64(first_expert) * 8),
                b13 + Int64(first_expert) * (4 * self.fc1.num_weight_rows),
                b2 + Int64(first_expert) * (4 * self.fc2.num_weight_rows),
            )
            warpgroup_idx = cute.arch.make_warp_uniform(thread_idx // THREADS_PER_WARPGROUP)
            if warpgroup_idx == 0:
                cute.arch.setmaxregister_decrease(self.knobs.producer_registers)
                if warp == WEIGHTS_WARP:
                    self.weights_role(view, shared, bars, weights)
                elif warp == TOKENS_WARP:
                    of_rank = (None, None, launched)
                    copies = (
                        [
                            (pool_small, pool_small_rows[of_rank]),
                            (pool_wide, pool_wide_rows[of_rank]),
                        ],
                        [
                            (hidden_small, hidden_small_rows[of_rank]),
                            (hidden_wide, hidden_wide_rows[of_rank]),
                        ],
                    )
                    self.tokens_role(view, shared, bars, copies)
                elif warp == DISPATCH_WARP:
                    self.dispatch_role(view, inputs, shared, bars)
            else:
                cute.arch.setmaxregister_increase(self.knobs.math_registers)
                decoder = make_decoder(self.spec.weights_format, zero)
                threads = Threads(
                    thread_idx - THREADS_PER_WARPGROUP, self.num_math_threads, NAME_MATH
                )
                self.dispatch.bring_few(view, inputs, shared.dispatch, threads)
                self.dispatch.bring_first(view, inputs, shared.dispatch, threads)
                self.math_role(
                    *(view, inputs, shared, bars, decoder, mmas, factors),
                    *(warpgroup_idx - 1, thread_idx % THREADS_PER_WARPGROUP),
                )
                cute.arch.barrier(
                    barrier_id=NAME_BROUGHT, number_of_threads=self.num_math_threads + WARP_SIZE
                )
                view.mark(Moment.WORKED, threads)
                combine = (view, inputs, shared.dispatch, threads)
                if const_expr(layout.is_tp):
                    self.combine_tp.send_parts(*combine)
                else:
                    self.combine.prefetch(*combine)
                self.combine.drain(view, shared.dispatch, threads)
                view.mark(Moment.DRAINED, threads)
                if const_expr(layout.is_tp):
                    self.combine_tp.reduce(*combine)
                else:
                    self.combine.reduce(*combine)
                view.mark(Moment.ENDED, threads)

    # ---- all warps

    @cute.jit
    def init_barriers(self, bars):
        """Warp 0: arrival counts of both rings.

        The empty barriers of lent stages are one phase ahead: their first wait, which elsewhere
        passes at once, ends with the dispatch warp's arrivals.
        """
        stages = self.knobs.stages
        with cute.arch.elect_one():
            self.mainloop.init(bars)
            self.items.init(bars)
            for i in cutlass.range_constexpr(self.spec.num_lent_stages):
                cute.arch.mbarrier_arrive(
                    bars + 2 * stages - 1 - i, arrive_count=self.num_math_warps
                )
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def route(self, view, inputs, storage, heaps: Int64, thread_idx: Int32):
        """All threads: phases A to C up to what the CTA needs to know of its rank's experts."""
        threads = Threads(thread_idx, self.knobs.num_threads, 0)
        view.mark(Moment.STARTED, threads)
        if thread_idx == 0:
            self.dispatch.init(storage)
        load_peers(view.peers, heaps, self.layout.num_ranks, threads)
        view.clear_other_bank(threads)
        threads.sync()
        if const_expr(self.layout.num_ranks > 1):
            self.dispatch.stage(view, inputs, threads)
        self.dispatch.wait(view, storage, threads)
        view.mark(Moment.ROUTED, threads)
        self.dispatch.scan(view, inputs, storage, threads)
        view.mark(Moment.SCANNED, threads)

    @cute.jit
    def prefetch_weights(self, view, w13: Int64):
        """One warp: the beginning of one of FC1's items. Memory is idle until routing is known, and
        most experts are hit where there are as many slots."""
        row_items = self.fc1.grid(1).row_items
        item = view.cta * (self.layout.num_local_experts * row_items) // view.num_ctas
        self.mainloop.prefetch_weights(
            w13 + Int64(item // row_items) * self.fc1.expert_bytes,
            item % row_items * self.knobs.slices_per_item,
            Int32(self.fc1.num_slices),
            self.fc1_slabs,
        )

    def experts_before(self, rank: Int32):
        """Experts that the ranks before `rank` hold together."""
        if self.layout.is_tp:
            return rank * self.spec.num_experts
        share, extra = divmod(self.spec.num_experts, self.layout.num_ranks)
        return rank * share + cutlass.min(rank, Int32(extra))

    # ---- warp 0

    @cute.jit
    def weights_role(self, view, shared, bars, weights):
        """Weight warp: takes items, publishes their records, streams their weights."""
        lane = cute.arch.lane_idx()
        work = self.item_list.measure(shared.dispatch, view.num_ctas)
        next_item = int32_ptr(view.counter(self.layout.counters.next_item))
        stage, phase = Int32(0), Int32(1)
        record, record_phase = Int32(0), Int32(1)
        position = Int32(view.cta)
        is_first = Int32(1)
        while position < work.num_listed:
            found = self.item_list.find(shared.dispatch, work, position, lane)
            expert, gemm, first_slice, num_slices, _, _, _ = found
            self.items.publish(shared, record, record_phase, found)
            record, record_phase = self.items.advance(record, record_phase)
            matrix = weights[0] + Int64(expert) * self.fc1.expert_bytes
            slabs = Int32(self.fc1_slabs)
            if gemm == 1:
                matrix = weights[1] + Int64(expert) * self.fc2.expert_bytes
                slabs = Int32(self.fc2_slabs)
            policy = Int64(EVICT_FIRST)
            if const_expr(self.knobs.num_math_warpgroups == 2):
                if self.item_list.num_tiles(shared.dispatch, expert) > 1:
                    policy = Int64(EVICT_NORMAL)  # each of the tiles reads them
            most = cutlass.max(slabs - SLABS_AHEAD, Int32(0))
            begun = Int32(0)
            if is_first == 1:
                # Tokens are on their way through the same memory.
                begun = cutlass.min(most, self.knobs.stages)
                stage, phase = self.mainloop.load_weights(
                    bars, shared.weights.data_ptr(), matrix, first_slice, num_slices, slabs, stage,
                    phase, 0, begun, is_paced=True, policy=policy,
                )  # fmt: skip
            is_first = Int32(0)
            stage, phase = self.mainloop.load_weights(
                bars, shared.weights.data_ptr(), matrix, first_slice, num_slices, slabs, stage,
                phase, begun, most, policy=policy,
            )  # fmt: skip
            # The next position is on its way while the rest streams, and not earlier: it goes to
            # the CTA that needs it first.
            position = Int32(0)
            if lane == 0:
                position = view.num_ctas + cute.arch.atomic_add(
                    next_item, Int32(1), sem="relaxed", scope="gpu"
                )
            stage, phase = self.mainloop.load_weights(
                bars, shared.weights.data_ptr(), matrix, first_slice, num_slices, slabs, stage,
                phase, most, slabs, policy=policy,
            )  # fmt: skip
            position = cute.arch.shuffle_sync(position, 0)
        self.items.publish(shared, record, record_phase, (Int32(END),))

    # ---- warp 1

    @cute.jit
    def tokens_role(self, view, shared, bars, copies):
        """Token warp: follows the records, loads each item's rows once they are there."""
        ring_boxes = []
        for rows in (schedule.TOKEN_STEP, self.mainloop.box_rows):
            layout = self.mainloop.box_layout(rows)
            ring_boxes.append(shared.tokens.get_tensor(layout.outer, swizzle=layout.inner))
        counters = self.layout.counters
        stage, phase = Int32(0), Int32(1)
        record, record_phase = Int32(0), Int32(0)
        is_first = Int32(1)
        item = self.items.next(shared, record, record_phase)
        expert, gemm, _, num_slices, first_row, num_rows, tile = item
        first_slab = Int32(0)
        if const_expr(self.first_stages.is_used):
            first_slab, phase = self.first_stages.skip(view, shared.dispatch, bars, item, phase)
        while expert != END:
            record, record_phase = self.items.advance(record, record_phase)
            is_empty = num_slices == 0
            if gemm == 0:
                arrived = view.counter(counters.tokens_arrived + tile)
                view.watch.wait_reached(arrived, num_rows, Phase.TOKENS, view.rank, expert=expert)
                if is_first == 1:
                    view.mark(Moment.FED, one_warp())
                is_first = Int32(0)
                # Rows are written by bulk copies and ordinary stores of other CTAs, both fenced
                # there, and read here by tensor copies: the async proxy.
                cute.arch.fence_proxy("async.global")
                stage, phase = self.mainloop.load_tokens(
                    bars, copies[0], ring_boxes, first_row, num_rows, self.fc1_slabs, is_empty,
                    stage, phase, first_slab,
                )  # fmt: skip
                first_slab = Int32(0)
            else:
                done = view.counter(counters.fc1_done + tile)
                view.watch.wait_reached(done, self.tile_slices, Phase.FC1, view.rank, expert=expert)
                cute.arch.fence_proxy("async.global")
                stage, phase = self.mainloop.load_tokens(
                    bars, copies[1], ring_boxes, first_row, num_rows, self.fc2_slabs, is_empty,
                    stage, phase,
                )  # fmt: skip
            expert, gemm, _, num_slices, first_row, num_rows, tile = self.items.next(
                shared, record, record_phase
            )

    # ---- warp 2

    @cute.jit
    def dispatch_role(self, view, inputs, shared, bars):
        """Dispatch warp: this CTA's part in filling the pool; then gives lent stages back."""
        first_row = view.num_ctas * self.num_math_warps  # behind those of the math warps
        self.dispatch.bring_many(view, inputs, shared.dispatch, self.row_buffers(shared), first_row)
        view.mark(Moment.BROUGHT, one_warp())
        if cute.arch.lane_idx() < self.num_math_warps:
            for i in cutlass.range_constexpr(self.spec.num_lent_stages):
                cute.arch.mbarrier_arrive(bars + 2 * self.knobs.stages - 1 - i)
        # A rank counts as drained when nobody reads its routing any more.
        cute.arch.barrier_arrive(
            barrier_id=NAME_BROUGHT, number_of_threads=self.num_math_threads + WARP_SIZE
        )

    def row_buffers(self, shared) -> Int32:
        """Shared memory address: their own, or lent stages of the ring's weights or tokens."""
        if self.spec.num_lent_stages == 0:
            return shared.rows.data_ptr().toint()
        first = self.knobs.stages - self.spec.num_lent_stages
        if self.spec.lends_weights:
            return shared.weights.data_ptr().toint() + first * self.spec.stage_weight_bytes
        return shared.tokens.data_ptr().toint() + first * self.spec.stage_token_bytes

    # ---- math warpgroups

    @cute.jit
    def math_role(
        self, view, inputs, shared, bars, decoder: cutlass.Constexpr, mmas, factors,
        warpgroup_idx, tid,
    ):  # fmt: skip
        """A math warpgroup: follows the records, accumulates, stores its rows."""
        ring_layout = self.mainloop.stage_layout()
        ring_tokens = shared.tokens.get_tensor(ring_layout.outer, swizzle=ring_layout.inner)
        context = (view, shared, bars, ring_tokens, mmas, factors, warpgroup_idx, tid)
        stage, phase = Int32(0), Int32(0)
        record, record_phase = Int32(0), Int32(0)
        item = self.items.next(shared, record, record_phase)
        if const_expr(self.first_stages.is_used):
            idx = warpgroup_idx * THREADS_PER_WARPGROUP + tid
            threads = Threads(idx, self.num_math_threads, NAME_MATH)
            self.first_stages.fill(view, inputs, shared, bars, item, threads)
        while item[EXPERT] != END:
            record, record_phase = self.items.advance(record, record_phase)
            stage, phase = self.item_of_width(0, decoder, context, item, stage, phase)
            item = self.items.next(shared, record, record_phase)

    @cute.jit
    def item_of_width(
        self, idx: cutlass.Constexpr, decoder: cutlass.Constexpr, context, item, stage, phase
    ):
        """The item with the narrowest token tile that holds it, from `tile_widths[idx]` on."""
        widths = self.knobs.tile_widths
        if const_expr(idx == len(widths) - 1):
            stage, phase = self.math_item(idx, decoder, context, item, stage, phase)
        else:
            if item[NUM_ROWS] <= widths[idx]:
                stage, phase = self.math_item(idx, decoder, context, item, stage, phase)
            else:
                stage, phase = self.item_of_width(idx + 1, decoder, context, item, stage, phase)
        return stage, phase

    @cute.jit
    def math_item(
        self, idx: cutlass.Constexpr, decoder: cutlass.Constexpr, context, item, stage, phase
    ):
        """All K slabs of an item, then its epilogue. Both GEMMs share the loop."""
        view, shared, bars, ring_tokens, mmas, factors, warpgroup_idx, tid = context
        expert, gemm, first_slice, num_slices, first_row, num_rows, tile = item
        width = self.knobs.tile_widths[idx]
        # Read ahead of the main loop, so that the epilogue finds them.
        alpha = factors[0]
        slabs = Int32(self.fc1_slabs)
        if gemm == 1:
            alpha = factors[1]
            slabs = Int32(self.fc2_slabs)
        alpha = cute.make_ptr(Float32, alpha, cute.AddressSpace.gmem, assumed_align=8)
        scales = ((alpha + 2 * expert).load(), (alpha + 2 * expert + 1).load())
        accumulators = self.mainloop.make_accumulators(mmas[idx], width)
        stage, phase = self.mainloop.accumulate(
            mmas[idx], width, decoder, bars, shared.weights.data_ptr(), ring_tokens, accumulators,
            warpgroup_idx, tid, num_slices, slabs, stage, phase,
        )  # fmt: skip
        if gemm == 0:
            self.store_hidden(view, width, accumulators, scales, factors[2], item, warpgroup_idx,
                              tid)  # fmt: skip
        else:
            self.store_terms(view, width, accumulators, scales, factors[3], item, warpgroup_idx,
                             tid)  # fmt: skip
        return stage, phase

    @cute.jit
    def store_hidden(
        self, view, width: cutlass.Constexpr, accumulators, scales, bias, item, warpgroup_idx, tid
    ):
        """FC1: activated rows into the hidden pool, counted once they can be read."""
        lane = tid % WARP_SIZE
        row_bytes = 2 * self.layout.intermediate
        hidden = view.address("hidden") + Int64(item[FIRST_ROW] + lane // 4) * row_bytes
        addresses = [hidden + 8 * j * row_bytes for j in range(width // schedule.TOKEN_STEP)]
        self.store_slices(
            0, width, accumulators, scales, bias, item, warpgroup_idx, tid,
            addresses,
        )  # fmt: skip
        # Written by the generic proxy, read by FC2's tensor copies.
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        if lane == 0:
            done = view.counter(self.layout.counters.fc1_done + item[TILE])
            count(done, item[NUM_SLICES])

    @cute.jit
    def store_terms(
        self, view, width: cutlass.Constexpr, accumulators, scales, bias, item, warpgroup_idx, tid
    ):
        """FC2: rows as terms to where their token came from; under tp they stay here."""
        layout = self.layout
        lane = tid % WARP_SIZE
        row_bytes = self.epilogues[1].element_bytes * layout.hidden
        slots_per_rank = layout.max_tokens_per_rank * layout.top_k
        addresses = []
        for j in cutlass.range_constexpr(width // schedule.TOKEN_STEP):
            row = 8 * j + lane // 4
            index = Int32(0)
            if row < item[NUM_ROWS]:
                entry = view.address("src_meta") + Int64(item[FIRST_ROW] + row) * 8
                index = int32_ptr(entry).load() & protocol.SLOT_MASK
            if const_expr(layout.num_ranks == 1 or layout.is_tp):
                terms = view.address("terms")
            else:
                terms = view.peer_address(index // slots_per_rank, "terms")
                index = index % slots_per_rank
            addresses.append(terms + Int64(index) * row_bytes)
        self.store_slices(
            1, width, accumulators, scales, bias, item, warpgroup_idx, tid,
            addresses,
        )  # fmt: skip

    @cute.jit
    def store_slices(
        self, gemm: cutlass.Constexpr, width: cutlass.Constexpr, accumulators, scales, bias,
        item, warpgroup_idx, tid, addresses,
    ):  # fmt: skip
        """Both slices of an item through their epilogue."""
        num_bias = (self.fc1, self.fc2)[gemm].num_weight_rows
        bias = cute.make_ptr(Float32, bias, cute.AddressSpace.gmem) + item[EXPERT] * num_bias
        bias = cute.make_tensor(bias, cute.make_layout(num_bias))
        for slice_idx in cutlass.range_constexpr(self.knobs.slices_per_item):
            if item[NUM_SLICES] > slice_idx:
                tile = item[FIRST_SLICE] + slice_idx
                tile = tile * self.knobs.num_math_warpgroups + warpgroup_idx
                self.epilogues[gemm].store_tile(
                    accumulators[slice_idx], width, tile, tid // WARP_SIZE, tid % WARP_SIZE, scales,
                    bias, item[NUM_ROWS], addresses,
                )  # fmt: skip


def one_warp() -> Threads:
    return Threads(cute.arch.lane_idx(), WARP_SIZE, 0)


def build(spec: MegaSpec) -> CompiledFunction:
    """Cross-compile one kernel; needs no GPU."""
    addresses, numbers = [Int64(0)] * 14, [Int64(0)] * 3
    sizes = [Int32(1), Int32(0), Int32(0), Int32(1), Int32(0)]
    return compile_for_sm90(MegaMoESm90(spec), *addresses, *numbers, *sizes, make_fake_stream())

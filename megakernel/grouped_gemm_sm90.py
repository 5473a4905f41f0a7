"""FC1 or FC2 of all local experts in one persistent launch on Hopper.

    FC1   hidden[p, :] = activation(scale_e * x[p, :] W13_e^T + bias_e)     BF16 [P, I]
    FC2   terms[p, :]  = scale_e * hidden[p, :] W2_e^T + bias_e             BF16 or FP32 [P, H]

p runs over the pool: expert-sorted rows, those of local expert e are offsets[e] .. offsets[e + 1].
Offsets are read on the device; the host knows only the pool's capacity. `dst_rows`, where used,
sends term p to row dst_rows[p].

role     warps       registers  waits on                  signals
weights  0           producer   ring empty, record empty  ring full, record full
tokens   1           producer   ring empty, record full   ring full, record empty
-        2, 3        producer
math     4 a group   math       ring full, record full    ring empty, record empty

The prologue sorts the experts by rows in shared memory (`schedule.py` is the order); warp 0 takes
positions of the list from a device counter and publishes item records to a ring of two. The last
CTA to leave sets the counters back.

Programmatic dependent launch: FC1 waits for its predecessor before it reads offsets, FC2 only
before it reads hidden rows: the offsets were complete before FC1 ran. So FC2 CTAs take over SMs as
FC1 CTAs leave and fill their weight rings while others still finish FC1.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_ptr

from moe_ep.megakernel import schedule
from moe_ep.megakernel.compile_cache import CompiledFunction, compile_for_sm90
from moe_ep.megakernel.decode import make_decoder
from moe_ep.megakernel.epilogue_sm90 import EpilogueSm90
from moe_ep.megakernel.grouped_gemm import GemmSpec
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
from moe_ep.megakernel.tiles import num_slabs

WARP_SIZE = 32
WARPS_PER_WARPGROUP = 4
# Words of an item record.
FIRST_SLICE, NUM_SLICES, FIRST_ROW, NUM_ROWS = range(EXPERT + 1, EXPERT + 5)


class GroupedGemmSm90:
    """The kernel of one `GemmSpec`."""

    def __init__(self, spec: GemmSpec) -> None:
        self.spec = spec
        self.knobs = spec.knobs
        self.mainloop = MainloopSm90(spec.weights_format, spec.knobs)
        self.epilogue = EpilogueSm90(
            spec.activation, spec.num_channels, has_bias=spec.has_bias, is_fp32=spec.is_fp32
        )
        self.num_slabs = num_slabs(spec.num_cols)
        self.num_slices = spec.num_slices
        self.row_items = spec.grid(1).row_items
        self.num_math_warps = WARPS_PER_WARPGROUP * spec.knobs.num_math_warpgroups
        self.items = ItemRing(2 * spec.knobs.stages, NUM_ROWS + 1, self.num_math_warps + 1)
        self.waits_late = spec.name == "fc2"

    @cute.jit
    def __call__(
        self,
        weights: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        rows_in: cute.Pointer,
        rows_out: cute.Pointer,
        offsets: cute.Pointer,
        dst_rows: cute.Pointer,
        counters: cute.Pointer,
        num_pool_rows: Int32,
        zero: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """`zero` is 0 at run time: it keeps constants in registers. Launches on `stream`."""
        columns = self.spec.num_cols
        tokens = cute.make_tensor(
            rows_in, cute.make_layout((num_pool_rows, columns), stride=(columns, 1))
        )
        ring_layout = self.mainloop.stage_layout()
        (small_copy, small_tokens), (wide_copy, wide_tokens) = self.mainloop.token_copies(tokens)
        stages, experts = self.knobs.stages, self.spec.num_experts

        @cute.struct
        class SharedStorage:
            # ring full, ring empty; record full, record empty
            bars: cute.struct.MemRange[Int64, 2 * stages + NUM_BARS]
            records: cute.struct.MemRange[Int32, NUM_RECORDS * RECORD_WORDS]
            offsets: cute.struct.MemRange[Int32, experts + 1]
            order: cute.struct.MemRange[Int32, experts]
            item_end: cute.struct.MemRange[Int32, experts]
            tokens: cute.struct.Align[
                cute.struct.MemRange[BFloat16, cute.cosize(ring_layout)], 1024
            ]
            weights: cute.struct.Align[
                cute.struct.MemRange[Uint32, stages * self.mainloop.stage_words], 128
            ]

        self.storage = SharedStorage
        self.kernel(
            small_copy,
            small_tokens,
            wide_copy,
            wide_tokens,
            weights,
            alpha,
            bias,
            rows_out,
            offsets,
            dst_rows,
            counters,
            zero,
            self.mainloop.make_mmas(),
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[self.knobs.num_threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        small_copy: cute.CopyAtom,
        small_tokens: cute.Tensor,
        wide_copy: cute.CopyAtom,
        wide_tokens: cute.Tensor,
        weights: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        rows_out: cute.Pointer,
        offsets: cute.Pointer,
        dst_rows: cute.Pointer,
        counters: cute.Pointer,
        zero: Int32,
        mmas: list,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        bars = storage.bars.data_ptr()
        ring_words = storage.weights.data_ptr()
        copies = [(small_copy, small_tokens), (wide_copy, wide_tokens)]

        if warp == 0:
            self.init_barriers(bars)
            cpasync.prefetch_descriptor(small_copy)
            cpasync.prefetch_descriptor(wide_copy)
        if const_expr(not self.waits_late):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.sort_experts(storage, offsets, tidx)

        warpgroup_idx = cute.arch.make_warp_uniform(tidx // THREADS_PER_WARPGROUP)
        if warpgroup_idx == 0:
            cute.arch.setmaxregister_decrease(self.knobs.producer_registers)
            if warp == 0:
                self.weights_role(storage, bars, ring_words, weights, counters)
            elif warp == 1:
                self.tokens_role(storage, bars, copies)
        else:
            cute.arch.setmaxregister_increase(self.knobs.math_registers)
            decoder = make_decoder(self.spec.weights_format, zero)
            ring_layout = self.mainloop.stage_layout()
            ring_tokens = storage.tokens.get_tensor(ring_layout.outer, swizzle=ring_layout.inner)
            self.math_role(
                storage, bars, ring_words, ring_tokens, decoder, mmas, alpha, bias, rows_out,
                dst_rows, warpgroup_idx - 1, tidx % THREADS_PER_WARPGROUP,
            )  # fmt: skip

    @cute.jit
    def init_barriers(self, bars):
        """Warp 0: arrival counts of both rings."""
        with cute.arch.elect_one():
            self.mainloop.init(bars)
            self.items.init(bars)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def sort_experts(self, storage, offsets: cute.Pointer, tidx: Int32):
        """All threads: experts by falling rows, and how many items end with each of them.

        An expert's place is the number of experts before it, the items up to and with it those of
        all experts not after it: one pass over the counts, no scan.
        """
        first_row = storage.offsets.data_ptr()
        order = storage.order.data_ptr()
        item_end = storage.item_end.data_ptr()
        experts, threads = self.spec.num_experts, self.knobs.num_threads
        width = self.knobs.max_tile_width
        for expert in cutlass.range(tidx, experts + 1, threads, unroll=1):
            (first_row + expert).store((offsets + expert).load())
        cute.arch.sync_threads()
        for expert in cutlass.range(tidx, experts, threads, unroll=1):
            mine = (first_row + expert + 1).load() - (first_row + expert).load()
            place = Int32(0)
            tiles = schedule.num_token_tiles(mine, width)
            first = first_row.load()
            for other in cutlass.range(experts, unroll=4):
                end = (first_row + other + 1).load()
                rows = end - first
                first = end
                is_before = rows > mine
                if rows == mine:
                    is_before = other < expert
                if is_before:
                    place += 1
                    tiles += schedule.num_token_tiles(rows, width)
            (order + place).store(Int32(expert))
            (item_end + place).store(tiles * self.row_items)
        cute.arch.sync_threads()

    # ---- warp 0

    @cute.jit
    def weights_role(self, storage, bars, ring_words, weights, counters):
        """Weight warp: takes items, publishes their records, streams their weights."""
        lane = cute.arch.lane_idx()
        bid, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        item_end = storage.item_end.data_ptr()
        num_items = (item_end + (self.spec.num_experts - 1)).load()
        num_halved = schedule.num_halved_items(num_items, num_ctas, self.knobs.slices_per_item)
        num_listed = num_items + num_halved
        stage, phase = Int32(0), Int32(1)
        record, record_phase = Int32(0), Int32(1)
        position = Int32(bid)
        while position < num_listed:
            item = self.find_item(storage, position, num_items, num_halved, lane)
            expert, first_slice, num_slices, _, _ = item
            self.items.publish(storage, record, record_phase, item)
            record, record_phase = self.items.advance(record, record_phase)
            # The next position is on its way while this item streams.
            position = Int32(0)
            if lane == 0:
                position = num_ctas + cute.arch.atomic_add(
                    counters, Int32(1), sem="relaxed", scope="gpu"
                )
            matrix = weights.toint() + Int64(expert) * self.spec.expert_bytes
            stage, phase = self.mainloop.load_weights(
                bars, ring_words, matrix, first_slice, num_slices, self.num_slabs, stage, phase
            )
            position = cute.arch.shuffle_sync(position, 0)
        self.items.publish(storage, record, record_phase, (Int32(END),))
        if lane == 0:
            # Every CTA has taken its last position: the last one to say so starts the list anew.
            left = cute.arch.atomic_add(counters + 1, Int32(1), sem="acq_rel", scope="gpu")
            if left == num_ctas - 1:
                counters.store(Int32(0))
                (counters + 1).store(Int32(0))

    @cute.jit
    def find_item(self, storage, position, num_items, num_halved, lane):
        """The record of a list position; the whole warp computes it."""
        item_end = storage.item_end.data_ptr()
        item, part = schedule.listed_item(position, num_items, num_halved)
        place = Int32(0)
        for first in cutlass.range_constexpr(0, self.spec.num_experts, WARP_SIZE):
            ends_before = False
            if first + lane < self.spec.num_experts:
                ends_before = (item_end + first + lane).load() <= item
            place += cute.arch.popc(cute.arch.vote_ballot_sync(ends_before))
        expert = (storage.order.data_ptr() + place).load()
        if place > 0:
            item -= (item_end + place - 1).load()
        expert_row = (storage.offsets.data_ptr() + expert).load()
        rows = (storage.offsets.data_ptr() + expert + 1).load() - expert_row
        num_tiles = schedule.num_token_tiles(rows, self.knobs.max_tile_width)
        first_slice, num_slices = schedule.item_slices(
            item // num_tiles, part, Int32(self.num_slices), self.knobs.slices_per_item
        )
        first, num_rows = schedule.tile_rows(item % num_tiles, rows, num_tiles)
        return expert, first_slice, num_slices, expert_row + first, num_rows

    # ---- warp 1

    @cute.jit
    def tokens_role(self, storage, bars, copies):
        """Token warp: follows the records, loads each item's rows."""
        ring_boxes = []
        for rows in (schedule.TOKEN_STEP, self.mainloop.box_rows):
            layout = self.mainloop.box_layout(rows)
            ring_boxes.append(storage.tokens.get_tensor(layout.outer, swizzle=layout.inner))
        if const_expr(self.waits_late):
            cute.arch.griddepcontrol_wait()
        stage, phase = Int32(0), Int32(1)
        record, record_phase = Int32(0), Int32(0)
        item = self.items.next(storage, record, record_phase)
        while item[EXPERT] != END:
            _, _, num_slices, first_row, num_rows = item
            record, record_phase = self.items.advance(record, record_phase)
            stage, phase = self.mainloop.load_tokens(
                bars, copies, ring_boxes, first_row, num_rows, self.num_slabs, num_slices == 0,
                stage, phase,
            )  # fmt: skip
            item = self.items.next(storage, record, record_phase)

    # ---- math warpgroups

    @cute.jit
    def math_role(
        self, storage, bars, ring_words, ring_tokens, decoder: cutlass.Constexpr, mmas, alpha,
        bias, rows_out, dst_rows, warpgroup_idx, tid,
    ):  # fmt: skip
        """A math warpgroup: follows the records, accumulates, stores its rows."""
        stage, phase = Int32(0), Int32(0)
        record, record_phase = Int32(0), Int32(0)
        context = (
            storage, bars, ring_words, ring_tokens, mmas, alpha, bias, rows_out, dst_rows,
            warpgroup_idx, tid,
        )  # fmt: skip
        item = self.items.next(storage, record, record_phase)
        while item[EXPERT] != END:
            record, record_phase = self.items.advance(record, record_phase)
            stage, phase = self.item_of_width(0, decoder, context, item, stage, phase)
            item = self.items.next(storage, record, record_phase)

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
        """All K slabs of an item, then its epilogue."""
        (
            storage, bars, ring_words, ring_tokens, mmas, alpha, bias, rows_out, dst_rows,
            warpgroup_idx, tid,
        ) = context  # fmt: skip
        expert, first_slice, num_slices, first_row, num_rows = item
        width = self.knobs.tile_widths[idx]
        lane = tid % WARP_SIZE
        # Read ahead of the main loop, so that the epilogue finds them.
        scales = ((alpha + 2 * expert).load(), (alpha + 2 * expert + 1).load())
        accumulators = self.mainloop.make_accumulators(mmas[idx], width)
        stage, phase = self.mainloop.accumulate(
            mmas[idx], width, decoder, bars, ring_words, ring_tokens, accumulators, warpgroup_idx,
            tid, num_slices, self.num_slabs, stage, phase,
        )  # fmt: skip
        row_bytes = self.epilogue.element_bytes * self.spec.num_channels
        addresses = []
        for j in cutlass.range_constexpr(width // schedule.TOKEN_STEP):
            row = first_row + 8 * j + lane // 4
            if const_expr(self.spec.scatters_rows):
                target = Int32(0)
                if 8 * j + lane // 4 < num_rows:
                    target = (dst_rows + row).load()
                row = target
            addresses.append(rows_out.toint() + Int64(row) * row_bytes)
        expert_bias = bias + expert * self.spec.num_weight_rows
        if const_expr(self.spec.has_bias):
            expert_bias = cute.make_tensor(expert_bias, cute.make_layout(self.spec.num_weight_rows))
        for slice_idx in cutlass.range_constexpr(self.knobs.slices_per_item):
            if num_slices > slice_idx:
                tile = (first_slice + slice_idx) * self.knobs.num_math_warpgroups + warpgroup_idx
                self.epilogue.store_tile(
                    accumulators[slice_idx], width, tile, tid // WARP_SIZE, lane, scales,
                    expert_bias, num_rows, addresses,
                )  # fmt: skip
        return stage, phase


def build(spec: GemmSpec) -> CompiledFunction:
    """Cross-compile one kernel; needs no GPU."""

    def pointer(dtype: type, align: int) -> cute.Pointer:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    return compile_for_sm90(
        GroupedGemmSm90(spec),
        pointer(Uint32, 128),  # weights
        pointer(Float32, 8),  # alpha
        pointer(Float32, 4),  # bias
        pointer(BFloat16, 16),  # rows in
        pointer(Uint32, 16),  # rows out
        pointer(Int32, 4),  # offsets
        pointer(Int32, 4),  # destination rows
        pointer(Int32, 8),  # counters
        Int32(1),
        Int32(0),
        Int32(1),
        make_fake_stream(),
    )

"""The W4A16 main loop for Hopper: weights as the register operand of WGMMA, tokens as the other.

    acc[64 weight rows, n tokens] += W[64, 128] * X[n, 128]^T    per warpgroup, slice and K slab

Swap-AB: M = weight rows, N = tokens, so that a few tokens cost a narrow N instead of padding M.
Weights are decoded from shared memory straight into operand registers; only tokens are read by the
tensor cores from shared memory. The same code serves every format (`decode.py`).

role     warps             per K slab
weights  warp 0            wait empty; arrive(bytes) on full; one bulk copy per slice
tokens   warp 1            wait empty; arrive(bytes) on full; tensor copies of 8 or more rows
math     4 a warpgroup     wait full; per slice: load, decode, 2 x 4 WGMMA; arrive on empty

Full counts two arrivals (each with its bytes): the producers run ahead independently, so weights
stream while tokens are still awaited. Empty counts the math warps.

stage of the ring (128-byte swizzle, 8 rows x 64 columns an atom):
    weights   [slices][warpgroups][tile bytes]
    tokens    [2 halves of K][max_tile_width rows][64] BF16
"""

import math

import cutlass
import cutlass.utils.hopper_helpers as sm90_helpers
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from moe_ep.comm.ptx import EVICT_FIRST, bulk_copy_g2s, bulk_prefetch_l2, fma_rn
from moe_ep.megakernel.knobs import KernelKnobs
from moe_ep.megakernel.schedule import TOKEN_STEP
from moe_ep.megakernel.tiles import BLOCK_TILES, TILE_COLS, TILE_FORMATS, TILE_ROWS

# Columns of one token box: 128 bytes, the width of the swizzle.
BOX_COLS = 64
BOX_ROWS = 32  # of the larger of two boxes, where they divide the widest tile
# Widest token tile whose two slices leave registers for a whole slab's operand.
HALF_WAIT_WIDTH = 32
BYTES_PER_NS = 32  # of memory, a CTA's share: 132 of them read 4.2 TB/s
SLABS_PREFETCHED = 2  # of an item; 132 CTAs ask for what memory delivers during the scan
BOX_STEP_BYTES = TOKEN_STEP * TILE_COLS * 2  # both halves of K, 8 rows


class MainloopSm90:
    """Static description of the loop, and the three roles' work on one item."""

    def __init__(self, weights_format: str, knobs: KernelKnobs) -> None:
        self.fmt = TILE_FORMATS[weights_format]
        self.knobs = knobs
        self.num_warpgroups = knobs.num_math_warpgroups
        self.slices_per_item = knobs.slices_per_item
        self.stages = knobs.stages
        self.max_width = knobs.max_tile_width
        self.tile_words = self.fmt.tile_bytes // 4
        self.slice_bytes = self.num_warpgroups * self.fmt.tile_bytes
        self.stage_words = self.slices_per_item * self.slice_bytes // 4
        self.box_rows = math.gcd(self.max_width, BOX_ROWS)
        # fp8_block: every slab's sum is scaled in FP32 before it is added.
        self.scales_partial_sums = self.fmt.num_tile_sf > 0

    # ---- host side: layouts and copy atoms

    def make_mmas(self) -> list:
        """One tiled MMA per token tile width: m64 x width x k16, A from registers."""
        return [
            sm90_helpers.make_trivial_tiled_mma(
                BFloat16,
                BFloat16,
                OperandMajorMode.K,
                OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                tiler_mn=(TILE_ROWS, width),
                a_source=warpgroup.OperandSource.RMEM,
            )
            for width in self.knobs.tile_widths
        ]

    def token_layout(self, rows: int, cols: int, count: int):
        """Swizzled layout of `count` boxes of [rows, cols] BF16."""
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
        return cute.tile_to_shape(atom, (rows, cols, count), order=(0, 1, 2))

    def stage_layout(self):
        """The ring as the math warps see it: (max_width, 128, stages)."""
        return self.token_layout(self.max_width, TILE_COLS, self.stages)

    def box_layout(self, rows: int):
        """The ring as boxes: (rows, 64, boxes), index = box + boxes per half * (half + 2 stage)."""
        return self.token_layout(rows, BOX_COLS, self.max_width // rows * 2 * self.stages)

    def token_copies(self, tokens) -> list:
        """(atom, TMA tensor) of 8-row boxes and of `box_rows`-row boxes over [pool rows, K]."""
        copy = cpasync.CopyBulkTensorTileG2SOp()
        return [
            cpasync.make_tiled_tma_atom(
                copy, tokens, cute.slice_(self.box_layout(rows), (None, None, 0)), (rows, BOX_COLS)
            )
            for rows in (TOKEN_STEP, self.box_rows)
        ]

    # ---- device side

    @cute.jit
    def init(self, bars):
        """One thread: arrival counts of the ring, full then empty. The caller fences."""
        for i in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(bars + i, 2)  # weight warp, token warp
            cute.arch.mbarrier_init(bars + self.stages + i, 4 * self.num_warpgroups)

    @cute.jit
    def slice_address(self, base: Int64, first_slice: Int32, num_slabs: cutlass.Constexpr):
        """Address of K slab 0 of a slice in the prepared matrix of one expert."""
        tile = first_slice * self.num_warpgroups
        block = tile // BLOCK_TILES
        tile = block * (num_slabs * BLOCK_TILES) + tile % BLOCK_TILES
        return base + Int64(tile) * self.fmt.tile_bytes

    @cute.jit
    def load_weights(
        self,
        bars,
        ring_words,
        matrix: Int64,
        first_slice: Int32,
        num_slices: Int32,
        num_slabs: cutlass.Constexpr,
        stage: Int32,
        phase: Int32,
        first_slab: Int32 = 0,
        end_slab: Int32 | None = None,
        is_paced: cutlass.Constexpr = False,
        policy: int | Int64 = EVICT_FIRST,
    ):
        """Weight warp: stream one item's slabs, all or some. `matrix` is the expert's prepared
        matrix. Paced: ask for them no faster than memory delivers, so that what others ask for
        meanwhile does not queue up behind a whole ring. `policy`: of L2."""
        source = self.slice_address(matrix, first_slice, num_slabs)
        second = source
        if const_expr(self.slices_per_item == 2):
            second = self.slice_address(matrix, first_slice + 1, num_slabs)
        source += Int64(first_slab) * (BLOCK_TILES * self.fmt.tile_bytes)
        second += Int64(first_slab) * (BLOCK_TILES * self.fmt.tile_bytes)
        num_bytes = num_slices * self.slice_bytes
        ring = ring_words.toint()
        slabs = Int32(num_slabs if const_expr(end_slab is None) else end_slab) - first_slab
        if num_slices == 0:
            slabs = Int32(0)
        start = Int64(0)
        if const_expr(is_paced):
            start = Int64(cute.arch.globaltimer())
        for i in cutlass.range(slabs, unroll=1):
            cute.arch.mbarrier_wait(bars + self.stages + stage, phase)
            if const_expr(is_paced):
                while cute.arch.globaltimer() - start < Int64(i * (num_bytes // BYTES_PER_NS)):
                    pass
            with cute.arch.elect_one():
                full = (bars + stage).toint()
                target = ring + stage * (4 * self.stage_words)
                cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, num_bytes)
                bulk_copy_g2s(target, source, Int32(self.slice_bytes), full, policy)
                if const_expr(self.slices_per_item == 2):
                    if num_slices == 2:
                        bulk_copy_g2s(
                            *(target + self.slice_bytes, second, Int32(self.slice_bytes), full),
                            policy,
                        )
            source += BLOCK_TILES * self.fmt.tile_bytes
            second += BLOCK_TILES * self.fmt.tile_bytes
            stage, phase = self.advance(stage, phase)
        return stage, phase

    @cute.jit
    def prefetch_weights(
        self, matrix: Int64, first_slice: Int32, num_slices: Int32, num_slabs: cutlass.Constexpr
    ):
        """One warp: an item's first slabs into L2, before anybody knows who will load them."""
        lane = cute.arch.lane_idx()
        slice_idx = first_slice + lane % self.slices_per_item
        slab = lane // self.slices_per_item
        if (slab < min(SLABS_PREFETCHED, num_slabs)) & (slice_idx < num_slices):
            source = self.slice_address(matrix, slice_idx, num_slabs)
            source += Int64(slab) * (BLOCK_TILES * self.fmt.tile_bytes)
            bulk_prefetch_l2(source, Int32(self.slice_bytes))

    @cute.jit
    def load_tokens(
        self,
        bars,
        copies,
        ring_boxes,
        first_row: Int32,
        num_rows: Int32,
        num_slabs: cutlass.Constexpr,
        is_empty: cutlass.Boolean,
        stage: Int32,
        phase: Int32,
        first_slab: Int32 = 0,
    ):
        """Token warp: rows first_row.. of the pool into the stages of one item, all slabs or those
        from `first_slab` on."""
        parts = []
        for (atom, tensor), boxes, rows in zip(
            copies, ring_boxes, (TOKEN_STEP, self.box_rows), strict=True
        ):
            pool = cute.local_tile(
                cute.domain_offset((first_row, 0), tensor), (rows, BOX_COLS), (None, None)
            )
            parts.append(
                cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(boxes, 0, 2),
                    cute.group_modes(pool, 0, 2),
                )
            )
        (small_smem, small_pool), (wide_smem, wide_pool) = parts
        small_atom, wide_atom = copies[0][0], copies[1][0]
        steps = (num_rows + TOKEN_STEP - 1) // TOKEN_STEP
        steps_per_box = self.box_rows // TOKEN_STEP
        small_boxes = self.max_width // TOKEN_STEP  # of one half of K in one stage
        wide_boxes = self.max_width // self.box_rows
        slabs = Int32(num_slabs)
        if is_empty:
            slabs = Int32(0)
        for slab in cutlass.range(first_slab, slabs, unroll=1):
            cute.arch.mbarrier_wait(bars + self.stages + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + stage, steps * BOX_STEP_BYTES)
            for box in cutlass.range(steps // steps_per_box, unroll=1):
                for half in cutlass.range_constexpr(2):
                    cute.copy(
                        wide_atom,
                        wide_pool[(None, box, slab * 2 + half)],
                        wide_smem[(None, box + wide_boxes * half + 2 * wide_boxes * stage)],
                        tma_bar_ptr=bars + stage,
                    )
            if const_expr(steps_per_box > 1):
                for box in cutlass.range(steps // steps_per_box * steps_per_box, steps, unroll=1):
                    for half in cutlass.range_constexpr(2):
                        cute.copy(
                            small_atom,
                            small_pool[(None, box, slab * 2 + half)],
                            small_smem[(None, box + small_boxes * half + 2 * small_boxes * stage)],
                            tma_bar_ptr=bars + stage,
                        )
            stage, phase = self.advance(stage, phase)
        return stage, phase

    def make_accumulators(self, mma, width: int) -> list:
        """FP32 accumulators of each slice.

        Flat index 4 j + 2 r + c is row g + 8 r, token 8 j + 2 q + c (lane 4 g + q).
        """
        shape = mma.partition_shape_C((TILE_ROWS, width))
        return [cute.make_rmem_tensor(shape, Float32) for _ in range(self.slices_per_item)]

    @cute.jit
    def accumulate(
        self,
        mma,
        width: cutlass.Constexpr,
        decoder: cutlass.Constexpr,
        bars,
        ring_words,
        ring_tokens,
        accumulators,
        warpgroup_idx: Int32,
        tid: Int32,
        num_slices: Int32,
        num_slabs: cutlass.Constexpr,
        stage: Int32,
        phase: Int32,
    ):
        """Math warpgroup: all K slabs of one item into `accumulators`, in ascending K."""
        tokens = ring_tokens
        if const_expr(width != self.max_width):
            tokens = cute.local_tile(ring_tokens, (width, TILE_COLS), (0, 0, None))
        b_operand = mma.make_fragment_B(mma.get_slice(tid).partition_B(tokens))
        a_operand = mma.make_fragment_A(mma.partition_shape_A((TILE_ROWS, TILE_COLS)))
        registers = cute.make_tensor(  # [k16 step][a0..a3]
            cute.recast_tensor(a_operand, Uint32).iterator, cute.make_layout(32)
        )
        partial = None
        if const_expr(self.scales_partial_sums):
            partial = cute.make_rmem_tensor(mma.partition_shape_C((TILE_ROWS, width)), Float32)
        for slice_idx in cutlass.range_constexpr(self.slices_per_item):
            accumulators[slice_idx].fill(0.0)
        slabs = Int32(num_slabs)
        if num_slices == 0:
            slabs = Int32(0)
        for _ in cutlass.range(slabs, unroll=1):
            cute.arch.mbarrier_wait(bars + stage, phase)
            self.slab_of_slice(
                mma, width, decoder, ring_words, b_operand, a_operand, registers,
                accumulators[0], partial, warpgroup_idx, tid, 0, stage,
            )  # fmt: skip
            if const_expr(self.slices_per_item == 2):
                if num_slices == 2:
                    self.slab_of_slice(
                        mma, width, decoder, ring_words, b_operand, a_operand, registers,
                        accumulators[1], partial, warpgroup_idx, tid, 1, stage,
                    )  # fmt: skip
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + self.stages + stage)
            stage, phase = self.advance(stage, phase)
        return stage, phase

    def slab_of_slice(
        self, mma, width, decoder, ring_words, b_operand, a_operand, registers, accumulator,
        partial, warpgroup_idx, tid, slice_idx, stage,
    ):  # fmt: skip
        """Unrolled at trace time: one tile's decode and 8 WGMMA, in two groups of four."""
        tile = (
            ring_words
            + stage * self.stage_words
            + (slice_idx * self.num_warpgroups + warpgroup_idx) * self.tile_words
        )
        loaded = decoder.load(tile, tid)
        target = accumulator if partial is None else partial
        for half in range(2):
            decoder.half(loaded, half, registers)
            warpgroup.fence()
            for k in range(4 * half, 4 * half + 4):
                mma.set(warpgroup.Field.ACCUMULATE, partial is None or k > 0)
                cute.gemm(
                    mma, target, a_operand[None, None, k], b_operand[None, None, k, stage], target
                )
            warpgroup.commit_group()
            if half == 0 and self.waits_each_half(width):
                warpgroup.wait_group(0)
        # Open groups over the loop's back edge would make ptxas serialise every WGMMA (C7513).
        warpgroup.wait_group(0)
        if partial is not None:
            self.add_scaled(accumulator, partial, tile, width)

    def waits_each_half(self, width: int) -> bool:
        """Whether registers of four math warpgroups hold two wide accumulators only if the halves
        of K take turns in the operand's registers."""
        return self.num_warpgroups == 4 and self.slices_per_item == 2 and width > HALF_WAIT_WIDTH

    def add_scaled(self, accumulator, partial, tile, width: int) -> None:
        """accumulator += tile scale * partial, rows g and g + 8 each with theirs."""
        sf = cute.make_rmem_tensor(2, Float32)
        source = cute.recast_ptr(tile + self.fmt.code_bytes // 4, dtype=Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), sf)
        sums = cute.make_tensor(accumulator.iterator, cute.make_layout(width // 2))
        parts = cute.make_tensor(partial.iterator, cute.make_layout(width // 2))
        for i in range(width // 2):
            sums[i] = fma_rn(parts[i], sf[i // 2 % 2], sums[i])

    @cute.jit
    def advance(self, stage: Int32, phase: Int32):
        """Next stage of the ring and its parity."""
        stage = stage + 1
        if stage == self.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

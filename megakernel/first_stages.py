"""Tokens of a CTA's first item straight into its ring, where one rank has at most 32 of them.

By way of the pool, a row is copied by one CTA, counted, and waited for by another: microseconds in
which the ring is full of weights and nothing is computed. So the math warps, idle until then, store
the first K slabs of the first item themselves, as many as the ring has stages; the token warp goes
on behind them.

    tokens[expert]   sum of 1 << token over the expert's slots. It has as many ones as the expert
                     has rows unless a token names the expert twice; then the pool is waited for.
                     Row i of the expert is the token of the i-th one.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from moe_ep.comm import ptx
from moe_ep.megakernel.dispatch import Dispatch
from moe_ep.megakernel.item_list import FIRST_ROW, GEMM, NUM_ROWS, NUM_SLICES
from moe_ep.megakernel.item_ring import EXPERT
from moe_ep.megakernel.mainloop_sm90 import BOX_COLS
from moe_ep.megakernel.mega_spec import MegaSpec
from moe_ep.megakernel.protocol import WARP_SIZE
from moe_ep.megakernel.rank_view import RankInputs, RankView, Threads

VECTOR_BYTES = 16
BOX_VECTORS = 8  # of a row in a box: the 128 bytes of the swizzle
SLAB_VECTORS = 2 * BOX_VECTORS


class FirstStages:
    """Of one `MegaSpec`. `item` is the CTA's first record; every warp that asks gets one answer."""

    def __init__(self, spec: MegaSpec, dispatch: Dispatch, num_slabs: int) -> None:
        self.dispatch = dispatch
        self.num_stages = spec.knobs.stages
        self.num_lent_stages = spec.num_lent_stages
        self.stage_bytes = spec.stage_token_bytes
        self.box_bytes = spec.knobs.max_tile_width * BOX_COLS * 2
        self.row_bytes = spec.layout.hidden * 2
        is_decode = spec.knobs.num_math_warpgroups == 4
        self.is_used = is_decode and spec.layout.num_ranks == 1 and num_slabs >= self.num_stages

    @cute.jit
    def num_filled(self, view: RankView, storage, item) -> Int32:
        """Stages that the math warps fill: all or none. `storage`: what the scan left.

        None where tokens are many for the CTAs: lent stages are then dispatch's.
        """
        _, _, _, are_few = self.dispatch.share(view, storage)
        num_tokens = (storage.token_base.data_ptr() + 1).load()
        filled = Int32(0)
        is_fc1 = (item[EXPERT] >= 0) & (item[GEMM] == 0)
        if is_fc1 & are_few & (num_tokens <= WARP_SIZE):
            rows = (storage.rows.data_ptr() + item[EXPERT]).load()
            tokens = Uint32((storage.tokens.data_ptr() + item[EXPERT]).load())
            if (Int32(cute.arch.popc(tokens)) == rows) & (item[NUM_SLICES] > 0):
                filled = Int32(self.num_stages)
        return filled

    @cute.jit
    def fill(self, view: RankView, inputs: RankInputs, shared, bars, item, threads: Threads):
        """All math threads: tokens of slab i into stage i, whose full barrier they arrive on."""
        storage = shared.dispatch
        if self.num_filled(view, storage, item) > 0:
            first = item[FIRST_ROW] - (storage.first_row.data_ptr() + item[EXPERT]).load()
            ring = shared.tokens.data_ptr().toint()
            row_vectors = SLAB_VECTORS * self.num_stages
            for index in range(threads.idx, item[NUM_ROWS] * row_vectors, threads.num_threads):
                row, vector = index // row_vectors, index % row_vectors
                tokens = Uint32((storage.tokens.data_ptr() + item[EXPERT]).load())
                for _ in cutlass.range(first + row, unroll=1):
                    tokens = tokens & (tokens - 1)
                token = Int32(cute.arch.popc((tokens & (0 - tokens)) - 1))
                source = inputs.x + Int64(token) * self.row_bytes + Int64(vector) * VECTOR_BYTES
                words = ptx.ld_global_v4(source)
                stage, vector = vector // SLAB_VECTORS, vector % SLAB_VECTORS
                target = ring + stage * self.stage_bytes + vector // BOX_VECTORS * self.box_bytes
                swizzled = (vector % BOX_VECTORS) ^ (row % BOX_VECTORS)
                target += (row * BOX_VECTORS + swizzled) * VECTOR_BYTES
                ptx.st_shared_v4(target, words)
            # WGMMA reads shared memory by the async proxy.
            cute.arch.fence_proxy("async.shared", space="cta")
            threads.sync()
            if threads.idx == 0:
                for i in cutlass.range_constexpr(self.num_stages):
                    cute.arch.mbarrier_arrive(bars + i)

    @cute.jit
    def skip(self, view: RankView, storage, bars, item, phase: Int32):
        """Token warp: (slab of the first item that it starts with, phase of its ring there)."""
        filled = self.num_filled(view, storage, item)
        if filled > 0:
            phase = phase ^ 1
            # Lent stages are one phase ahead; few tokens leave them unused.
            for i in cutlass.range_constexpr(self.num_lent_stages):
                cute.arch.mbarrier_wait(bars + 2 * self.num_stages - 1 - i, 1)
        return filled, phase

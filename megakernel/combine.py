"""Terms back at their tokens' owner and summed there: phases F and G of `protocol.py`.

drain    count `finished`; the last CTA signals drained[rank] at every peer; wait for all ranks
reduce   out[t] = bf16(sum over k of topk_weights[t, k] * terms[t, k]), slot order, FP32

Under tp the drain counts `summed`, and what is before and after it is `combine_tp.py`'s.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from moe_ep.comm import ptx
from moe_ep.comm.device import arrive, int32_ptr
from moe_ep.megakernel import schedule
from moe_ep.megakernel.combine_sm90 import sum_slots
from moe_ep.megakernel.dispatch import WARP_SIZE, Dispatch
from moe_ep.megakernel.protocol import Phase
from moe_ep.megakernel.rank_view import RankInputs, RankView, Threads

VECTOR_BYTES = 16
VECTORS_PER_LINE = 8  # of L2
SLOTS_IN_FLIGHT = 16  # terms of a thread, 16 bytes each


@dataclass(frozen=True)
class Combine:
    """The phases for the layout of `dispatch`."""

    dispatch: Dispatch

    @property
    def last_counter(self) -> int:
        """Of the CTAs that have left all that other ranks wait for."""
        counters = self.dispatch.layout.counters
        return counters.summed if self.dispatch.layout.is_tp else counters.finished

    @cute.jit
    def drain(self, view: RankView, storage, threads: Threads):
        """All threads, after the CTA's last term: until every rank's terms are here.

        Leaves in `storage.alive` whether they are. A rank that has been given up does not signal,
        so that no peer sums what never came.
        """
        layout = self.dispatch.layout
        finished = view.counter(self.last_counter)
        threads.sync()
        if threads.idx < WARP_SIZE:
            is_last, alive = Int32(0), Int32(1)
            if threads.idx == 0:
                is_last = arrive(finished, view.num_ctas)
                if is_last == 1:
                    # All CTAs of this launch have read it.
                    int32_ptr(view.address("step")).store(view.step)
            if const_expr(layout.num_ranks > 1):
                is_last = cute.arch.shuffle_sync(is_last, 0)
                cute.arch.sync_warp()
                if is_last == 1:
                    if view.watch.is_alive() == 1:
                        self.dispatch.signal(view, "drained")
                alive = view.watch.wait_peers(
                    view.address("drained"), layout.num_ranks, Phase.DRAINED
                )
            else:
                if (threads.idx == 0) & (is_last == 0):
                    alive = view.watch.wait_reached(
                        finished, view.num_ctas, Phase.FINISHED, view.rank
                    )
            if threads.idx == 0:
                storage.alive.data_ptr().store(alive)
        threads.sync()

    @cute.jit
    def reduce(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads: this CTA's part of the own tokens; none where a rank refused."""
        layout = self.dispatch.layout
        vectors_per_token = layout.hidden // 8
        num_tokens = (storage.token_base.data_ptr() + 1).load()  # own tokens are the first source
        num_tokens = num_tokens * storage.alive.data_ptr().load()
        num_vectors = num_tokens * vectors_per_token
        first = view.cta * threads.num_threads + threads.idx
        stride = view.num_ctas * threads.num_threads
        num_in_flight = max(1, SLOTS_IN_FLIGHT // layout.top_k)
        for base in range(first, num_vectors, stride * num_in_flight):
            positions, loaded = [], []
            for i in cutlass.range_constexpr(num_in_flight):
                # Past the end the first vector is read again and not stored.
                vector = base + i * stride
                positions.append(vector)
                vector = schedule.select(vector < num_vectors, vector, base)
                loaded.append(self.load_terms(view, inputs, vector))
            for i in cutlass.range_constexpr(num_in_flight):
                if positions[i] < num_vectors:
                    target = inputs.out + Int64(positions[i]) * VECTOR_BYTES
                    ptx.st_global(target, sum_slots(*loaded[i]))

    @cute.jit
    def prefetch(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads, before `drain`: into L2 what `reduce` reads first. Weights have streamed
        through L2 since it was written."""
        layout = self.dispatch.layout
        vectors_per_token = layout.hidden // 8
        num_tokens = (storage.token_base.data_ptr() + 1).load()
        vector = view.cta * threads.num_threads + threads.idx
        if vector < num_tokens * vectors_per_token:
            token = vector // vectors_per_token
            first_slot = Int64(token * layout.top_k)
            ptx.prefetch_l2(inputs.topk_weights + first_slot * 4)
            ptx.prefetch_l2(
                inputs.topk_ids + first_slot * (8 if self.dispatch.ids_are_int64 else 4)
            )
            if threads.idx % VECTORS_PER_LINE == 0:
                terms = view.address("terms") + Int64(vector % vectors_per_token) * VECTOR_BYTES
                for k in cutlass.range_constexpr(layout.top_k):
                    ptx.prefetch_l2(terms + (first_slot + k) * self.dispatch.row_bytes)

    @cute.jit
    def load_terms(self, view: RankView, inputs: RankInputs, vector: Int32):
        """Eight columns of a token: terms, weights, and whether each slot has an expert."""
        layout = self.dispatch.layout
        vectors_per_token = layout.hidden // 8
        token = vector // vectors_per_token
        first_slot = token * layout.top_k
        weights = cute.make_ptr(Float32, inputs.topk_weights, cute.AddressSpace.gmem)
        terms = view.address("terms") + Int64(vector % vectors_per_token) * VECTOR_BYTES
        slot_terms, slot_weights, is_used = [], [], []
        for k in cutlass.range_constexpr(layout.top_k):
            slot = first_slot + k
            slot_terms.append(ptx.ld_global_v4(terms + Int64(slot) * self.dispatch.row_bytes))
            slot_weights.append((weights + slot).load())
            expert = self.dispatch.load_id(inputs.topk_ids, slot)
            is_used.append((expert >= 0) & (expert < self.dispatch.num_experts))
        return slot_terms, slot_weights, is_used

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
from moe_ep.megakernel.combine_sm90 import add_slots, round_sums
from moe_ep.megakernel.dispatch import WARP_SIZE, Dispatch
from moe_ep.megakernel.protocol import Phase
from moe_ep.megakernel.rank_view import RankInputs, RankView, Threads
from moe_ep.megakernel.routing import float32_ptr

VECTOR_BYTES = 16
VECTORS_PER_LINE = 8  # of L2


@dataclass(frozen=True)
class Combine:
    """The phases for the layout of `dispatch`.

    slots_in_flight   terms that a thread loads at once, 16 bytes each
    """

    dispatch: Dispatch
    slots_in_flight: int = 16

    @property
    def last_counter(self) -> int:
        """Of the CTAs that have left all that other ranks wait for."""
        counters = self.dispatch.layout.counters
        return counters.summed if self.dispatch.layout.is_tp else counters.finished

    @cute.jit
    def drain(self, view: RankView, storage, threads: Threads):
        """All threads, after the CTA's last term: until every rank's terms are here.

        Leaves in `storage.alive` whether they are. A rank one of whose CTAs has given up does not
        signal, so that no peer sums what never came.
        """
        layout = self.dispatch.layout
        finished = view.counter(self.last_counter)
        threads.sync()
        if threads.idx < WARP_SIZE:
            is_last, alive, signals = Int32(0), Int32(1), Int32(0)
            if threads.idx == 0:
                is_last, is_lost = arrive(finished, view.num_ctas, view.watch.has_given_up())
                if is_last == 1:
                    # All CTAs of this launch have read it.
                    int32_ptr(view.address("step")).store(view.step)
                    signals = 1 - is_lost
            if const_expr(layout.num_ranks > 1):
                signals = cute.arch.shuffle_sync(signals, 0)
                cute.arch.sync_warp()
                if signals == 1:
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

    @property
    def vectors_in_flight(self) -> int:
        """16-byte vectors of one token that a thread sums at once."""
        return max(1, self.slots_in_flight // self.dispatch.layout.top_k)

    @property
    def vectors_per_token(self) -> int:
        return self.dispatch.layout.hidden // 8

    @property
    def units_per_token(self) -> int:
        """A unit is what a warp sums at once: every `units_per_token`-th 32 vectors of a token."""
        return -(-self.vectors_per_token // (WARP_SIZE * self.vectors_in_flight))

    @cute.jit
    def reduce(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads: this CTA's part of the own tokens; none where a rank refused.

        Neighbouring units go to different CTAs, so that a few tokens are summed by many.
        """
        num_tokens = (storage.token_base.data_ptr() + 1).load()  # own tokens are the first source
        num_units = num_tokens * storage.alive.data_ptr().load() * self.units_per_token
        stride = view.num_ctas * (threads.num_threads // WARP_SIZE)
        for unit in range(self.first_unit(view, threads), num_units, stride):
            token, vectors = self.find_unit(unit)
            words = self.sum_vectors(view, inputs, token, vectors)
            row = inputs.out + Int64(token) * self.dispatch.row_bytes
            for i in cutlass.range_constexpr(len(vectors)):
                if vectors[i] < self.vectors_per_token:
                    target = row + Int64(vectors[i]) * VECTOR_BYTES
                    ptx.st_global(target, words[i])

    @cute.jit
    def prefetch(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads, before `drain`: into L2 what `reduce` reads first. Weights have streamed
        through L2 since it was written."""
        layout = self.dispatch.layout
        num_tokens = (storage.token_base.data_ptr() + 1).load()
        unit = self.first_unit(view, threads)
        if unit < num_tokens * self.units_per_token:
            token, vectors = self.find_unit(unit)
            first_slot = Int64(token * layout.top_k)
            id_bytes = self.dispatch.routing.id_bytes
            ptx.prefetch_l2(inputs.topk_weights + first_slot * 4)
            ptx.prefetch_l2(inputs.topk_ids + first_slot * id_bytes)
            if cute.arch.lane_idx() % VECTORS_PER_LINE == 0:
                for vector in vectors:
                    for k in cutlass.range_constexpr(layout.top_k):
                        ptx.prefetch_l2(self.term_address(view, token, k, vector))

    def first_unit(self, view: RankView, threads: Threads) -> Int32:
        """Of the calling warp; the next one is all warps of all CTAs later."""
        return threads.idx // WARP_SIZE * view.num_ctas + view.cta

    def find_unit(self, unit: Int32):
        """Token of a unit, and the lane's vectors of it; some may lie behind the token's last."""
        first = unit % self.units_per_token * WARP_SIZE + cute.arch.lane_idx()
        step = self.units_per_token * WARP_SIZE
        vectors = [first + i * step for i in range(self.vectors_in_flight)]
        return unit // self.units_per_token, vectors

    def sum_vectors(self, view: RankView, inputs: RankInputs, token: Int32, vectors):
        """The token's output at each vector, eight columns of BF16; of one behind the end those of
        the last."""
        vectors = [cutlass.min(vector, self.vectors_per_token - 1) for vector in vectors]
        sums = [[Float32(0.0)] * 8 for _ in vectors]
        top_k = self.dispatch.layout.top_k
        for first in range(0, top_k, self.slots_in_flight):
            slots = range(first, min(first + self.slots_in_flight, top_k))
            weights, is_used = self.load_weights(inputs, token, slots)
            loaded = [
                [ptx.ld_global_v4_once(self.term_address(view, token, k, vector)) for k in slots]
                for vector in vectors
            ]
            for i, terms in enumerate(loaded):
                sums[i] = add_slots(sums[i], terms, weights, is_used)
        return [round_sums(of_vector) for of_vector in sums]

    def load_weights(self, inputs: RankInputs, token: Int32, slots: range):
        """Routing weights of some of a token's slots, and whether each has an expert."""
        routing = self.dispatch.routing
        weights, first = float32_ptr(inputs.topk_weights), token * self.dispatch.layout.top_k
        experts = [routing.load_id(inputs.topk_ids, first + k) for k in slots]
        is_used = [(expert >= 0) & (expert < routing.num_experts) for expert in experts]
        return [(weights + first + k).load() for k in slots], is_used

    def term_address(self, view: RankView, token: Int32, slot: int, vector: Int32) -> Int64:
        row = Int64(token * self.dispatch.layout.top_k + slot) * self.dispatch.row_bytes
        return view.address("terms") + row + Int64(vector) * VECTOR_BYTES

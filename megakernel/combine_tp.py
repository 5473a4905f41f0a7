"""Combine under tp: every rank has FC2 sums of its part of I for every token, FP32, in `terms`.

    part[r, t] = sum over k of topk_weights[t, k] * terms_r[t, k]      on each rank r, slot order
    out[t]     = bf16(sum over r of part[r, t])                        at t's owner, rank order

FP32 from +0 on, each operation rounded by itself; masked slots are skipped. A rank's sums wait for
all FC2 rows of the rank (`finished`) and travel to the owners' `parts`; `Combine.drain` follows.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from moe_ep.comm import ptx
from moe_ep.comm.device import count
from moe_ep.megakernel import protocol
from moe_ep.megakernel.dispatch import Dispatch
from moe_ep.megakernel.protocol import Phase
from moe_ep.megakernel.rank_view import RankInputs, RankView, Threads

VECTOR_COLUMNS = 4  # FP32, of a thread at a time
VECTOR_BYTES = 16
LOADS_IN_FLIGHT = 8  # of a thread, a vector each


@dataclass(frozen=True)
class CombineTp:
    """What stands in place of `Combine.reduce`, for the layout of `dispatch`."""

    dispatch: Dispatch

    @property
    def row_bytes(self) -> int:
        return self.dispatch.layout.hidden * 4

    @property
    def vectors_per_token(self) -> int:
        return self.dispatch.layout.hidden // VECTOR_COLUMNS

    @cute.jit
    def send_parts(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads, after the CTA's last FC2 row: this CTA's share of all tokens' parts."""
        self.finish(view, storage, threads)
        num_tokens = (storage.token_base.data_ptr() + self.dispatch.layout.num_ranks).load()
        num_vectors = num_tokens * storage.alive.data_ptr().load() * self.vectors_per_token
        first = view.cta * threads.num_threads + threads.idx
        for vector in range(first, num_vectors, view.num_ctas * threads.num_threads):
            source, token = self.dispatch.find_source(
                view, storage, vector // self.vectors_per_token
            )
            column = Int64(vector % self.vectors_per_token) * VECTOR_BYTES
            sums = self.sum_slots(view, inputs, source, token, column)
            row = view.rank * self.dispatch.layout.max_tokens_per_rank + token
            target = view.peer_address(source, "parts") + Int64(row) * self.row_bytes + column
            ptx.st_global(target, [ptx.float_bits(total) for total in sums])

    @cute.jit
    def finish(self, view: RankView, storage, threads: Threads):
        """All threads: until every CTA of this rank has stored its FC2 rows, or time is up; leaves
        in `storage.alive` which."""
        threads.sync()
        if threads.idx == 0:
            finished = view.counter(self.dispatch.layout.counters.finished)
            count(finished, 1)
            alive = view.watch.wait_reached(finished, view.num_ctas, Phase.FINISHED, view.rank)
            storage.alive.data_ptr().store(alive)
        threads.sync()

    def sum_slots(self, view: RankView, inputs, source: Int32, token: Int32, column: Int64):
        """Weighted sum of a token's terms over its slots: FP32, four columns."""
        dispatch, layout = self.dispatch, self.dispatch.layout
        index = protocol.slot_index(source, token, 0, layout.max_tokens_per_rank, layout.top_k)
        terms = view.address("terms") + Int64(index) * self.row_bytes + column
        sums = [Float32(0.0)] * VECTOR_COLUMNS
        for slots in _batches(layout.top_k):
            loaded = []
            for k in slots:
                slot = token * layout.top_k + k
                expert = dispatch.routing.routed_id(view, inputs, source, slot)
                is_used = (expert >= 0) & (expert < dispatch.routing.num_experts)
                weight = dispatch.routing.routed_weight(view, inputs, source, slot)
                loaded.append((ptx.ld_global_v4(terms + k * self.row_bytes), weight, is_used))
            for words, weight, is_used in loaded:
                for i in range(VECTOR_COLUMNS):
                    total = ptx.add_rn(sums[i], ptx.mul_rn(ptx.as_float(words[i]), weight))
                    sums[i] = cutlass.select_(is_used, total, sums[i])
        return sums

    @cute.jit
    def reduce(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads, after `Combine.drain`: this CTA's part of the own tokens; none where a rank
        refused."""
        num_tokens = (storage.token_base.data_ptr() + 1).load()  # own tokens are the first source
        num_vectors = num_tokens * storage.alive.data_ptr().load() * self.vectors_per_token
        first = view.cta * threads.num_threads + threads.idx
        for vector in range(first, num_vectors, view.num_ctas * threads.num_threads):
            sums = self.sum_ranks(view.address("parts") + Int64(vector) * VECTOR_BYTES)
            words = [ptx.cvt_bf16x2(*sums[:2]), ptx.cvt_bf16x2(*sums[2:])]
            ptx.st_global(inputs.out + Int64(vector) * (VECTOR_BYTES // 2), words)

    def sum_ranks(self, part: Int64):
        """Sum over the ranks: FP32, four columns. `part`: address of rank 0's."""
        layout = self.dispatch.layout
        rank_bytes = layout.max_tokens_per_rank * self.row_bytes
        sums = [Float32(0.0)] * VECTOR_COLUMNS
        for ranks in _batches(layout.num_ranks):
            loaded = [ptx.ld_global_v4(part + rank * rank_bytes) for rank in ranks]
            for words in loaded:
                for i in range(VECTOR_COLUMNS):
                    sums[i] = ptx.add_rn(sums[i], ptx.as_float(words[i]))
        return sums


def _batches(number: int) -> list[range]:
    """0 .. number - 1, in order, as many at once as are loaded together."""
    starts = range(0, number, LOADS_IN_FLIGHT)
    return [range(start, min(start + LOADS_IN_FLIGHT, number)) for start in starts]

"""Routing ids and weights as the kernels read them, and what they note of bad ones."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from moe_ep.comm.device import int32_ptr
from moe_ep.comm.post_mortem import FIELDS
from moe_ep.megakernel.rank_view import RankInputs, RankView
from moe_ep.megakernel.workspace import Workspace


@dataclass(frozen=True)
class Routing:
    """Of one layout.

    num_experts  E over all ranks
    """

    layout: Workspace
    num_experts: int
    ids_are_int64: bool

    @property
    def id_bytes(self) -> int:
        """Of the caller's ids; between ranks they have 4."""
        return 8 if self.ids_are_int64 else 4

    def ids_offset(self, rank: Int32) -> Int64:
        """Bytes before a rank's part of the region ids, or of weights."""
        return Int64(rank) * (self.layout.max_tokens_per_rank * self.layout.top_k * 4)

    def load_id(self, topk_ids: Int64, index):
        """The caller's id in its own width."""
        dtype = Int64 if self.ids_are_int64 else Int32
        return (cute.make_ptr(dtype, topk_ids, cute.AddressSpace.gmem) + index).load()

    def routed_id(self, view: RankView, inputs: RankInputs, source: Int32, index):
        """Id of a source's slot token * K + slot: as it came, or one rank's own, unchecked."""
        if self.layout.num_ranks == 1:
            return self.load_id(inputs.topk_ids, index)
        return (int32_ptr(view.address("ids") + self.ids_offset(source)) + index).load()

    def routed_weight(self, view: RankView, inputs: RankInputs, source: Int32, index) -> Float32:
        """Routing weight of a source's slot token * K + slot, under tp."""
        if self.layout.num_ranks == 1:
            return (float32_ptr(inputs.topk_weights) + index).load()
        return (float32_ptr(view.address("weights") + self.ids_offset(source)) + index).load()

    @cute.jit
    def known_expert(self, loaded) -> Int32:
        """An id, -1 where it is masked or not an expert."""
        expert = Int32(-1)
        # Compared in the ids' own width: 2**32 + 1 is not expert 1.
        if (loaded >= 0) & (loaded < self.num_experts):
            expert = Int32(loaded)
        return expert

    @cute.jit
    def local_expert(self, view: RankView, loaded) -> Int32:
        """Local expert of an id; -1 for none and for one of another rank."""
        if const_expr(self.layout.is_tp):
            local = self.known_expert(loaded)
        else:
            share, extra = divmod(self.num_experts, self.layout.num_ranks)
            first = view.rank * share + cutlass.min(view.rank, Int32(extra))
            num_local = share + Int32(view.rank < extra)
            local = self.known_expert(loaded) - first
            if (local < 0) | (local >= num_local):
                local = Int32(-1)
        return local

    @cute.jit
    def note_bad_id(self, view: RankView, index, loaded):
        """Leave an id that is not an expert for the host."""
        if loaded >= self.num_experts:
            self.note(view, "bad_slot", Int32(index) + 1, "bad_id", Int32(loaded))

    @cute.jit
    def note(self, view, name: cutlass.Constexpr, value, other_name: cutlass.Constexpr, other):
        """Two words of the rank's record, for the host to find later."""
        record = int32_ptr(view.watch.record)
        cute.arch.store(record + FIELDS.index(other_name), Int32(other), sem="relaxed", scope="sys")
        cute.arch.store(record + FIELDS.index(name), Int32(value), sem="release", scope="sys")


def float32_ptr(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Float32, address, cute.AddressSpace.gmem)

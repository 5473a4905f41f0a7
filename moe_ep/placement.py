"""Which expert every physical slot holds: redundant copies of busy experts, and moving them.

A layer with a map runs over physical slots. Those are divided over the ranks as experts are
(`owned_experts`); routing names logical experts and is translated before dispatch. A logical expert
has one copy or several, all alike, so that the output's bits do not depend on the map.

Which copy a token takes: with n copies of its expert, in ascending order of slots, token t of rank
r takes copy (t + r) mod n. No state and no randomness; a rank's tokens spread evenly.

    expert_map = ExpertMap(8, (0, 1, 2, 3, 4, 5, 6, 7, 0, 5))
    weights = place(full_weights, expert_map).shard("ep", rank, num_ranks)    # or moe_ep.load(...)
    layer = MoEEpLayer(shape, weights, max_tokens_per_rank=512, expert_map=expert_map)
    layer.rebalance(another_map)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index

import torch

from moe_ep.arguments import check_int, check_kind
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.held_weights import select_experts
from moe_ep.megakernel.problem import MoEShape
from moe_ep.weights import MoEWeights


@dataclass(frozen=True)
class ExpertMap:
    """The logical expert of each physical slot, (0, 1, ..., 7, 0, 5) for copies of 0 and 5.

    num_experts           E, logical experts
    physical_to_logical   at least E slots; every expert has at least one

    Raises `MoEEpConfigError` naming slot or expert for an id out of range or an expert without a
    slot.
    """

    num_experts: int
    physical_to_logical: tuple[int, ...]

    def __post_init__(self) -> None:
        check_int("expert_map: num_experts", self.num_experts, 1)
        try:
            slots = tuple(index(expert) for expert in self.physical_to_logical)
        except TypeError as error:
            raise MoEEpConfigError(
                f"expert_map: physical_to_logical must be ints, one for each slot: {error}"
            ) from None
        object.__setattr__(self, "physical_to_logical", slots)
        for slot, expert in enumerate(self.physical_to_logical):
            if not 0 <= expert < self.num_experts:
                raise MoEEpConfigError(
                    f"expert_map: slot {slot} holds expert {expert}; allowed: 0 to "
                    f"{self.num_experts - 1}"
                )
        missing = sorted(set(range(self.num_experts)) - set(self.physical_to_logical))
        if missing:
            raise MoEEpConfigError(
                f"expert_map: no slot holds expert {', '.join(map(str, missing))}; allowed: at "
                "least one slot for every expert"
            )

    @classmethod
    def identity(cls, num_experts: int) -> "ExpertMap":
        """Every expert once, in order."""
        return cls(num_experts, tuple(range(num_experts)))

    @property
    def num_physical(self) -> int:
        return len(self.physical_to_logical)

    @property
    def logical_to_physical(self) -> tuple[tuple[int, ...], ...]:
        """The slots of every expert, ascending."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical_to_logical):
            slots[expert].append(slot)
        return tuple(map(tuple, slots))

    def logical_of(self, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.physical_to_logical[slot] for slot in slots)


def slots_shape(shape: MoEShape, expert_map: ExpertMap | None) -> MoEShape:
    """`shape` with slots in the place of experts, which is what backends run."""
    if expert_map is None:
        return shape
    check_kind("expert_map", expert_map, ExpertMap, "an ExpertMap")
    if expert_map.num_experts != shape.num_experts:
        raise MoEEpConfigError(
            f"expert_map places {expert_map.num_experts} experts, shape has {shape.num_experts}"
        )
    return replace(shape, num_experts=expert_map.num_physical)


def place(weights: MoEWeights, expert_map: ExpertMap) -> MoEWeights:
    """Full weights with one expert per physical slot, as fresh tensors; then `shard` them.

    Raises `MoEEpConfigError` for a part of the weights, or a map of another number of experts.
    """
    check_kind("weights", weights, MoEWeights, "MoEWeights")
    check_kind("expert_map", expert_map, ExpertMap, "an ExpertMap")
    if weights.num_ranks != 1:
        raise MoEEpConfigError(
            f"place needs full weights, these are rank {weights.rank} of {weights.num_ranks}"
        )
    if weights.num_experts != expert_map.num_experts:
        raise MoEEpConfigError(
            f"expert_map places {expert_map.num_experts} experts, the weights have "
            f"{weights.num_experts}"
        )
    slots = torch.tensor(expert_map.physical_to_logical, device=weights.device)
    return replace(
        weights,
        **{name: select_experts(tensor, slots) for name, tensor in weights.tensors.items()},
        num_experts=expert_map.num_physical,
        expert_ids=tuple(range(expert_map.num_physical)),
        slot_experts=expert_map.physical_to_logical,
    )


def check_placed(weights: MoEWeights, expert_map: ExpertMap | None) -> None:
    """Raise `MoEEpConfigError` naming the first slot whose expert is not the map's."""
    num_slots = weights.num_experts
    held = weights.slot_experts or tuple(range(num_slots))
    wanted = expert_map.physical_to_logical if expert_map else tuple(range(num_slots))
    for slot, (have, want) in enumerate(zip(held, wanted, strict=True)):
        if have != want:
            raise MoEEpConfigError(
                f"weights hold expert {have} in slot {slot}, expert_map puts {want} there; place "
                "weights by the layer's map: place(weights, expert_map) or load(..., expert_map=)"
            )


class PhysicalIds:
    """Translates routing to slots, on the device, without waiting for it.

    `update` writes another map into the same tensors, so that a captured graph follows it.
    """

    def __init__(self, expert_map: ExpertMap, rank: int, device: torch.device) -> None:
        e, p = expert_map.num_experts, expert_map.num_physical
        self._rank, self._num_physical = rank, p
        self._slots = torch.empty(e, p - e + 1, dtype=torch.int64, device=device)
        self._num_copies = torch.empty(e, dtype=torch.int64, device=device)
        self.update(expert_map)

    def update(self, expert_map: ExpertMap) -> None:
        slots = torch.zeros(self._slots.shape, dtype=torch.int64)
        for expert, copies in enumerate(expert_map.logical_to_physical):
            slots[expert, : len(copies)] = torch.tensor(copies)
        self._slots.copy_(slots)
        self._num_copies.copy_(torch.tensor([len(c) for c in expert_map.logical_to_physical]))

    def __call__(self, topk_ids_TK: torch.Tensor) -> torch.Tensor:
        """Logical ids -> slots, same dtype; negative ids stay, one that is no expert is no slot."""
        num_experts = len(self._num_copies)
        expert_TK = topk_ids_TK.clamp(0, num_experts - 1).long()
        turn_T1 = torch.arange(len(topk_ids_TK), device=topk_ids_TK.device)[:, None] + self._rank
        slot_TK = self._slots[expert_TK, turn_T1 % self._num_copies[expert_TK]]
        slot_TK = torch.where(topk_ids_TK >= num_experts, self._num_physical, slot_TK)
        return torch.where(topk_ids_TK < 0, topk_ids_TK, slot_TK.to(topk_ids_TK.dtype))

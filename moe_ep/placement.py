"""Which expert every physical slot holds: redundant copies of busy experts, and moving them.

A layer with a map runs over physical slots. Those are divided over the ranks as experts are
(`owned_experts`); routing names logical experts and is translated before dispatch. A logical expert
has one copy or several, all alike, so that the output's bits do not depend on the map.

Which copy a token takes: with n copies of its expert, in ascending order of slots, token t of rank
r takes copy (t + r) mod n. No state and no randomness; a rank's tokens spread evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import owned_experts
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
        object.__setattr__(self, "physical_to_logical", tuple(map(int, self.physical_to_logical)))
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


def place(weights: MoEWeights, expert_map: ExpertMap) -> MoEWeights:
    """Full weights with one expert per physical slot, as fresh tensors; then `shard` them.

    Raises `MoEEpConfigError` for a part of the weights, or a map of another number of experts.
    """
    if weights.num_ranks != 1:
        raise MoEEpConfigError(
            f"place needs full weights, these are rank {weights.rank} of {weights.num_ranks}"
        )
    if weights.num_experts != expert_map.num_experts:
        raise MoEEpConfigError(
            f"expert_map places {expert_map.num_experts} experts, the weights have "
            f"{weights.num_experts}"
        )
    return take_experts(weights, expert_map.physical_to_logical, expert_map.num_physical)


def take_experts(
    weights: MoEWeights, local_experts: Sequence[int], num_experts: int | None = None
) -> MoEWeights:
    """Copies of some experts by their position here, as experts 0, 1, ... of a layer of
    `num_experts` (default: of these alone)."""
    index = torch.tensor(local_experts, dtype=torch.long, device=weights.device)
    return replace(
        weights,
        num_experts=num_experts or len(local_experts),
        expert_ids=tuple(range(len(local_experts))),
        **{name: _index_select(tensor, index) for name, tensor in weights.tensors.items()},
    )


def _index_select(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor of any dtype (index_select does not take every FP8)."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)


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


@dataclass(frozen=True)
class Moves:
    """What a rank sends and receives on the way from one map to another.

    sends[r]      local positions here whose weights rank r needs, in the order of its `receives`
    receives[r]   local positions here that are filled from rank r
    """

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[tuple[int, ...], ...]

    @classmethod
    def between(cls, old: ExpertMap, new: ExpertMap, rank: int, num_ranks: int) -> "Moves":
        """Only slots that change move. The source is a copy on the same rank, else the first."""
        if (old.num_experts, old.num_physical) != (new.num_experts, new.num_physical):
            raise MoEEpConfigError(
                f"expert_map places {new.num_experts} experts on {new.num_physical} slots; "
                f"allowed: {old.num_experts} on {old.num_physical}, as built"
            )
        owned = [owned_experts(old.num_physical, num_ranks, r) for r in range(num_ranks)]
        owner = [r for r in range(num_ranks) for _ in owned[r]]
        sends: list[list[int]] = [[] for _ in range(num_ranks)]
        receives: list[list[int]] = [[] for _ in range(num_ranks)]
        sources = old.logical_to_physical
        for slot, expert in enumerate(new.physical_to_logical):
            if old.physical_to_logical[slot] == expert:
                continue
            copies = sources[expert]
            source = next((s for s in copies if owner[s] == owner[slot]), copies[0])
            if owner[source] == rank:
                sends[owner[slot]].append(source - owned[rank].start)
            if owner[slot] == rank:
                receives[owner[source]].append(slot - owned[rank].start)
        return cls(tuple(map(tuple, sends)), tuple(map(tuple, receives)))

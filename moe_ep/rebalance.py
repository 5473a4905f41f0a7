"""Experts move between ranks, weights and scales together, when the map of slots changes."""

from dataclasses import dataclass

import torch

from moe_ep.arguments import check_kind
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.row_exchange import RowExchange
from moe_ep.fingerprint import agree
from moe_ep.held_weights import HeldWeights, read_experts, write_experts
from moe_ep.megakernel.problem import owned_experts
from moe_ep.placement import ExpertMap
from moe_ep.weights import MoEWeights


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
        """Only slots that change move. The source is a copy on the same rank, else the first.

        Raises `MoEEpConfigError` for a map of other sizes: the memory is that of the old one.
        """
        check_kind("expert_map", new, ExpertMap, "an ExpertMap")
        if (old.num_experts, old.num_physical) != (new.num_experts, new.num_physical):
            raise MoEEpConfigError(
                f"expert_map places {new.num_experts} experts on {new.num_physical} slots; "
                f"allowed: {old.num_experts} on {old.num_physical}, as built"
            )
        owned = [owned_experts(old.num_physical, num_ranks, r) for r in range(num_ranks)]
        owner = [r for r in range(num_ranks) for _ in owned[r]]
        sends: list[list[int]] = [[] for _ in range(num_ranks)]
        receives: list[list[int]] = [[] for _ in range(num_ranks)]
        slots_of = old.logical_to_physical
        for slot, expert in enumerate(new.physical_to_logical):
            if old.physical_to_logical[slot] == expert:
                continue
            copies = slots_of[expert]
            source = next((s for s in copies if owner[s] == owner[slot]), copies[0])
            if owner[source] == rank:
                sends[owner[slot]].append(source - owned[rank].start)
            if owner[slot] == rank:
                receives[owner[source]].append(slot - owned[rank].start)
        return cls(tuple(map(tuple, sends)), tuple(map(tuple, receives)))


def agree_on_moves(group: EpGroup, old: ExpertMap, new: ExpertMap, timeout_s: float) -> Moves:
    """This rank's moves, once every rank has given the same map. Collective; all raise or none."""
    fields = moves = refusal = None
    try:
        moves = Moves.between(old, new, group.rank, group.num_ranks)
        fields = {"expert_map": repr(new)}
    except MoEEpConfigError as error:
        refusal = error
    agree(group, fields, refusal, timeout_s, topic="rebalance")
    return moves


def move_experts(
    group: EpGroup,
    liveness: Liveness | None,
    held: HeldWeights,
    form: MoEWeights,
    moves: Moves,
    timeout_s: float,
) -> None:
    """Exchange copies of the experts that move, then write them in place. Collective.

    Needs memory for what this rank sends and for what it receives.
    """
    sent = read_experts(held, form, [idx for part in moves.sends for idx in part])
    filled = [idx for part in moves.receives for idx in part]
    received = {}
    exchange = None if group.num_ranks == 1 else RowExchange(group, liveness, timeout_s)
    for name, tensor in sent.items():
        if exchange is None:
            received[name] = tensor
            continue
        received[name] = tensor.new_empty(len(filled), *tensor.shape[1:])
        exchange(
            _rows_of_bytes(received[name]),
            _rows_of_bytes(tensor),
            [len(part) for part in moves.receives],
            [len(part) for part in moves.sends],
            "rebalance",
            step=0,
        )
    write_experts(held, form, received, filled)


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [experts, bytes] of the same storage: gloo moves no FP8."""
    row_bytes = tensor[:0].new_empty(1, *tensor.shape[1:]).nbytes
    return tensor.view(len(tensor), *tensor.shape[1:], 1).view(torch.uint8).view(-1, row_bytes)

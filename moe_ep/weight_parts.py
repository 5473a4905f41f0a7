"""What one rank holds of full weights: some experts (ep), or a part of every expert (tp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import owned_experts, weight_format

if TYPE_CHECKING:
    from moe_ep.weights import MoEWeights


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that holds no storage but its own."""
    return tensor.clone(memory_format=torch.contiguous_format)


def ep_part(
    weights: MoEWeights, rank: int, num_ranks: int
) -> tuple[range, dict[str, torch.Tensor]]:
    ids = owned_experts(weights.num_experts, num_ranks, rank)
    return ids, {name: fresh(t[ids.start : ids.stop]) for name, t in weights.tensors.items()}


def tp_misfit(intermediate: int, weights_format: str, num_ranks: int) -> str | None:
    """Why tp ranks cannot divide such an intermediate, or None."""
    fmt = weight_format(weights_format)
    block = max(1, fmt.sf_cols)
    if intermediate % (num_ranks * block) == 0:
        return None
    blocks = f" into whole {fmt.name} scale blocks of {block}" if block > 1 else ""
    return (
        f"intermediate {intermediate} does not divide over {num_ranks} tp ranks{blocks}; it must "
        f"be a multiple of {num_ranks * block}"
    )


def tp_part(
    weights: MoEWeights, rank: int, num_ranks: int
) -> tuple[tuple[int, ...], dict[str, torch.Tensor | None]]:
    misfit = tp_misfit(weights.intermediate, weights.weights_format, num_ranks)
    if misfit is not None:
        raise MoEEpConfigError(misfit)

    def cut(tensor: torch.Tensor, dim: int, num_halves: int = 1) -> torch.Tensor:
        halves = tensor.unflatten(dim, (num_halves, -1))
        part = halves.shape[dim + 1] // num_ranks
        rows = halves.narrow(dim + 1, rank * part, part)
        return fresh(rows).flatten(dim, dim + 1)

    parts: dict[str, torch.Tensor | None] = {}
    for name, tensor in weights.tensors.items():
        if name in ("w13", "w13_sf", "b13"):
            parts[name] = cut(tensor, 1, weights.num_halves)
        elif name in ("w2", "w2_sf"):
            parts[name] = cut(tensor, 2)
        elif name == "b2":
            parts[name] = fresh(tensor) if rank == 0 else None
        else:
            parts[name] = fresh(tensor)
    return weights.expert_ids, parts

"""Layers of random weights, for measuring: every rank makes its own part."""

from dataclasses import replace

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.launch.geometries import geometry
from moe_ep.megakernel.problem import MoEShape, owned_experts, weight_format
from moe_ep.weights import MoEWeights


def shard_shape(name: str, experts_per_rank: int | None, num_ranks: int) -> MoEShape:
    """The geometry, or its shard: `experts_per_rank` experts on each rank, the same top-k."""
    shape = geometry(name)
    if experts_per_rank is None:
        return shape
    num_experts = experts_per_rank * num_ranks
    if not shape.top_k <= num_experts <= shape.num_experts:
        raise MoEEpConfigError(
            f"--experts-per-rank {experts_per_rank} on {num_ranks} ranks makes {num_experts} "
            f"experts; allowed for {name}: {shape.top_k} to {shape.num_experts}"
        )
    return replace(shape, num_experts=num_experts)


def random_weights(shape: MoEShape, fmt: str, group: EpGroup, parallel: str = "ep") -> MoEWeights:
    """This rank's experts, or its part of all experts under "tp", with normal entries; activations
    keep the size of the tokens. Ranks quantise their parts by themselves.

    Raises `MoEEpConfigError` where the intermediate does not divide into whole scale blocks.
    """
    is_tp = parallel == "tp"
    ids = (
        range(shape.num_experts)
        if is_tp
        else owned_experts(shape.num_experts, group.num_ranks, group.rank)
    )
    num_parts = group.num_ranks if is_tp else 1
    multiple = num_parts * max(1, weight_format(fmt).sf_cols)
    if shape.intermediate % multiple:
        raise MoEEpConfigError(
            f"intermediate {shape.intermediate} does not divide over {num_parts} ranks in whole "
            f"scale blocks of {fmt}; allowed: multiples of {multiple}"
        )
    generator = torch.Generator(group.device).manual_seed(1 + group.rank)

    def normal(rows: int, cols: int, num_terms: int) -> torch.Tensor:
        w = torch.empty(len(ids), rows, cols, dtype=torch.bfloat16, device=group.device)
        return w.normal_(std=num_terms**-0.5, generator=generator)

    dense = MoEWeights.from_dense(
        normal(shape.fc1_rows // num_parts, shape.hidden, shape.hidden),
        normal(shape.hidden, shape.intermediate // num_parts, shape.intermediate),
        is_gated=shape.activation.is_gated,
    )
    weights = dense if fmt == "bf16" else dense.quantize(fmt)
    return replace(
        weights,
        parallel=parallel,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        expert_ids=tuple(ids),
        rank=group.rank,
        num_ranks=group.num_ranks,
    )

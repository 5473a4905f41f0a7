"""Layers and inputs that many tests build: every expert, rank and token differs."""

from dataclasses import dataclass, field, replace

import torch

from moe_ep import MoEInputs, MoEShape, MoEWeights
from moe_ep.megakernel.formats import PreparedWeights


def make_weights(shape: MoEShape, weights_format: str = "bf16", seed: int = 0) -> MoEWeights:
    """All experts; expert e's values are scaled by 1 + e/8, so that no two are alike."""
    generator = torch.Generator().manual_seed(seed)
    e, h, i = shape.num_experts, shape.hidden, shape.intermediate
    scale_E11 = (1 + torch.arange(e) / 8)[:, None, None]
    w13 = torch.randn(e, shape.fc1_rows, h, generator=generator) * scale_E11 / h**0.5
    w2 = torch.randn(e, h, i, generator=generator) / i**0.5
    is_gated = shape.activation.is_gated
    weights = MoEWeights.from_dense(w13.bfloat16(), w2.bfloat16(), is_gated=is_gated)
    return weights.quantize(weights_format)


def make_inputs(shape: MoEShape, num_tokens: int, seed: int, masked: float = 0.0) -> MoEInputs:
    """Random tokens and routing; a slot is masked with that probability, experts may repeat."""
    generator = torch.Generator().manual_seed(seed)
    slots = (num_tokens, shape.top_k)
    ids = torch.randint(0, shape.num_experts, slots, generator=generator, dtype=torch.int32)
    ids[torch.rand(slots, generator=generator) < masked] = -1
    return MoEInputs(
        torch.randn(num_tokens, shape.hidden, generator=generator).bfloat16(),
        ids,
        torch.rand(slots, generator=generator),
    )


def joined(parts: list[PreparedWeights]) -> PreparedWeights:
    """Prepared weights of all tp ranks, one after the other: what virtual ranks take."""
    names = ["w13", "w2", "w13_alpha", "w2_alpha"]
    names += ["b13"] if parts[0].b13 is not None else []
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    if parts[0].b2 is not None:  # rank 0 alone adds it; the others of this launch add 0
        none = torch.zeros_like(parts[0].b2)
        tensors["b2"] = torch.cat([parts[0].b2, *[none] * (len(parts) - 1)])
    return replace(parts[0], **tensors)


def with_ids(inputs: MoEInputs, ids: object) -> MoEInputs:
    """The same tokens and weights routed by `ids`, a tensor or one value for every slot."""
    if not isinstance(ids, torch.Tensor):
        ids = torch.full_like(inputs.topk_ids, ids)
    return MoEInputs(inputs.hidden_states, ids, inputs.topk_weights)


@dataclass(frozen=True)
class Case:
    """One call: how many tokens each rank brings (repeated over the ranks), and their routing.

    ids   "random", "masked" (a quarter of the slots), "one expert" (the last), "one token" (each
          token repeats one expert in all slots), "none" (all masked), "first half" of the experts
    """

    name: str
    tokens: tuple[int, ...]
    ids: str = "random"
    weights_format: str = "bf16"
    parallel: str = "ep"
    shape: MoEShape = field(
        default=MoEShape(num_experts=8, top_k=2, hidden=64, intermediate=128), compare=False
    )

    def num_tokens(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def inputs(self, rank: int) -> MoEInputs:
        """Rank `rank`'s part; the same whatever the number of ranks."""
        shape = self.shape
        masked = 0.25 if self.ids == "masked" else 0.0
        inputs = make_inputs(shape, self.num_tokens(rank), seed=100 + rank, masked=masked)
        match self.ids:
            case "one expert":
                return with_ids(inputs, shape.num_experts - 1)
            case "one token":
                return with_ids(inputs, inputs.topk_ids[:, :1].expand_as(inputs.topk_ids).clone())
            case "none":
                return with_ids(inputs, -1)
            case "first half":
                return with_ids(inputs, inputs.topk_ids // 2)
        return inputs


def gathered(parts: list[MoEInputs]) -> MoEInputs:
    """The tokens of all ranks in rank order."""
    return MoEInputs(
        torch.cat([part.hidden_states for part in parts]),
        torch.cat([part.topk_ids for part in parts]),
        torch.cat([part.topk_weights for part in parts]),
    )

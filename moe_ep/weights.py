"""The experts' weights as one rank holds them: codes, scale factors, biases, ownership.

Letters: e experts held here, E experts of the layer, H hidden, I intermediate as held here.
"""

from dataclasses import dataclass, replace

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import owned_experts, weight_format

PARALLEL_MODES = ("ep", "tp")
TENSOR_NAMES = (
    "w13",
    "w13_sf",
    "w2",
    "w2_sf",
    "gate_scale",
    "up_scale",
    "down_scale",
    "b13",
    "b2",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class MoEWeights:
    """Weights of the experts that one rank holds.

    w13, w2       bf16: BF16 [e, fc1_rows, H] (gate rows, then up rows) and [e, H, I]
    b13, b2       optional biases [e, fc1_rows] and [e, H], FP32 or BF16
    """

    weights_format: str
    w13: torch.Tensor
    w2: torch.Tensor
    w13_sf: torch.Tensor | None = None
    w2_sf: torch.Tensor | None = None
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    num_experts: int
    expert_ids: tuple[int, ...]
    hidden: int
    intermediate: int
    is_gated: bool = True
    parallel: str = "ep"
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def from_dense(
        cls,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        is_gated: bool = True,
    ) -> "MoEWeights":
        """All experts in BF16: w13 [E, 2I, H] ([E, I, H] when not gated), w2 [E, H, I]."""
        return cls(
            weights_format="bf16",
            w13=w13,
            w2=w2,
            b13=b13,
            b2=b2,
            num_experts=w13.shape[0],
            expert_ids=tuple(range(w13.shape[0])),
            hidden=w13.shape[2],
            intermediate=w2.shape[2],
            is_gated=is_gated,
        )

    @property
    def num_local_experts(self) -> int:
        return len(self.expert_ids)

    @property
    def local_intermediate(self) -> int:
        """I as held here: the model's, or this rank's part of it under tp."""
        return self.intermediate // (self.num_ranks if self.parallel == "tp" else 1)

    @property
    def fc1_rows(self) -> int:
        return (2 if self.is_gated else 1) * self.local_intermediate

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by field name."""
        held = {name: getattr(self, name) for name in TENSOR_NAMES}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return self.w13.device

    def to(self, device: torch.device | str) -> "MoEWeights":
        """The same weights on another device (the same tensors if they are there already)."""
        return replace(self, **{n: t.to(device) for n, t in self.tensors.items()})

    def shard(self, parallel: str, rank: int, num_ranks: int) -> "MoEWeights":
        """What `rank` of `num_ranks` holds, as fresh tensors. `self` must hold everything."""
        if parallel not in PARALLEL_MODES:
            raise MoEEpConfigError(f"parallel must be one of {PARALLEL_MODES}, got {parallel!r}")
        if parallel == "tp":
            raise NotImplementedError
        ids = owned_experts(self.num_experts, num_ranks, rank)
        cut = {n: t[ids.start : ids.stop].clone() for n, t in self.tensors.items()}
        return replace(
            self, **cut, expert_ids=tuple(ids), parallel=parallel, rank=rank, num_ranks=num_ranks
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 as [e, rows, cols] of `dtype`."""
        weight_format(self.weights_format)
        return self.w13.to(dtype), self.w2.to(dtype)

"""The split path: dispatch -> FC1 -> activation -> FC2 -> combine as separate steps.

    ep   tokens to the ranks that hold their experts; BF16 terms back, one per slot; the owner
         sums them over the slots
    tp   tokens to all ranks; each rank sums its FP32 parts of the terms over the slots; the owner
         adds the ranks' sums in rank order

Letters: T tokens of this rank, N tokens received, K slots, H hidden, R ranks, P pool rows: one for
each slot of a received token whose expert is here, sorted by expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_ep.comm.errors import MoEEpStateError
from moe_ep.comm.transport import Outgoing, Transport, to_slots
from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.held_weights import HeldWeights
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.problem import Activation
from moe_ep.reference import combine_parts, combine_terms, grouped_expert_terms
from moe_ep.weights import MoEWeights


class ExpertKernel(Protocol):
    """FC1, activation and FC2 of the experts held here."""

    @property
    def held(self) -> HeldWeights:
        """The weights that a call reads."""
        ...

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held on the device, by what they are."""
        ...

    def __call__(
        self, x_PH: torch.Tensor, rows_per_expert: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """Pool rows BF16 [P, H], rows of each local expert, first row of each (int32 [e + 1] on
        the device) -> terms [P, H], BF16 (ep) or FP32 (tp)."""
        ...

    def warmup(self) -> None:
        """Compile and load whatever a call needs."""
        ...

    def update(self, weights: MoEWeights) -> None:
        """Take other weights of the same kind, in place."""
        ...


@dataclass(frozen=True)
class TorchExperts:
    """The expert kernel in plain torch, one matmul per expert and matrix."""

    weights: MoEWeights
    activation: Activation

    @property
    def held(self) -> MoEWeights:
        return self.weights

    @property
    def memory(self) -> dict[str, int]:
        return {"weights": self.weights.num_bytes}

    def __call__(
        self, x_PH: torch.Tensor, rows_per_expert: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        return grouped_expert_terms(x_PH, rows_per_expert, self.weights, self.activation)

    def warmup(self) -> None:
        pass

    def update(self, weights: MoEWeights) -> None:
        for name, tensor in self.weights.tensors.items():
            tensor.copy_(getattr(weights, name))


class SplitBackend:
    """One layer's way through the split path."""

    finds_bad_ids = False  # the counts are exact: ids are checked on the host

    def __init__(self, weights: MoEWeights, transport: Transport, kernel: ExpertKernel) -> None:
        ids = weights.expert_ids
        self._local_experts = range(ids[0], ids[-1] + 1) if ids else range(0)
        self._num_experts = weights.num_experts
        self._parallel = weights.parallel
        self._device = weights.device
        self._transport = transport
        self._kernel = kernel

    @property
    def held(self) -> HeldWeights:
        return self._kernel.held

    @property
    def memory(self) -> dict[str, int]:
        return self._kernel.memory

    def require_callable(self) -> None:
        """Raise `MoEEpStateError` while a CUDA graph is captured."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise MoEEpStateError(
                "split over TorchCommConfig reads counts on the host, which a CUDA graph cannot "
                "capture; call the layer outside the capture"
            )

    def forward(
        self, inputs: MoEInputs, bound: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """BF16 [T, H], `out` if given. Collective; `bound` is at least T, the same on all ranks."""
        y_TH = self._forward(inputs, bound)
        return y_TH if out is None else out.copy_(y_TH)

    def _forward(self, inputs: MoEInputs, bound: int) -> torch.Tensor:
        received = self._transport.dispatch(
            Outgoing(
                x_TH=inputs.hidden_states,
                topk_ids_TK=inputs.topk_ids,
                topk_weights_TK=inputs.topk_weights,
                bound=bound,
            )
        )
        ids_NK = received.topk_ids_NK
        num_tokens, top_k = ids_NK.shape
        plan = DispatchPlan.from_topk_ids(
            ids_NK, num_experts=self._num_experts, local_experts=self._local_experts
        )
        rows_per_expert = plan.counts.tolist()
        slot_idx_P = plan.src_slot[: sum(rows_per_expert)].long()
        x_PH = received.x_NH.index_select(0, slot_idx_P // top_k)
        terms_PH = self._kernel(x_PH, rows_per_expert, plan.offsets)
        if self._parallel == "tp":
            terms_NKH = to_slots(terms_PH, slot_idx_P, num_tokens, top_k)
            parts_NH = combine_parts(terms_NKH, ids_NK, received.topk_weights_NK)
            return _add_in_rank_order(self._transport.combine(parts_NH, received))
        in_slot_order = terms_PH.index_select(0, plan.pool_row[plan.pool_row >= 0])
        terms_TKH = self._transport.combine(in_slot_order, received)
        return combine_terms(terms_TKH, inputs.topk_ids, inputs.topk_weights)

    def refuse(self, reason: str) -> None:
        """This rank's part of a call whose input it does not take: every rank raises."""
        self._transport.dispatch(None, reason)

    def warmup(self) -> None:
        self._kernel.warmup()

    def update_weights(self, weights: MoEWeights) -> None:
        self._kernel.update(weights)

    def check(self) -> None:
        """Nothing waits here to be raised."""

    def destroy(self) -> None:
        self._transport.destroy()


def _add_in_rank_order(parts_RTH: torch.Tensor) -> torch.Tensor:
    """FP32 [R, T, H] -> BF16 [T, H], one rounding."""
    total_TH = torch.zeros_like(parts_RTH[0])
    for part_TH in parts_RTH:
        total_TH += part_TH
    return total_TH.to(torch.bfloat16)

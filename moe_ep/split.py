"""The split path: dispatch -> FC1 -> activation -> FC2 -> combine as separate steps.

    ep   tokens to the ranks that hold their experts; BF16 terms back, one per slot; the owner
         sums them over the slots
    tp   tokens to all ranks; each rank sums its FP32 parts of the terms over the slots; the owner
         adds the ranks' sums in rank order

Letters: T tokens of this rank, N tokens received, K slots, H hidden, R ranks, P pool rows: one for
each slot of a received token whose expert is here, sorted by expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_ep.comm.transport import Outgoing, Transport, to_slots
from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.problem import Activation
from moe_ep.reference import combine_parts, combine_terms, grouped_expert_terms
from moe_ep.weights import MoEWeights

# (pool rows BF16 [P, H], rows of each local expert) -> terms [P, H], BF16 (ep) or FP32 (tp).
ExpertKernel = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


@dataclass(frozen=True)
class TorchExperts:
    """The expert kernel in plain torch, one matmul per expert and matrix."""

    weights: MoEWeights
    activation: Activation

    def __call__(self, x_PH: torch.Tensor, rows_per_expert: Sequence[int]) -> torch.Tensor:
        return grouped_expert_terms(x_PH, rows_per_expert, self.weights, self.activation)


class SplitBackend:
    """One layer's way through the split path."""

    def __init__(self, weights: MoEWeights, transport: Transport, kernel: ExpertKernel) -> None:
        ids = weights.expert_ids
        self._local_experts = range(ids[0], ids[-1] + 1) if ids else range(0)
        self._num_experts = weights.num_experts
        self._parallel = weights.parallel
        self._transport = transport
        self._kernel = kernel

    def forward(self, inputs: MoEInputs, bound: int) -> torch.Tensor:
        """BF16 [T, H]. Collective; `bound` is the same on every rank and at least T."""
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
        terms_PH = self._kernel(x_PH, rows_per_expert)
        if self._parallel == "tp":
            terms_NKH = to_slots(terms_PH, slot_idx_P, num_tokens, top_k)
            parts_NH = combine_parts(terms_NKH, ids_NK, received.topk_weights_NK)
            return _add_in_rank_order(self._transport.combine(parts_NH, received))
        in_slot_order = terms_PH.index_select(0, torch.argsort(slot_idx_P))
        terms_TKH = self._transport.combine(in_slot_order, received)
        return combine_terms(terms_TKH, inputs.topk_ids, inputs.topk_weights)

    def refuse(self, reason: str) -> None:
        """This rank's part of a call whose input it does not take: every rank raises."""
        self._transport.dispatch(None, reason)

    def destroy(self) -> None:
        self._transport.destroy()


def _add_in_rank_order(parts_RTH: torch.Tensor) -> torch.Tensor:
    """FP32 [R, T, H] -> BF16 [T, H], one rounding."""
    total_TH = torch.zeros_like(parts_RTH[0])
    for part_TH in parts_RTH:
        total_TH += part_TH
    return total_TH.to(torch.bfloat16)

"""How tokens reach the ranks that hold their experts, and how terms come back.

A transport moves rows and nothing else: sorting by expert, matmuls and the sum over the slots are
its caller's. Letters: T tokens of this rank, K slots, H hidden, R ranks, N tokens received here.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe_ep.comm.errors import MoEEpConfigError


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One rank's tokens on their way: BF16 x [T, H], ids [T, K], FP32 routing weights [T, K].

    `bound` is the most tokens that any rank sends in this call; all ranks give the same number.
    """

    x_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    bound: int


@dataclass(frozen=True, kw_only=True)
class Received:
    """The tokens that arrived, ordered by (source rank, token).

    x_NH             BF16 [N, H], any row stride
    topk_ids_NK      integer [N, K], global expert ids of all slots of the token, negative = masked
    topk_weights_NK  FP32 [N, K], or None where the transport leaves them at the owner
    route            the transport's own, for `combine`
    """

    x_NH: torch.Tensor
    topk_ids_NK: torch.Tensor
    topk_weights_NK: torch.Tensor | None
    route: Any


class Transport(Protocol):
    """Collective: every rank of the group calls `dispatch`, then `combine`, equally often."""

    def dispatch(self, outgoing: Outgoing | None, refusal: str | None = None) -> Received:
        """Send each token once to each rank that needs it.

        A rank whose caller gave bad input sends no tokens but `refusal`, the text of the error.
        Then every rank raises `MoEEpConfigError` with that text and rank, and the next call works.
        Raises `MoEEpTimeoutError` or `MoEEpTransportError` where ranks are lost.
        """
        ...

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        """Send results back to the tokens' owners, unreduced.

        With experts divided over the ranks: one row [H] for each slot whose expert is here, in the
        order (source rank, token, slot); the owner gets [T, K, H], masked slots unwritten. With
        every expert's intermediate divided: one row per received token; the owner gets [R, T, H].
        """
        ...

    def destroy(self) -> None:
        """Release what the transport holds. Idempotent, not collective."""
        ...


def to_slots(
    rows_MH: torch.Tensor, slot_idx_M: torch.Tensor, num_tokens: int, top_k: int
) -> torch.Tensor:
    """Rows of used slots -> [T, K, H], each at flat index token * K + slot; others unwritten."""
    hidden = rows_MH.shape[1]
    slots = rows_MH.new_empty(num_tokens * top_k, hidden)
    slots.index_copy_(0, slot_idx_M, rows_MH)
    return slots.view(num_tokens, top_k, hidden)


class LocalTransport:
    """One rank: nothing moves, and nothing is copied unless a slot is masked."""

    def __init__(self, parallel: str) -> None:
        self._parallel = parallel

    def dispatch(self, outgoing: Outgoing | None, refusal: str | None = None) -> Received:
        if outgoing is None:
            raise MoEEpConfigError(refusal)
        return Received(
            x_NH=outgoing.x_TH,
            topk_ids_NK=outgoing.topk_ids_TK,
            topk_weights_NK=outgoing.topk_weights_TK,
            route=None,
        )

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        if self._parallel == "tp":
            return rows[None]
        num_tokens, top_k = received.topk_ids_NK.shape
        if rows.shape[0] == num_tokens * top_k:
            return rows.view(num_tokens, top_k, rows.shape[1])
        used_M = (received.topk_ids_NK.reshape(-1) >= 0).nonzero().squeeze(1)
        return to_slots(rows, used_M, num_tokens, top_k)

    def destroy(self) -> None:
        pass

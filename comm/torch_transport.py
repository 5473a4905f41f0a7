"""Tokens over torch.distributed: exact counts, one uneven all-to-all, gloo or NCCL.

    dispatch   1. header   [R, 5] int64: call, status, bound, tokens to come, rows to return
               2. tokens   each once per destination: H BF16, K ids (int32), K weights (tp, FP32)
    combine    3. rows     BF16 terms per slot (ep) or FP32 parts per token (tp) to the owner

The header goes from every rank to every rank, also from one whose caller gave bad input: all see
the same statuses, so all raise or none does, and the next call starts in step. Letters as in
`comm/transport.py`.

How a lost rank is noticed: `row_exchange.py`.
"""

from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTransportError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.row_exchange import RowExchange
from moe_ep.comm.transport import Outgoing, Received, to_slots

_OK, _REFUSED = 0, 1
_CALL_BITS = 32
_REFUSAL_BYTES = 1024


@dataclass(frozen=True)
class _Header:
    """What one rank tells another before the tokens; the fields in order of the message."""

    call: int
    status: int
    bound: int
    num_tokens: int
    num_rows_back: int


@dataclass(frozen=True)
class _Route:
    """What `combine` needs of its `dispatch`.

    rows_here   per source rank, rows that this rank computes for it
    rows_back   per destination rank, rows that come back from it
    slot_idx    flat (token, slot) of the rows that come back; None under tp
    """

    rows_here: list[int]
    rows_back: list[int]
    slot_idx: torch.Tensor | None
    num_tokens: int


class TorchTransport:
    """`owner_E` is the rank [E] of each expert; None sends every token to every rank (tp)."""

    def __init__(
        self,
        group: EpGroup,
        liveness: Liveness,
        *,
        layer_id: int,
        hidden: int,
        top_k: int,
        owner_E: torch.Tensor | None,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._exchange = RowExchange(group, liveness, timeout_s)
        self._first_call = layer_id << _CALL_BITS
        self._hidden = hidden
        self._top_k = top_k
        self._owner_E = owner_E
        self._step = -1

    def dispatch(self, outgoing: Outgoing | None, refusal: str | None = None) -> Received:
        self._step += 1
        num_ranks = self._group.num_ranks
        if outgoing is None:
            self._exchange_headers(_REFUSED, 0, [0] * num_ranks, [0] * num_ranks, refusal)
        if self._owner_E is None:
            token_idx, tokens_to, rows_back, slot_idx = self._everywhere(outgoing)
        else:
            token_idx, tokens_to, rows_back, slot_idx = self._to_owners(outgoing)
        headers = self._exchange_headers(_OK, outgoing.bound, tokens_to, rows_back)

        sent = self._pack(outgoing, token_idx)
        tokens_from = [header.num_tokens for header in headers]
        received = sent.new_empty(sum(tokens_from), sent.shape[1])
        self._exchange(received, sent, tokens_from, tokens_to, "dispatch", self._step)
        x_NH, topk_ids_NK, topk_weights_NK = self._unpack(received)
        route = _Route(
            rows_here=[header.num_rows_back for header in headers],
            rows_back=rows_back,
            slot_idx=slot_idx,
            num_tokens=outgoing.x_TH.shape[0],
        )
        return Received(
            x_NH=x_NH, topk_ids_NK=topk_ids_NK, topk_weights_NK=topk_weights_NK, route=route
        )

    @property
    def step(self) -> int:
        """Of the call that is under way, or of the last one."""
        return self._step

    def agree_on_call(self, bound: int | None, refusal: str | None = None) -> None:
        """The part of `dispatch` before any token moves, for a transport that moves them itself:
        every rank is in this call, none refuses it (bound None) and the bounds are equal, or all
        raise."""
        self._step += 1
        none_yet = [0] * self._group.num_ranks
        status = _REFUSED if bound is None else _OK
        self._exchange_headers(status, bound or 0, none_yet, none_yet, refusal)

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        route = received.route
        back = rows.new_empty(sum(route.rows_back), self._hidden)
        self._exchange(
            back, rows.contiguous(), route.rows_back, route.rows_here, "combine", self._step
        )
        if route.slot_idx is None:
            return back.view(self._group.num_ranks, route.num_tokens, self._hidden)
        return to_slots(back, route.slot_idx, route.num_tokens, self._top_k)

    def destroy(self) -> None:
        self._owner_E = None

    def _everywhere(
        self, outgoing: Outgoing
    ) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor | None]:
        """As `_to_owners`, every token to every rank and one row back from each."""
        num_ranks, num_tokens = self._group.num_ranks, outgoing.x_TH.shape[0]
        token_idx = torch.arange(num_tokens, device=self._group.device).repeat(num_ranks)
        counts = [num_tokens] * num_ranks
        return token_idx, counts, counts, None

    def _to_owners(
        self, outgoing: Outgoing
    ) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor | None]:
        """Tokens to send, ordered by (rank, token); counts per rank of tokens and of rows back;
        the flat slots of the rows back, ordered by (rank, token, slot)."""
        num_ranks = self._group.num_ranks
        ids_TK = outgoing.topk_ids_TK
        owner_TK = self._owner_E[ids_TK.clamp(min=0).long()]
        owner_TK = torch.where(ids_TK < 0, num_ranks, owner_TK)  # masked: beyond the last rank
        is_sent_TR = torch.zeros(
            ids_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=ids_TK.device
        ).scatter_(1, owner_TK, True)[:, :num_ranks]
        token_idx = is_sent_TR.t().nonzero()[:, 1]
        owners = owner_TK.reshape(-1)
        tokens_to = is_sent_TR.sum(0).tolist()
        rows_back = torch.bincount(owners, minlength=num_ranks + 1)[:num_ranks].tolist()
        slot_idx = torch.sort(owners, stable=True).indices[: sum(rows_back)]
        return token_idx, tokens_to, rows_back, slot_idx

    def _pack(self, outgoing: Outgoing, token_idx: torch.Tensor) -> torch.Tensor:
        """BF16 [n, width]: a row carries its token and, bit for bit, the token's routing."""
        hidden, top_k = self._hidden, self._top_k
        ids_at, weights_at, width = self._columns()
        packed = torch.zeros(len(token_idx), width, dtype=torch.bfloat16, device=self._group.device)
        packed[:, :hidden] = outgoing.x_TH[token_idx]
        # Clamped first: a large negative int64 must stay negative as int32.
        ids_TK = outgoing.topk_ids_TK.clamp(min=-1).int()
        packed.view(torch.int32)[:, ids_at : ids_at + top_k] = ids_TK[token_idx]
        if self._owner_E is None:
            weights_NK = outgoing.topk_weights_TK[token_idx]
            packed.view(torch.float32)[:, weights_at : weights_at + top_k] = weights_NK
        return packed

    def _unpack(
        self, packed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        ids_at, weights_at, _ = self._columns()
        ids_NK = packed.view(torch.int32)[:, ids_at : ids_at + self._top_k]
        weights_NK = None
        if self._owner_E is None:
            weights_NK = packed.view(torch.float32)[:, weights_at : weights_at + self._top_k]
        return packed[:, : self._hidden], ids_NK, weights_NK

    def _columns(self) -> tuple[int, int, int]:
        """First 4-byte column of ids and of weights, and the row's width in BF16 elements."""
        ids_at = (self._hidden + 1) // 2
        weights_at = ids_at + self._top_k
        end = weights_at + (self._top_k if self._owner_E is None else 0)
        return ids_at, weights_at, 2 * end

    def _exchange_headers(
        self,
        status: int,
        bound: int,
        tokens_to: list[int],
        rows_back: list[int],
        refusal: str | None = None,
    ) -> list[_Header]:
        """Every rank's header to this rank, all of the same call and accepted; else an error."""
        call = self._first_call + self._step
        sent = torch.tensor(
            [[call, status, bound, *counts] for counts in zip(tokens_to, rows_back, strict=True)],
            dtype=torch.int64,
        ).to(self._group.device)
        received = torch.empty_like(sent)
        self._exchange(received, sent, [], [], "dispatch (counts)", self._step)
        headers = [_Header(*row) for row in received.tolist()]
        self._check_same_call([header.call for header in headers])
        if any(header.status == _REFUSED for header in headers):
            self._raise_refusals(refusal)
        self._check_same_bound([header.bound for header in headers])
        return headers

    def _check_same_call(self, calls: list[int]) -> None:
        if len(set(calls)) == 1:
            return
        places = ", ".join(
            f"{self._group.rank_name(rank)}: layer {call >> _CALL_BITS} step "
            f"{call & ((1 << _CALL_BITS) - 1)}"
            for rank, call in enumerate(calls)
        )
        raise MoEEpTransportError(
            f"the ranks are in different calls ({places}); every rank must call forward of the "
            "same layers in the same order, equally often"
        )

    def _check_same_bound(self, bounds: list[int]) -> None:
        for rank, bound in enumerate(bounds):
            if bound != bounds[0]:
                raise MoEEpConfigError(
                    f"{self._group.rank_name(rank)}: max_tokens is {bound}, "
                    f"{self._group.rank_name(0)} gave {bounds[0]}; allowed: the same on all ranks"
                )

    def _raise_refusals(self, refusal: str | None) -> None:
        """All ranks tell each other what they refused, then raise the same text."""
        num_ranks = self._group.num_ranks
        text = (refusal or "").encode()[:_REFUSAL_BYTES].ljust(_REFUSAL_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._group.device)
        sent = sent.repeat(num_ranks, 1)
        received = torch.empty_like(sent)
        self._exchange(received, sent, [], [], "dispatch (refusal)", self._step)
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in received.tolist()]
        raise MoEEpConfigError(
            "; ".join(
                f"{self._group.rank_name(rank)}: {text}" for rank, text in enumerate(texts) if text
            )
        )

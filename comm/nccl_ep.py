"""Tokens over NCCL-EP (`nccl.ep` of nccl-extensions), each (token, slot) as a row of its own.

    dispatch   headers over torch.distributed, as `TorchTransport`; then T * K rows as tokens that
               have one expert each
    combine    each row back to where it came from. With one expert a row nothing is summed on the
               way, so that the owner sums in slot order (`exact_combine`)

Low latency receives rank-major, [R, C * K, H] and a count for each source rank; high throughput
flat, [R * C * K, H] and one count. C: most tokens of a rank, other letters as in
`comm/transport.py`. What does not fit is refused by `nccl_ep_limits.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moe_ep.comm.errors import MoEEpTransportError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import Outgoing, Received


@dataclass(frozen=True)
class _Route:
    """What `combine` needs of its `dispatch`.

    handle       NCCL-EP's own
    row_idx_N    place of each received row in the buffer that it came in
    num_tokens   T of this rank
    """

    handle: Any
    row_idx_N: torch.Tensor
    num_tokens: int


class NcclEpTransport:
    """`mode` is "ll" (low latency) or "ht" (high throughput). Collective.

    control   agrees with the other ranks on each call and names lost ones; not otherwise used

    Raises `MoEEpTransportError` where NCCL or NCCL-EP refuses the group.
    """

    def __init__(
        self,
        group: EpGroup,
        control: TorchTransport,
        *,
        mode: str,
        hidden: int,
        top_k: int,
        num_experts: int,
        max_tokens_per_rank: int,
        timeout_s: float,
    ) -> None:
        from nccl import core, ep

        self._ep = ep
        self._group, self._control, self._is_ll = group, control, mode == "ll"
        self._hidden, self._top_k = hidden, top_k
        self._first_expert = group.rank * (num_experts // group.num_ranks)
        self._rows_per_rank = max_tokens_per_rank * top_k
        self._num_rows = group.num_ranks * self._rows_per_rank
        algorithms = ep.Algorithm
        config = ep.GroupConfig(
            algorithm=algorithms.LOW_LATENCY if self._is_ll else algorithms.HIGH_THROUGHPUT,
            num_experts=num_experts,
            max_dispatch_tokens_per_rank=self._rows_per_rank,
            max_recv_tokens_per_rank=0 if self._is_ll else self._num_rows,
            max_token_bytes=2 * hidden,
            timeout_ns=int(timeout_s * 1e9),
        )
        unique_id = core.get_unique_id().as_bytes.hex() if group.rank == 0 else ""
        _, texts = exchange_records(group, "nccl_ep/unique_id", unique_id, timeout_s)
        first_id = core.UniqueId.from_bytes(bytes.fromhex(texts[0]))
        try:
            self._communicator = core.Communicator.init(group.num_ranks, group.rank, first_id)
            self._ep_group = ep.Group.create(self._communicator, config)
        except Exception as error:  # the two bindings have families of their own
            raise MoEEpTransportError(f"NCCL-EP refuses the group: {error}") from error

    def dispatch(self, outgoing: Outgoing | None, refusal: str | None = None) -> Received:
        self._control.agree_on_call(outgoing, refusal)
        rows_SH, ids_S1 = rows_of(outgoing)
        handle, received, received_ids, counts = self._send(rows_SH, ids_S1)
        row_idx_N = filled_rows(counts, self._num_rows // len(counts))
        return Received(
            x_NH=received[row_idx_N],
            topk_ids_NK=received_ids[row_idx_N] + self._first_expert,
            topk_weights_NK=None,
            route=_Route(handle, row_idx_N, len(outgoing.x_TH)),
        )

    def combine(self, rows: torch.Tensor, received: Received) -> torch.Tensor:
        ep, route = self._ep, received.route
        buffer = rows.new_zeros(self._num_rows, self._hidden)
        buffer[route.row_idx_N] = rows
        num_slots = route.num_tokens * self._top_k
        out = rows.new_empty(max(num_slots, 1), self._hidden)
        route.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(buffer.view(*self._shape(), -1))),
            ep.CombineOutputs(tokens=ep.Tensor(out)),
            stream=torch.cuda.current_stream().cuda_stream,
        )
        # Buffers and handle are used by the stream until then.
        torch.cuda.current_stream().synchronize()
        route.handle.destroy()
        return out[:num_slots].view(route.num_tokens, self._top_k, self._hidden)

    def destroy(self) -> None:
        if self._ep_group is not None:
            self._ep_group.destroy()
            self._communicator.abort()
            self._ep_group = None

    def _shape(self) -> tuple[int, ...]:
        """Leading dimensions of what is received."""
        if self._is_ll:
            return self._group.num_ranks, self._rows_per_rank
        return (self._num_rows,)

    def _send(
        self, rows_SH: torch.Tensor, ids_S1: torch.Tensor
    ) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Handle; received rows [R * C * K, H] and their local experts [R * C * K, 1]; how many
        came, [R] (ll) or [1] (ht)."""
        ep, is_ll, device = self._ep, self._is_ll, self._group.device
        stream = torch.cuda.current_stream().cuda_stream
        ids_dtype = torch.int32 if is_ll else torch.int64
        received = torch.empty(self._num_rows, self._hidden, dtype=torch.bfloat16, device=device)
        received_ids = torch.empty(self._num_rows, 1, dtype=ids_dtype, device=device)
        received_weights = torch.empty(self._num_rows, 1, dtype=torch.float32, device=device)
        num_counts = self._group.num_ranks if is_ll else 1
        counts = torch.zeros(num_counts, dtype=torch.int32, device=device)
        info = {"recv_topk_idx_kind": ep.ExpertIdKind.LOCAL}
        if is_ll:
            layout, at_handle = ep.Layout.RANK_MAJOR, None
            at_dispatch = ep.LayoutInfo(src_rank_counters=ep.Tensor(counts), **info)
        else:
            layout, at_dispatch = ep.Layout.FLAT, None
            at_handle = ep.LayoutInfo(recv_total_counter=ep.Tensor(counts), **info)
        handle = self._ep_group.create_handle(
            layout, ep.Tensor(ids_S1), layout_info=at_handle, stream=stream
        )
        weights_S1 = torch.ones(ids_S1.shape, dtype=torch.float32, device=device)
        handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(rows_SH), topk_weights=ep.Tensor(weights_S1)),
            ep.DispatchOutputs(
                tokens=ep.Tensor(received.view(*self._shape(), -1)),
                topk_weights=ep.Tensor(received_weights.view(*self._shape(), 1)),
                topk_idx=ep.Tensor(received_ids.view(*self._shape(), 1)),
            ),
            layout_info=at_dispatch,
            stream=stream,
        )
        return handle, received, received_ids, counts


def rows_of(outgoing: Outgoing) -> tuple[torch.Tensor, torch.Tensor]:
    """A row [S, H] and an id [S, 1] int64 for each slot, S = T * K; -1 for a masked one, which is
    sent nowhere. A rank without tokens has one masked row, as NCCL-EP takes no empty tensors."""
    num_tokens, top_k = outgoing.topk_ids_TK.shape
    if num_tokens == 0:
        x = outgoing.x_TH
        return x.new_zeros(1, x.shape[1]), torch.full((1, 1), -1, device=x.device)
    rows_SH = outgoing.x_TH.repeat_interleave(top_k, 0)
    return rows_SH, outgoing.topk_ids_TK.clamp(min=-1).long().reshape(-1, 1)


def filled_rows(counts: torch.Tensor, rows_per_part: int) -> torch.Tensor:
    """Indices of the rows that came, in a buffer of equal parts that fill from their start.

    counts   [parts] rows of each part
    """
    row = torch.arange(rows_per_part, device=counts.device)
    return (row < counts[:, None]).flatten().nonzero().squeeze(1)

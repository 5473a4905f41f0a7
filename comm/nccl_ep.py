"""Tokens over NCCL-EP (`nccl.ep` of nccl-extensions), which sums rows on their way back.

    mode  layout        rows received                 experts of a row    who weighs
    ll    rank_major    [R, C], one for each token    K                   the receiving rank
    ll    expert_major  [e, R * C], one for each slot 1                   the owner
    ht    flat          [R * C], one for each token   K                   the receiving rank
    ht    expert_major  [R * C * K], for each slot    1                   the receiving rank

Whatever the layout, a receiving rank sees N rows, each with local experts and weights, and returns
one row for each: the weighted sum of what its experts make of it. The owner gets the sum of those.
Low latency ("ll") has a part of the buffer for each source rank or expert, filled from its start;
high throughput ("ht") fills one from its start. The host reads nothing, so a dispatch and its
combine may be captured in a CUDA graph.

Letters: T tokens of this rank, C the most of a rank, K slots, H hidden, R ranks, e local experts.
What does not fit is refused by `nccl_ep_limits.py`, as NCCL-EP answers by ending the process.
"""

from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpTransportError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records

# What NCCL-EP's own waits, which end the GPU's context, get beyond the time-out of the layer.
_WATCHDOG_S = 30.0
_HT_TOKENS_MULTIPLE = 4  # tokens of a rank, so that bulk copies of routing are whole


@dataclass(frozen=True, kw_only=True)
class NcclEpSpec:
    """One geometry. `mode` and `layout` as above.

    max_tokens_per_rank   C, rows that a rank may send
    """

    mode: str
    layout: str
    hidden: int
    top_k: int
    num_experts: int
    num_ranks: int
    max_tokens_per_rank: int

    @property
    def is_ll(self) -> bool:
        return self.mode == "ll"

    @property
    def is_expert_major(self) -> bool:
        return self.layout == "expert_major"

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def capacity(self) -> int:
        """C as NCCL-EP gets it."""
        multiple = 1 if self.is_ll else _HT_TOKENS_MULTIPLE
        return -(-self.max_tokens_per_rank // multiple) * multiple

    @property
    def leading_sizes(self) -> tuple[int, ...]:
        """Sizes of what is received, before the row itself."""
        rows = self.num_ranks * self.capacity
        if not self.is_ll:
            return (rows * self.top_k if self.is_expert_major else rows,)
        if self.is_expert_major:
            return self.num_local_experts, rows
        return self.num_ranks, self.capacity

    @property
    def num_rows(self) -> int:
        """N, rows that a rank has room for."""
        rows = 1
        for size in self.leading_sizes:
            rows *= size
        return rows

    @property
    def experts_per_row(self) -> int:
        return 1 if self.is_expert_major else self.top_k

    def buffer_bytes(self) -> dict[str, int]:
        """Bytes on this rank's GPU by what they are; NCCL-EP's own as its allocator of 0.1.0 sizes
        them, without the little that does not grow with the tokens."""
        row_bytes = 2 * self.hidden
        routing_bytes = self.experts_per_row * (4 if self.is_ll else 8) + 4 * self.experts_per_row
        if self.is_ll:
            senders = self.num_ranks if not self.is_expert_major else self.num_experts
            rows = self.capacity * max(1 + self.num_ranks, senders + self.top_k)
            staging = 2 * rows * (row_bytes + row_bytes // 64)
        else:
            flat = self.num_ranks * self.capacity
            staging = (2 * flat + self.num_rows) * row_bytes
            staging += 2 * self.num_rows * self.num_experts * 4
        return {
            "NCCL-EP received rows": self.num_rows * (row_bytes + routing_bytes),
            "NCCL-EP staging": staging,
        }


@dataclass(frozen=True)
class ReceivedRows:
    """N rows, most of them perhaps empty.

    x_NH        BF16 [N, H]
    ids_NJ      int32 or int64 [N, J], experts of this rank, 0 .. e - 1; negative where none is
    weights_NJ  FP32 [N, J]
    """

    x_NH: torch.Tensor
    ids_NJ: torch.Tensor
    weights_NJ: torch.Tensor


class NcclEpTransport:
    """A communicator, NCCL-EP's group and handle, and the buffers of one geometry. Collective.

    Raises `MoEEpTransportError` where NCCL or NCCL-EP refuses, `MoEEpTimeoutError` naming ranks
    that do not come.
    """

    def __init__(self, group: EpGroup, spec: NcclEpSpec, timeout_s: float) -> None:
        from nccl import core, ep

        self._ep, self.group, self.spec, self._device = ep, group, spec, group.device
        algorithms, layouts = ep.Algorithm, ep.Layout
        self._layout = {
            "rank_major": layouts.RANK_MAJOR,
            "expert_major": layouts.EXPERT_MAJOR,
            "flat": layouts.FLAT,
        }[spec.layout]
        config = ep.GroupConfig(
            algorithm=algorithms.LOW_LATENCY if spec.is_ll else algorithms.HIGH_THROUGHPUT,
            num_experts=spec.num_experts,
            max_dispatch_tokens_per_rank=spec.capacity,
            max_recv_tokens_per_rank=0 if spec.is_ll else spec.num_rows,
            max_token_bytes=2 * spec.hidden,
            timeout_ns=int((timeout_s + _WATCHDOG_S) * 1e9),
            num_topk=spec.top_k,
        )
        unique_id = core.get_unique_id().as_bytes.hex() if group.rank == 0 else ""
        _, texts = exchange_records(group, "nccl_ep/unique_id", unique_id, timeout_s)
        first_id = core.UniqueId.from_bytes(bytes.fromhex(texts[0]))
        try:
            with torch.cuda.device(group.device):
                self._communicator = core.Communicator.init(group.num_ranks, group.rank, first_id)
                self._ep_group = ep.Group.create(self._communicator, config)
        except Exception as error:  # the two bindings have families of their own
            raise MoEEpTransportError(f"NCCL-EP refuses the group: {error}") from error
        self._handle = None
        self._weights_TK: torch.Tensor | None = None  # of the call that is under way
        self._allocate()

    def dispatch(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> ReceivedRows:
        """Send tokens, at least one, on the current stream. Collective; `combine` follows.

        ids_TK   int64, negative (masked) or below E, none twice in a token; it, and weights_TK
                 (FP32), stay as they are until the end of `combine`, which reads them again

        What comes back is overwritten by the next dispatch.
        """
        ep, spec, stream = self._ep, self.spec, self._stream()
        self._weights_TK = weights_TK
        if self._handle is None:
            self._handle = self._ep_group.create_handle(
                self._layout, ep.Tensor(ids_TK), layout_info=self._at_handle, stream=stream
            )
        else:
            self._handle.update(ep.Tensor(ids_TK), layout_info=self._at_handle, stream=stream)
        inputs = {"tokens": ep.Tensor(x_TH)}
        if not (spec.is_ll and spec.is_expert_major):
            inputs["topk_weights"] = ep.Tensor(weights_TK)
        self._handle.dispatch(
            ep.DispatchInputs(**inputs), self._outputs, layout_info=self._at_dispatch, stream=stream
        )
        return ReceivedRows(
            x_NH=self._x_NH, ids_NJ=self._experts_of_rows(), weights_NJ=self._weights_NJ
        )

    def combine(self, y_NH: torch.Tensor, out_TH: torch.Tensor) -> None:
        """Send back BF16 y_NH, a row for each received one, and write the sums to `out_TH`."""
        ep, spec = self._ep, self.spec
        outputs = {"tokens": ep.Tensor(out_TH)}
        if spec.is_ll and spec.is_expert_major:
            outputs["topk_weights"] = ep.Tensor(self._weights_TK)
        self._handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(y_NH.view(*spec.leading_sizes, -1))),
            ep.CombineOutputs(**outputs),
            stream=self._stream(),
        )

    def destroy(self) -> None:
        """Release everything; work on the GPU has ended. Idempotent."""
        if self._ep_group is None:
            return
        ep_group, self._ep_group = self._ep_group, None
        try:
            if self._handle is not None:
                self._handle.destroy()
            ep_group.destroy()
        finally:
            self._communicator.abort()  # `destroy` waits for the others

    def _allocate(self) -> None:
        """Buffers, and NCCL-EP's descriptions of those that are the same in every call."""
        ep, spec, device = self._ep, self.spec, self._device
        num_rows, sizes = spec.num_rows, spec.leading_sizes
        self._x_NH = torch.empty(num_rows, spec.hidden, dtype=torch.bfloat16, device=device)
        self._weights_NJ = torch.ones(
            num_rows, spec.experts_per_row, dtype=torch.float32, device=device
        )
        self._at_handle = self._at_dispatch = None
        outputs = {"tokens": ep.Tensor(self._x_NH.view(*sizes, -1))}
        if spec.is_expert_major:
            counts = torch.zeros(spec.num_local_experts, dtype=torch.int32, device=device)
            info = ep.LayoutInfo(expert_counters=ep.Tensor(counts))
            if not spec.is_ll:
                outputs["topk_weights"] = ep.Tensor(self._weights_NJ.view(-1))
        else:
            counts = torch.zeros(1, dtype=torch.int32, device=device)
            info = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)
            if not spec.is_ll:
                info = ep.LayoutInfo(
                    recv_total_counter=ep.Tensor(counts), recv_topk_idx_kind=ep.ExpertIdKind.LOCAL
                )
            ids_dtype = torch.int32 if spec.is_ll else torch.int64
            self._ids_NK = torch.empty(num_rows, spec.top_k, dtype=ids_dtype, device=device)
            outputs["topk_weights"] = ep.Tensor(self._weights_NJ.view(*sizes, -1))
            outputs["topk_idx"] = ep.Tensor(self._ids_NK.view(*sizes, -1))
        if spec.is_ll:
            self._at_dispatch = info
        else:
            self._at_handle = info
        self._counts = counts
        self._outputs = ep.DispatchOutputs(**outputs)

    def _experts_of_rows(self) -> torch.Tensor:
        """[N, J]: local experts of each received row, -1 where there is none."""
        spec = self.spec
        if spec.is_ll and not spec.is_expert_major:
            return self._ids_NK  # -1 in rows that were not written
        row = torch.arange(spec.num_rows, device=self._device)
        if spec.is_expert_major:
            first = spec.leading_sizes[1] if spec.is_ll else None
            return expert_of_row(row, self._counts, first)[:, None]
        return torch.where(row[:, None] < self._counts, self._ids_NK, -1)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


def expert_of_row(
    row_N: torch.Tensor, counts: torch.Tensor, rows_per_expert: int | None
) -> torch.Tensor:
    """int64 [N], the expert of each row of an expert-major buffer; -1 behind the last of one.

    counts            [e] rows of each expert
    rows_per_expert   room for each; None: one expert's rows begin where the last one's end
    """
    if rows_per_expert is not None:
        expert = row_N // rows_per_expert
        return torch.where(row_N % rows_per_expert < counts[expert], expert, -1)
    expert = torch.searchsorted(counts.cumsum(0), row_N, right=True)
    return torch.where(expert < len(counts), expert, -1)


def one_row_per_expert(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing that NCCL-EP takes: int64 ids and FP32 weights [T, K].

    Slots that are masked or name no expert have -1. Of slots with one expert the first has their
    weights' sum, the others -1: NCCL-EP brings a token to an expert once.
    """
    is_used = (ids_TK >= 0) & (ids_TK < num_experts)
    is_same = (ids_TK[:, :, None] == ids_TK[:, None, :]) & is_used[:, None, :]
    weights = (is_same * weights_TK[:, None, :]).sum(-1)
    is_first = is_used & ~is_same.tril(-1).any(-1)
    return torch.where(is_first, ids_TK.long(), -1), weights


def rows_of_slots(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each slot as a token of its own: rows [T * K, H], int64 ids [T * K, 1], -1 for one that is
    masked or names no expert."""
    is_used = (ids_TK >= 0) & (ids_TK < num_experts)
    ids = torch.where(is_used, ids_TK.long(), -1).reshape(-1, 1)
    return x_TH.repeat_interleave(ids_TK.shape[1], 0), ids


_shared: dict[tuple, tuple[NcclEpTransport, int]] = {}


def acquire(group: EpGroup, spec: NcclEpSpec, timeout_s: float) -> NcclEpTransport:
    """The transport of this geometry, which the layers of a process share. Collective."""
    key = (group.process_group, spec)
    transport, num_users = _shared.get(key, (None, 0))
    if transport is None:
        transport = NcclEpTransport(group, spec, timeout_s)
    _shared[key] = transport, num_users + 1
    return transport


def release(transport: NcclEpTransport) -> None:
    """Undo one `acquire`; the last user's destroys the transport."""
    key = (transport.group.process_group, transport.spec)
    shared, num_users = _shared.get(key, (None, 0))
    if shared is not transport:
        return
    if num_users > 1:
        _shared[key] = transport, num_users - 1
    else:
        del _shared[key]
        transport.destroy()

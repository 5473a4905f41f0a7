"""The split path over NCCL-EP: its dispatch, the experts on the rows that came, its combine.

    rows of tokens   a token with its K experts; the rank that computes weighs and sums what is on
                     it, in slot order, FP32, one rounding; the owner's sum over the ranks is the
                     transport's
    rows of slots    `exact_combine`: a row with one expert for each slot of a token, so that the
                     transport sums nothing; the owner sums the terms in slot order

What runs on the rows that came is the layer of one rank, over local experts. Only rows with an
expert are computed. With `GroupedExperts` a call is launches alone, and after `warmup` it may be
captured in a CUDA graph. Outside a capture the ranks first agree on the call over
torch.distributed, so that all raise where one refuses its input.

Letters: T tokens, C capacity, K slots, H hidden, N rows that a rank has room for, J experts of one.
"""

from dataclasses import replace
from typing import NoReturn, Protocol

import torch

from moe_ep.comm.errors import MoEEpConfigError, MoEEpError, MoEEpStateError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.nccl_ep import (
    NcclEpSpec,
    ReceivedRows,
    acquire,
    one_row_per_expert,
    release,
    rows_of_slots,
)
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import LocalTransport
from moe_ep.config import NcclEpConfig
from moe_ep.device_backend import DeviceBackend
from moe_ep.fingerprint import COMPILE_TIMEOUT_S, agree
from moe_ep.held_weights import HeldWeights
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.workspace_memory import free_bytes
from moe_ep.reference import combine_terms
from moe_ep.split import SplitBackend, TorchExperts
from moe_ep.weights import MoEWeights


class ReceivedLayer(Protocol):
    """The layer of one rank on rows that it received."""

    can_be_captured: bool

    @property
    def held(self) -> HeldWeights: ...

    @property
    def memory(self) -> dict[str, int]: ...

    def warmup(self) -> None: ...

    def __call__(self, rows: ReceivedRows, out_NH: torch.Tensor) -> None:
        """`out_NH` BF16 [N, H]: of each row with an expert the weighted sum of its terms."""
        ...

    def sum_slots(
        self,
        terms_SH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
    ) -> None:
        """Terms of a token's slots, [T * K, H], summed as contract rule 3 says."""
        ...

    def update(self, weights: MoEWeights) -> None: ...


class TorchReceived:
    """In plain torch, with counts on the host."""

    can_be_captured = False

    def __init__(self, weights: MoEWeights, experts: TorchExperts) -> None:
        self._experts = experts
        self._first_expert = weights.expert_ids[0]
        self._split = SplitBackend(weights, LocalTransport("ep"), experts)

    @property
    def held(self) -> HeldWeights:
        return self._experts.held

    @property
    def memory(self) -> dict[str, int]:
        return self._experts.memory

    def warmup(self) -> None:
        pass

    def __call__(self, rows: ReceivedRows, out_NH: torch.Tensor) -> None:
        row_idx = (rows.ids_NJ >= 0).any(1).nonzero().squeeze(1)
        ids = rows.ids_NJ[row_idx]
        ids = torch.where(ids < 0, -1, ids + self._first_expert)
        inputs = MoEInputs(rows.x_NH[row_idx], ids, rows.weights_NJ[row_idx])
        out_NH[row_idx] = self._split.forward(inputs, len(row_idx))

    def sum_slots(
        self,
        terms_SH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
    ) -> None:
        out_TH.copy_(
            combine_terms(terms_SH.view(*ids_TK.shape, terms_SH.shape[1]), ids_TK, weights_TK)
        )

    def update(self, weights: MoEWeights) -> None:
        self._experts.update(weights)


class GroupedReceived:
    """With the grouped GEMM kernel; the host waits for nothing."""

    can_be_captured = True

    def __init__(self, shape: MoEShape, experts, spec: NcclEpSpec, top_k: int) -> None:
        from moe_ep.grouped import OneRankGrouped  # needs CuTe DSL

        # A row has no expert twice, so that it has at most e.
        self._experts_per_row = min(spec.experts_per_row, spec.num_local_experts)
        local = replace(shape, num_experts=spec.num_local_experts, top_k=self._experts_per_row)
        self._layer = OneRankGrouped(local, experts, spec.num_rows)
        self._combine_key = top_k, shape.hidden

    @property
    def held(self) -> HeldWeights:
        return self._layer.held

    @property
    def memory(self) -> dict[str, int]:
        return self._layer.memory

    def warmup(self) -> None:
        from moe_ep.megakernel.combine_sm90 import Combine, CombineConfig

        self._layer.warmup()
        top_k, hidden = self._combine_key
        with self._layer.on_device():
            self._combine = Combine(CombineConfig(top_k=top_k, hidden=hidden))

    def __call__(self, rows: ReceivedRows, out_NH: torch.Tensor) -> None:
        ids, weights = rows.ids_NJ, rows.weights_NJ
        if ids.shape[1] > self._experts_per_row:
            ids, slot = ids.topk(self._experts_per_row, 1)  # those that are not masked
            weights = weights.gather(1, slot)
        self._layer.launch(rows.x_NH, ids, weights, out_NH, len(ids))

    def sum_slots(
        self,
        terms_SH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
    ) -> None:
        slot = torch.arange(ids_TK.numel(), dtype=torch.int32, device=ids_TK.device)
        row_TK = torch.where(ids_TK < 0, -1, slot.view_as(ids_TK))
        self._combine(terms_SH, row_TK.int(), weights_TK, out_TH)

    def update(self, weights: MoEWeights) -> None:
        self._layer.update_weights(weights)


class NcclEpSplit(DeviceBackend):
    """One rank's layer over NCCL-EP. Collective over `group`, building as well as every call.

    control   agrees with the other ranks on each call and names lost ones

    An id that is not an expert masks its slot and is raised later, as in other kernels. Raises
    `MoEEpConfigError` naming the bytes where the buffers do not fit.
    """

    def __init__(
        self,
        config: NcclEpConfig,
        received: ReceivedLayer,
        spec: NcclEpSpec,
        shape: MoEShape,
        group: EpGroup,
        control: TorchTransport,
        liveness: Liveness,
        timeout_s: float,
    ) -> None:
        super().__init__(group.device, group.num_ranks)
        self._is_exact, self._received, self._spec = config.exact_combine, received, spec
        self._shape, self._group, self._control = shape, group, control
        self._liveness, self._timeout_s = liveness, timeout_s
        self._transport = refusal = None
        try:
            self._transport = acquire(group, spec, timeout_s)
            self._allocate()
        except torch.OutOfMemoryError as error:
            refusal = MoEEpConfigError(
                f"NCCL-EP {spec.mode} {spec.layout} needs {sum(self._buffer_bytes.values())} bytes "
                f"on {group.device} for {spec.max_tokens_per_rank} rows of a rank, where "
                f"{free_bytes(group.device)} are free; lower max_tokens_per_rank"
            )
            refusal.__cause__ = error
        except Exception as error:  # told to the other ranks, then raised
            refusal = error
        try:
            agree(group, {}, refusal, timeout_s, "NCCL-EP buffers")
        except MoEEpError:
            self.destroy()
            raise

    @property
    def held(self) -> HeldWeights:
        return self._received.held

    @property
    def memory(self) -> dict[str, int]:
        return self._received.memory | self._buffer_bytes

    @property
    def _buffer_bytes(self) -> dict[str, int]:
        spec = self._spec
        rows = spec.num_rows + (spec.capacity if self._is_exact else 0)
        return spec.buffer_bytes() | {"NCCL-EP rows sent back": rows * 2 * spec.hidden}

    def require_callable(self) -> None:
        if self.is_capturing() and not self._received.can_be_captured:
            raise MoEEpStateError(
                "split over NcclEpConfig with TorchGemmConfig reads counts on the host, which a "
                "CUDA graph cannot capture; take GroupedGemmConfig, or call the layer outside the "
                "capture"
            )
        super().require_callable()

    def load(self) -> None:
        refusal = None
        try:
            self._received.warmup()
        except Exception as error:  # told to the other ranks, then raised
            refusal = error
        agree(self._group, {}, refusal, max(self._timeout_s, COMPILE_TIMEOUT_S), "NCCL-EP warmup")
        with self.on_device():
            self._launch(*self._masked_token)
            torch.cuda.synchronize()
        self.is_warm = True

    def launch(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        bound: int,
    ) -> None:
        if not self.is_capturing():
            self._control.agree_on_call(bound)
        if len(x_TH):
            self._launch(x_TH, ids_TK, weights_TK, out_TH)
        else:
            self._launch(*self._masked_token)

    def refuse(self, reason: str) -> NoReturn:
        if self.is_capturing():  # where no rank can be told
            raise MoEEpConfigError(reason)
        left = self.take_left()
        try:
            self._control.agree_on_call(None, reason)
        except MoEEpConfigError as refusal:
            raise refusal from left

    def update_weights(self, weights: MoEWeights) -> None:
        self._received.update(weights)

    def check(self) -> None:
        try:
            super().check()
        except torch.AcceleratorError as error:  # a wait of NCCL-EP that ran out of time
            self._liveness.raise_failure("NCCL-EP", self._control.step, error)

    def raise_found(self) -> None:
        bad_slot = int(self._found)
        if bad_slot:
            torch.cuda.synchronize(self.device)  # no copy of it is on its way
            self._bad_slot.zero_()
            self._found.zero_()
            token_idx, slot_idx = divmod(bad_slot - 1, self._shape.top_k)
            raise MoEEpConfigError(
                f"topk_ids[{token_idx}, {slot_idx}] of an earlier call was not an expert; that "
                "slot was masked; allowed: negative (masked) or below num_experts "
                f"{self._shape.num_experts}"
            )

    def destroy(self) -> None:
        """Give the transport back; work on other streams than the current has ended."""
        if self._transport is not None:
            release(self._transport)
            self._transport = None

    def _allocate(self) -> None:
        spec, device = self._spec, self.device
        rows = {"dtype": torch.bfloat16, "device": device}
        self._y_NH = torch.zeros(spec.num_rows, spec.hidden, **rows)
        if self._is_exact:
            self._terms_SH = torch.zeros(spec.capacity, spec.hidden, **rows)
            self._ones_S1 = torch.ones(spec.capacity, 1, dtype=torch.float32, device=device)
        # Arguments of a call that brings no token: NCCL-EP takes no empty tensors.
        slots = 1, self._shape.top_k
        self._masked_token = (
            torch.zeros(1, spec.hidden, **rows),
            torch.full(slots, -1, device=device),
            torch.zeros(slots, dtype=torch.float32, device=device),
            torch.zeros(1, spec.hidden, **rows),
        )
        # 1 + first slot whose id is no expert, on the device and as the host reads it.
        self._bad_slot = torch.zeros(1, dtype=torch.int32, device=device)
        self._found = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def _launch(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
    ) -> None:
        num_experts = self._shape.num_experts
        self._note_bad_id(ids_TK)
        if not self._is_exact:
            ids, weights = one_row_per_expert(ids_TK, weights_TK, num_experts)
            self._move(x_TH, ids, weights, out_TH)
            return
        rows_SH, ids_S1 = rows_of_slots(x_TH, ids_TK, num_experts)
        num_slots = len(rows_SH)
        terms_SH = self._terms_SH[:num_slots]
        self._move(rows_SH, ids_S1, self._ones_S1[:num_slots], terms_SH)
        self._received.sum_slots(terms_SH, ids_S1.view_as(ids_TK), weights_TK, out_TH)

    def _move(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._received(self._transport.dispatch(x, ids, weights), self._y_NH)
        self._transport.combine(self._y_NH, out)

    def _note_bad_id(self, ids_TK: torch.Tensor) -> None:
        if not ids_TK.numel():
            return
        is_bad = (ids_TK >= self._shape.num_experts).view(-1)
        slot = torch.where(is_bad.any(), 1 + is_bad.int().argmax(), 0)
        self._bad_slot.copy_(torch.where(self._bad_slot > 0, self._bad_slot, slot))
        self._found.copy_(self._bad_slot, non_blocking=True)


def make_nccl_ep_split(
    config: NcclEpConfig,
    experts,
    shape: MoEShape,
    weights: MoEWeights,
    group: EpGroup,
    max_tokens: int,
    control: TorchTransport,
    liveness: Liveness,
    timeout_s: float,
) -> NcclEpSplit:
    """The layer for experts of either kernel, `GroupedExperts` or `TorchExperts`. Collective."""
    rows_per_token = shape.top_k if config.exact_combine else 1
    spec = NcclEpSpec(
        mode=config.mode,
        layout=config.layout,
        hidden=shape.hidden,
        top_k=1 if config.exact_combine else shape.top_k,
        num_experts=shape.num_experts,
        num_ranks=group.num_ranks,
        max_tokens_per_rank=max_tokens * rows_per_token,
    )
    if isinstance(experts, TorchExperts):
        received = TorchReceived(weights, experts)
    else:
        received = GroupedReceived(shape, experts, spec, shape.top_k)
    return NcclEpSplit(config, received, spec, shape, group, control, liveness, timeout_s)

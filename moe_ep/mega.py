"""The mega kernel behind the layer: a forward is one launch, on every rank.

Ranks stay in step by launching equally often. So a rank that refuses its input launches a step that
says so and computes nothing anywhere, and a call that has to raise what an earlier one left does
its own step first.
"""

from functools import partial
from typing import NoReturn

import torch

from moe_ep.comm.errors import (
    MoEEpConfigError,
    MoEEpError,
    MoEEpTimeoutError,
    MoEEpTransportError,
)
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.config import MegaKernelConfig
from moe_ep.device_backend import ID_DTYPES, DeviceBackend
from moe_ep.fingerprint import COMPILE_TIMEOUT_S, agree
from moe_ep.mega_tune import Tuner
from moe_ep.megakernel.formats import PreparedWeights, prepare
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.problem import MoEShape
from moe_ep.weights import MoEWeights

# What a refusal is about: its code is the place here, its text starts with the name.
ARGUMENTS = ("inputs", "hidden_states", "topk_ids", "topk_weights", "out", "max_tokens")


class MegaBackend(DeviceBackend):
    """One rank's layer on its GPU. Collective over `group`, building as well as every call.

    With knobs "auto" the builds are those that `warmup` has found by measuring, now or earlier; a
    call before it takes the knob table's.

    Several ranks: a rank that refuses its input raises at once, the others by their next call or
    `check`. A wait that ran out of time asks in the store which ranks are alive.

    Raises `MoEEpConfigError` on every rank, naming the bytes, where the workspace does not fit.
    """

    def __init__(
        self,
        shape: MoEShape,
        prepared: PreparedWeights,
        group: EpGroup,
        max_tokens: int,
        config: MegaKernelConfig,
        liveness: Liveness | None,
        timeout_s: float,
        parallel: str = "ep",
    ) -> None:
        super().__init__(group.device, group.num_ranks)
        self._shape, self._group, self._liveness = shape, group, liveness
        self._prepared, self._timeout_s = prepared, timeout_s
        self._tuner: Tuner | None = None  # until the builds are known
        knobs = config.knobs
        if knobs == "auto":
            tuner = Tuner(
                *(group, shape, prepared, max_tokens),
                parallel=parallel,
                max_sms=config.max_sms,
                timeout_s=timeout_s,
            )
            knobs = tuner.known()
            self._tuner = tuner if knobs is None else None
        self._make_mega = partial(
            MegaMoE,
            group,
            shape,
            prepared.weights_format,
            max_tokens_per_rank=max_tokens,
            parallel=parallel,
            has_bias13=prepared.b13 is not None,
            has_bias2=prepared.b2 is not None,
            max_sms=config.max_sms,
            timeout_s=timeout_s,
        )
        refusal = None
        try:
            self._mega = self._make_mega(knobs=knobs)
        except Exception as error:  # told to the other ranks, then raised
            refusal = error
        try:
            agree(group, {}, refusal, timeout_s, "workspace")
        except MoEEpError:
            if refusal is None:  # the others have no part of this workspace
                self._mega.destroy()
            raise

    @property
    def held(self) -> PreparedWeights:
        return self._prepared

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the device. Layers of one geometry share the workspace."""
        return {
            "prepared weights": self._prepared.num_bytes,
            "shared workspace": self._mega.num_bytes,
        }

    def launch(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        bound: int,
    ) -> None:
        self._mega.forward(x_TH, ids_TK, weights_TK, self._prepared, out_TH, max_tokens=bound)

    def warmup(self) -> None:
        if self._tuner is not None:
            tuned, self._tuner = self._tuner.run(), None
            table, self._mega = self._mega, self._make_mega(knobs=tuned.buckets)
            table.destroy()  # after the other took hold of the workspace, which they share
        self.load()

    def load(self) -> None:
        refusal = None
        try:
            self._mega.warmup()
        except Exception as error:  # told to the other ranks, then raised
            refusal = error
        agree(self._group, {}, refusal, max(self._timeout_s, COMPILE_TIMEOUT_S), "warmup")
        most = self._mega.buckets[-1].max_tokens
        shape, device = (most, self._shape.top_k), self.device
        x_TH = torch.zeros(most, self._shape.hidden, dtype=torch.bfloat16, device=device)
        weights_TK = torch.zeros(shape, dtype=torch.float32, device=device)
        with self.on_device():
            for dtype in ID_DTYPES:
                masked_TK = torch.full(shape, -1, dtype=dtype, device=device)
                for bucket in self._mega.buckets:
                    n = bucket.max_tokens
                    self.launch(x_TH[:n], masked_TK[:n], weights_TK[:n], x_TH[:n], n)
            torch.cuda.synchronize()
        self.is_warm = True
        self.note_found()

    def update_weights(self, weights: MoEWeights) -> None:
        """Prepare other weights into the same addresses."""
        prepare(weights, out=self._prepared)

    def raise_found(self) -> None:
        try:
            self._mega.check(ARGUMENTS)
        except MoEEpTimeoutError as error:
            if self._liveness is None:
                raise
            raise self._lost_ranks(error) from None

    def refuse(self, reason: str) -> NoReturn:
        """This rank's part of a call whose input it does not take."""
        left = self.take_left()
        if self._group.num_ranks == 1:
            raise MoEEpConfigError(reason)
        if not self.is_capturing():
            if not self.is_warm:
                self.load()
            with self.on_device():
                self._mega.refuse(refusal_code(reason), self._prepared)
        raise MoEEpConfigError(f"{self._group.rank_name(self._group.rank)}: {reason}") from left

    def destroy(self) -> None:
        """Give the workspace back; work on other streams than the current has ended."""
        self._mega.destroy()

    def _lost_ranks(self, error: MoEEpTimeoutError) -> MoEEpTimeoutError:
        """The device's record with the ranks that give no sign of life."""
        try:
            self._liveness.raise_failure(error.phase, error.step, error)
        except (MoEEpTimeoutError, MoEEpTransportError) as found:
            return MoEEpTimeoutError(
                f"{error}. {found}",
                phase=error.phase,
                step=error.step,
                ranks=getattr(found, "ranks", ()) or error.ranks,
                expert=error.expert,
                expected=error.expected,
                seen=error.seen,
            )


def refusal_code(reason: str) -> int:
    """Place in `ARGUMENTS` of what a refusal is about; 0, the inputs, for anything else."""
    name = reason.split()[0]
    return ARGUMENTS.index(name) if name in ARGUMENTS else 0

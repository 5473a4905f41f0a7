"""The mega kernel behind the layer: a forward is one launch.

Letters: T tokens, K slots, H hidden.
"""

from typing import NoReturn

import torch

from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaKernelConfig
from moe_ep.grouped import is_usable, usable
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.formats import PreparedWeights, prepare
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.problem import MoEShape
from moe_ep.weights import MoEWeights

_ID_DTYPES = (torch.int32, torch.int64)


class MegaBackend:
    """One layer on its rank's GPU. Holds prepared weights, not the `weights` given.

    After `warmup` a call may be captured in a CUDA graph; replays follow what then stands in its
    tensors, for the captured number of tokens (mask what is padding by negative ids). The host
    waits for nothing, so what a kernel found is raised by a later call, or by `check`.

    Raises `MoEEpConfigError` naming the bytes where the workspace does not fit.
    """

    finds_bad_ids = True

    def __init__(
        self,
        shape: MoEShape,
        weights: MoEWeights,
        group: EpGroup,
        max_tokens: int,
        config: MegaKernelConfig,
        timeout_s: float,
    ) -> None:
        self._shape, self._device = shape, group.device
        self._prepared = prepare(weights)
        self._mega = MegaMoE(
            group,
            shape,
            weights.weights_format,
            max_tokens_per_rank=max_tokens,
            has_bias13=weights.b13 is not None,
            has_bias2=weights.b2 is not None,
            knobs=config.knobs,
            max_sms=config.max_sms,
            timeout_s=timeout_s,
        )
        self._is_warm = False

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

    def require_callable(self) -> None:
        """Raise what stands against a call now: `MoEEpStateError` in a capture that comes before
        `warmup`, else what an earlier launch has found by now."""
        if not self._is_capturing():
            self._mega.check()
        elif not self._is_warm:
            raise MoEEpStateError(
                "a CUDA graph is being captured and the layer's kernels are not loaded; warm up "
                "first: call layer.warmup() before the capture"
            )

    def forward(
        self, inputs: MoEInputs, bound: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """BF16 [T, H], written to `out` if given. `bound`: most tokens of any rank."""
        if not self._is_warm:
            self.warmup()
        x_TH, ids_TK, weights_TK = map(
            usable, (inputs.hidden_states, inputs.topk_ids, inputs.topk_weights)
        )
        y_TH = out if out is not None and is_usable(out) else torch.empty_like(x_TH)
        with torch.cuda.device(self._device):
            self._mega.forward(x_TH, ids_TK, weights_TK, self._prepared, y_TH, max_tokens=bound)
        return y_TH if out is None or y_TH is out else out.copy_(y_TH)

    def warmup(self) -> None:
        """Compile, load and launch every kernel that a call may take; waits for the GPU."""
        self._mega.warmup()
        most = self._mega.buckets[-1].max_tokens
        shape, device = (most, self._shape.top_k), self._device
        x_TH = torch.zeros(most, self._shape.hidden, dtype=torch.bfloat16, device=device)
        weights_TK = torch.zeros(shape, device=device)
        with torch.cuda.device(device):
            for dtype in _ID_DTYPES:
                masked_TK = torch.full(shape, -1, dtype=dtype, device=device)
                for bucket in self._mega.buckets:
                    n = bucket.max_tokens
                    self._mega.forward(
                        *(x_TH[:n], masked_TK[:n], weights_TK[:n], self._prepared, x_TH[:n]),
                        max_tokens=n,
                    )
            torch.cuda.synchronize()
        self._is_warm = True

    def update_weights(self, weights: MoEWeights) -> None:
        """Prepare other weights into the same addresses."""
        prepare(weights, out=self._prepared)

    def check(self) -> None:
        """Wait for the GPU, then raise what a kernel found."""
        if self._is_capturing():
            raise MoEEpStateError("check() waits for the GPU; call it outside the capture")
        torch.cuda.synchronize(self._device)
        self._mega.check()

    def refuse(self, reason: str) -> NoReturn:
        raise MoEEpConfigError(reason)

    def destroy(self) -> None:
        """Give the workspace back; work on other streams than the current has ended."""
        self._mega.destroy()

    def _is_capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

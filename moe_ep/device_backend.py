"""What layers have in common whose call is launches alone: the host waits for nothing.

Letters: T tokens, K slots, H hidden.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch

from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.inputs import MoEInputs

ALIGNMENT = 16  # bytes; kernels move token rows in vectors of that size
ID_DTYPES = (torch.int32, torch.int64)
_NOTHING = nullcontext()  # one for all calls: it holds nothing


class DeviceBackend:
    """After `warmup` a call may be captured in a CUDA graph; replays follow what then stands in
    its tensors, for the captured number of tokens (mask what is padding by negative ids).

    What a kernel found is raised by a later call outside a capture, if the GPU has come that far,
    and by `check` in any case. One of several ranks raises it behind its own step, as the others
    wait for that. Inputs and `out` that are contiguous and aligned to 16 bytes are
    used where they lie, others are copied.

    A user of this class has `load`, which sets `is_warm`, `launch` and `raise_found`.
    """

    finds_bad_ids = True

    def __init__(self, device: torch.device, num_ranks: int = 1) -> None:
        self.device, self._device_index = device, device.index
        self.is_warm = False
        self._num_ranks = num_ranks
        self._left: MoEEpConfigError | None = None  # by an earlier call, raised by the next

    def load(self) -> None:
        """Compile, load and launch every kernel that a call may take; waits for the GPU."""
        raise NotImplementedError

    def warmup(self) -> None:
        """`load`, and whatever else is not to be done in a call."""
        self.load()

    def launch(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        bound: int,
    ) -> None:
        """The kernels of a call, on the current stream of the current device."""
        raise NotImplementedError

    def raise_found(self) -> None:
        """Raise what earlier launches are known to have found; does not wait."""
        raise NotImplementedError

    def note_found(self) -> None:
        """Raise what earlier launches have found; one of several ranks keeps it for the end of its
        next step, which the others wait for."""
        try:
            self.raise_found()
        except MoEEpConfigError as left:
            if self._num_ranks == 1:
                raise
            self._left = left

    def require_callable(self) -> None:
        """Raise what stands against a call now: `MoEEpStateError` in a capture that comes before
        `warmup`, else what earlier launches have found on a rank that is alone."""
        if not self.is_capturing():
            self.note_found()
        elif not self.is_warm:
            raise MoEEpStateError(
                "a CUDA graph is being captured and the layer's kernels are not loaded; warm up "
                "first: call layer.warmup() before the capture"
            )

    def forward(
        self, inputs: MoEInputs, bound: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """BF16 [T, H], written to `out` if given. `bound`: most tokens of any rank.

        Raises `MoEEpConfigError` for an earlier call, behind this one's step.
        """
        if not self.is_warm:
            self.load()
        x_TH, ids_TK, weights_TK = (
            usable(inputs.hidden_states),
            usable(inputs.topk_ids),
            usable(inputs.topk_weights),
        )
        y_TH = out if out is not None and is_usable(out) else torch.empty_like(x_TH)
        with self.on_device():
            self.launch(x_TH, ids_TK, weights_TK, y_TH, bound)
        if self._left is not None:
            raise self.take_left()
        return y_TH if out is None or y_TH is out else out.copy_(y_TH)

    def take_left(self) -> MoEEpConfigError | None:
        """What an earlier call left to raise, once."""
        left, self._left = self._left, None
        return left

    def check(self) -> None:
        """Wait for the GPU, then raise what a kernel found."""
        if self.is_capturing():
            raise MoEEpStateError("check() waits for the GPU; call it outside the capture")
        torch.cuda.synchronize(self.device)
        self.raise_found()

    def refuse(self, reason: str) -> NoReturn:
        raise MoEEpConfigError(reason)

    def is_capturing(self) -> bool:
        with self.on_device():
            return torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager:
        """The layer's GPU made current; nothing, in no time, where it is already."""
        is_current = torch.cuda.current_device() == self._device_index
        return _NOTHING if is_current else torch.cuda.device(self._device_index)


def is_usable(tensor: torch.Tensor) -> bool:
    """Whether a kernel takes the tensor where it lies."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def usable(tensor: torch.Tensor) -> torch.Tensor:
    if is_usable(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)

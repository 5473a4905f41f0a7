"""Launches one behind the other on the GPU, whatever streams they are made on."""

import torch

from moe_ep.megakernel.bound_call import stream_handle


class LaunchOrder:
    """Of launches that share memory, or, of several ranks, the GPU: each waits for the one before.

    What a CUDA graph replays is ordered by whoever replays it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle: int | None = None

    def enter(self) -> int:
        """Before a launch on the current stream, whose handle it gives: that stream waits for the
        last launch's, if that was another one."""
        handle = stream_handle(self._device)
        if handle != self._last_handle and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self._device)
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream, self._last_handle = stream, handle
        return handle

"""A compiled kernel with its arguments converted once, so that a call costs the host the launch.

CuTe DSL turns every argument of a call into a pointer to its value, microseconds each. Here the
values live in cells whose pointers are taken once; a call writes those that changed.
"""

import ctypes
from collections.abc import Sequence

import torch


class _Cell:
    """One argument. Set `value` between calls."""

    def __c_pointers__(self) -> list[ctypes.c_void_p]:
        """What CuTe DSL asks an argument for."""
        return [ctypes.c_void_p(ctypes.addressof(self))]


class Int64(_Cell, ctypes.c_int64):
    """Also an address or a stream handle."""


class Int32(_Cell, ctypes.c_int32):
    pass


def stream_handle(device: torch.device) -> int:
    """Of the GPU's current stream. `torch.cuda.current_stream` makes an object: microseconds."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class BoundCall:
    """`function` (what `compile_cache.load` gives) bound to cells in the order of its arguments.

    Built with the GPU current that it launches on; first of all it loads the kernel there.
    """

    def __init__(self, function, cells: Sequence[Int64 | Int32]) -> None:
        self._cells = cells
        # An executor of its own, which alone writes to its list of pointers: `run_compiled_program`
        # would fill one anew for every launch.
        self._executor = function.to(None)
        pointers, _ = self._executor.generate_execution_args(*cells)
        self._pointers = self._executor._get_invoke_packed_args(pointers)

    def __call__(self, *values: int) -> None:
        """Launch, with `values` in the first cells. Raises `torch.cuda.CudaError` where that
        fails."""
        for cell, value in zip(self._cells, values, strict=False):
            cell.value = value
        self._executor.capi_func(self._pointers)
        if self._executor.cuda_result.value:
            torch.cuda.check_error(self._executor.cuda_result.value)

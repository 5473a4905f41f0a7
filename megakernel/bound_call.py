"""A compiled kernel with its arguments converted once, so that a call costs the host the launch.

CuTe DSL turns every argument of a call into a pointer to its value, microseconds each. Here the
values live in cells whose pointers are taken once; a call writes the few that changed.
"""

import ctypes
from collections.abc import Sequence


class Cell:
    """One argument: an address, an integer or a stream handle. Set `value` between calls."""

    def __init__(self, ctype: type, value: int) -> None:
        self._memory = ctype(value)
        self._pointers = [ctypes.cast(ctypes.pointer(self._memory), ctypes.c_void_p)]

    @property
    def value(self) -> int:
        return self._memory.value

    @value.setter
    def value(self, value: int) -> None:
        self._memory.value = value

    def __c_pointers__(self) -> list[ctypes.c_void_p]:
        """What CuTe DSL asks an argument for."""
        return self._pointers


def address(value: int = 0) -> Cell:
    """For Int64 arguments and `cuda.CUstream`."""
    return Cell(ctypes.c_int64, value)


def int32(value: int = 0) -> Cell:
    return Cell(ctypes.c_int32, value)


class BoundCall:
    """`function` (what `compile_cache.load` gives) bound to cells in the order of its arguments."""

    def __init__(self, function, cells: Sequence[Cell]) -> None:
        self._function = function
        self._cells = cells
        self.pointers, _ = function.execution_args.generate_execution_args(tuple(cells), {})

    def __call__(self) -> None:
        self._function.run_compiled_program(self.pointers)

"""A compiled kernel with its arguments converted once, so that a call costs the host the launch.

CuTe DSL turns every argument of a call into a pointer to its value, microseconds each. Here the
values live in cells whose pointers are taken once; a call writes the few that changed.
"""

import ctypes
from collections.abc import Sequence


class _Cell:
    """One argument. Set `value` between calls."""

    def __c_pointers__(self) -> list[ctypes.c_void_p]:
        """What CuTe DSL asks an argument for."""
        return [ctypes.c_void_p(ctypes.addressof(self))]


class Int64(_Cell, ctypes.c_int64):
    """Also an address or a stream handle."""


class Int32(_Cell, ctypes.c_int32):
    pass


class BoundCall:
    """`function` (what `compile_cache.load` gives) bound to cells in the order of its arguments."""

    def __init__(self, function, cells: Sequence[Int64 | Int32]) -> None:
        self._function = function
        self._cells = cells
        self.pointers, _ = function.execution_args.generate_execution_args(tuple(cells), {})

    def __call__(self) -> None:
        self._function.run_compiled_program(self.pointers)

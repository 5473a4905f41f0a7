"""FP32 matmuls on a CPU under which a row keeps its bits, whatever rows and threads are beside it.

How a BLAS sums a row depends on the shape that it is called with and on its threads: on a Xeon MKL
splits K elsewhere for 16 rows than for 300, and for two threads than for one. Here it sees one
number of rows, `ROW_BLOCK`, and runs on one thread; several threads take a task each.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

# Where in its block a row lies must not matter: a multiple of the rows that a register tile holds
# (48 and 16 in AVX-512, 24 and less below it).
ROW_BLOCK = 48
# Nor do rows meet the code for what is left over of the output channels.
CHANNEL_BLOCK = 16
_UPCAST_ELEMENTS = 1 << 18  # weights upcast at a time: 1 MiB stays in a core's cache
_FP32 = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are at the time

Result = TypeVar("Result")


def padded(x_PC: torch.Tensor) -> torch.Tensor:
    """BF16 -> FP32 rows, with rows of zeros up to a multiple of `ROW_BLOCK`."""
    num_rows, num_cols = x_PC.shape
    padded_rows = num_rows + -num_rows % ROW_BLOCK
    padded_PC = torch.empty(padded_rows, num_cols, **_FP32)
    padded_PC[:num_rows] = x_PC
    padded_PC[num_rows:] = 0
    return padded_PC


def matmul(x_PC: torch.Tensor, w_NC: torch.Tensor) -> torch.Tensor:
    """x w^T, FP32 [P, N], for `padded` rows (or columns of them), within `run_tasks`.

    Both hold BF16 values, so that products are exact in FP32.
    """
    num_rows, num_cols = w_NC.shape
    out_PN = torch.empty(len(x_PC), num_rows + -num_rows % CHANNEL_BLOCK, **_FP32)
    step = max(CHANNEL_BLOCK, _UPCAST_ELEMENTS // num_cols // CHANNEL_BLOCK * CHANNEL_BLOCK)
    step = min(step, out_PN.shape[1])
    slab_NC = torch.zeros(step, num_cols, **_FP32)
    for first_col in range(0, num_rows, step):
        out_Pn = out_PN[:, first_col : first_col + step]
        slab_nC = slab_NC[: out_Pn.shape[1]]
        w_nC = w_NC[first_col : first_col + step]
        slab_nC[: len(w_nC)] = w_nC  # behind the last row finite numbers, never read
        for first_row in range(0, len(x_PC), ROW_BLOCK):
            rows = slice(first_row, first_row + ROW_BLOCK)
            torch.mm(x_PC[rows], slab_nC.t(), out=out_Pn[rows])
    return out_PN[:, :num_rows]


def run_tasks(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """Their results. Within a task torch has one thread; as many run at once as it has outside."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return [task() for task in tasks]
    is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run(task: Callable[[], Result]) -> Result:
        # Modes belong to the thread that entered them.
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
            return task()

    try:
        running = [_pool(num_threads, os.getpid()).submit(run, task) for task in tasks]
    except RuntimeError:  # the interpreter is ending and begins no more threads
        torch.set_num_threads(1)
        try:
            return [task() for task in tasks]
        finally:
            torch.set_num_threads(num_threads)
    return [future.result() for future in running]


@functools.lru_cache(maxsize=1)
def _pool(num_threads: int, pid: int) -> ThreadPoolExecutor:
    """Threads for which torch has one thread each; a forked process has none of its parent's."""
    all_begun = threading.Barrier(num_threads + 1)
    pool = ThreadPoolExecutor(num_threads, "moe-ep", _be_alone)
    for _ in range(num_threads):
        pool.submit(all_begun.wait)
    all_begun.wait()
    torch.set_num_threads(num_threads)  # what threads that begin from now on have, as before
    return pool


def _be_alone() -> None:
    torch.get_num_threads()  # a thread's first question gives it the number of the process
    torch.set_num_threads(1)

"""Run a worker on N local ranks and collect what each returns. For tests, benches and examples.

A job over several hosts is started by torchrun (`launch/bootstrap.py`); here the parent process is
the launcher: it holds the store, the clock and the children, and leaves none of them behind.

    parent                                  child of rank r
    TCPStore on a port the system picks
    start N processes                  ->   process group, worker(r, N, *args)
    collect                            <-   result or exception, pickled by value
    "all ranks are done"               ->   destroy the process group, exit; where a rank was
                                            killed on purpose: exit as it is
    reap, raise or return
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError, MoEEpError, MoEEpTimeoutError
from moe_ep.launch import bootstrap

_HOST = "127.0.0.1"
# After the first failure, how long the other ranks may still report theirs (it may be the cause).
_GRACE_S = 2.0
# How long a rank may take to leave once every rank has returned.
_EXIT_S = 30.0
_RANK_IS_LOST = b"a rank is lost"


class RankFailedError(MoEEpError, RuntimeError):
    """A rank died without a Python exception, or raised one that cannot be pickled."""


@dataclass
class _Rank:
    idx: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False

    def read(self) -> None:
        """Take the rank's message, or note how it died when there is none."""
        try:
            outcome, payload, text = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(1.0)
            self.error = RankFailedError(f"rank {self.idx} {_how_it_ended(self.process.exitcode)}")
        else:
            if outcome == "result":
                self.result = pickle.loads(payload)
            else:
                self.error = _rebuild(self.idx, payload, text)
        self.is_done = True


def run(
    worker: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 120.0,
    device: str = "cpu",
    expect_killed: Collection[int] = (),
) -> list[Any]:
    """Call `worker(rank, num_ranks, *args)` in `num_ranks` new processes; return their results.

    Each process has the default process group initialised (gloo on `device="cpu"`; gloo and NCCL
    on `"cuda"`, with GPU `rank` current) and one torch thread. The store lives in the parent, so
    it outlives any rank. Worker, arguments and results travel by plain pickle: the worker is a
    module-level function, tensors are copied (no shared memory), results should be on the CPU.

    timeout_s      seconds for everything, start to exit; then every child is killed
    expect_killed  ranks that the worker itself kills by a signal; their result is None

    Raises what the first failing rank raised, with rank and traceback as a note (`RankFailedError`
    when that cannot be pickled, or when the process died); `MoEEpTimeoutError` naming the ranks
    that had not returned in time. Threads of those are then printed on stderr.
    """
    if num_ranks < 1:
        raise MoEEpConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    if device not in ("cpu", "cuda"):
        raise MoEEpConfigError(f"device {device!r} is not known; allowed: 'cpu', 'cuda'")
    deadline = time.monotonic() + timeout_s
    # Port 0: the system picks a free one while binding, so no other process can take it first.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((worker, args))
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        for rank_idx in range(num_ranks):
            pipe, child_pipe = context.Pipe()
            setup = (rank_idx, num_ranks, store.port, timeout_s, device)
            process = context.Process(
                target=_child_main, args=(child_pipe, setup, call), name=f"rank {rank_idx}"
            )
            ranks.append(_Rank(rank_idx, process, pipe))
            process.start()
            child_pipe.close()  # else the death of the child would not close the pipe
        _collect(ranks, deadline, timeout_s, frozenset(expect_killed))
        _dismiss(ranks, deadline, frozenset(expect_killed))
    finally:
        for rank in ranks:
            _kill(rank)
    return [rank.result for rank in ranks]


def _collect(
    ranks: list[_Rank], deadline: float, timeout_s: float, expect_killed: frozenset[int]
) -> None:
    """Read every rank's message; raise the first failure, or a time-out at the deadline."""
    failures: list[_Rank] = []
    limit = deadline
    while waiting := [rank for rank in ranks if not rank.is_done]:
        by_pipe = {rank.pipe: rank for rank in waiting}
        reported = wait(list(by_pipe), timeout=max(0.0, limit - time.monotonic()))
        if not reported:
            break
        for pipe in reported:
            rank = by_pipe[pipe]
            rank.read()
            was_killed = (rank.process.exitcode or 0) < 0
            if rank.error and not (rank.idx in expect_killed and was_killed):
                failures.append(rank)
                limit = min(limit, time.monotonic() + _GRACE_S)
    if failures:
        # A death is the cause of the connection errors that the other ranks report.
        first = next((rank for rank in failures if rank.process.exitcode), failures[0])
        for rank in failures:
            if rank is not first:
                first.error.add_note(f"Also, rank {rank.idx}: {rank.error!r}")
        raise first.error
    missing = [rank for rank in ranks if not rank.is_done]
    if missing:
        _print_threads(missing)
        names = [rank.idx for rank in missing]
        raise MoEEpTimeoutError(
            f"ranks {names} of {len(ranks)} had not returned after timeout_s={timeout_s:g}; "
            "every rank was killed",
            phase="spawn",
            ranks=names,
        )


def _dismiss(ranks: list[_Rank], deadline: float, expect_killed: frozenset[int]) -> None:
    """Let every rank leave; one that crashes or hangs on its way out is an error too."""
    for rank in ranks:
        with suppress(OSError):
            rank.pipe.send_bytes(_RANK_IS_LOST if expect_killed else b"all ranks are done")
    deadline = min(deadline, time.monotonic() + _EXIT_S)
    for rank in ranks:
        rank.process.join(max(0.1, deadline - time.monotonic()))
    stuck = [rank for rank in ranks if rank.process.exitcode is None]
    if stuck:
        _print_threads(stuck)
        names = [rank.idx for rank in stuck]
        raise MoEEpTimeoutError(
            f"ranks {names} returned from the worker but did not exit; they were killed",
            phase="exit",
            ranks=names,
        )
    for rank in ranks:
        if rank.process.exitcode and rank.idx not in expect_killed:
            raise RankFailedError(
                f"rank {rank.idx} returned from the worker, then "
                f"{_how_it_ended(rank.process.exitcode)}"
            )


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its pipe without a result"
    if exitcode < 0:
        return f"was killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"exited with code {exitcode} before it returned"


def _rebuild(rank_idx: int, payload: bytes | None, text: str) -> BaseException:
    """The exception a rank sent, with its traceback as a note."""
    if payload is None:
        return RankFailedError(f"rank {rank_idx} raised:\n{text}")
    error = pickle.loads(payload)
    error.add_note(f"Raised on rank {rank_idx}:\n{text}")
    return error


def _print_threads(ranks: list[_Rank]) -> None:
    """Have stuck ranks print their threads (a handler of the child answers SIGUSR1)."""
    for rank in ranks:
        print(f"rank {rank.idx} is stuck; its threads:", file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.2)


def _kill(rank: _Rank) -> None:
    """End a rank and every process it started: each rank leads a process group of its own."""
    pid = rank.process.pid
    if pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        rank.process.kill()  # the same signal, should it die before it led a group
        rank.process.join()
    rank.process.close()
    rank.pipe.close()


def _child_main(pipe: Connection, setup: tuple[int, int, int, float, str], call: bytes) -> None:
    os.setpgid(0, 0)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        rank_idx, num_ranks, port, timeout_s, device = setup
        torch.set_num_threads(1)
        if sys.platform == "linux":
            # All ranks are on this host: do not depend on its name resolving to an address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        bound = bootstrap.bind_device(device, rank_idx)
        store = dist.TCPStore(_HOST, port, timeout=timedelta(seconds=timeout_s))
        bootstrap.start_process_group(
            bound, timeout_s, store=store, rank=rank_idx, world_size=num_ranks
        )
        worker, args = pickle.loads(call)
        message = ("result", pickle.dumps(worker(rank_idx, num_ranks, *args)), "")
    except BaseException as error:  # SystemExit of a worker is a failure like any other
        message = ("error", _pickle_error(error), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(message))
    # Ranks leave together: one that closed its sockets early would break the last call of others.
    goodbye = b""
    with suppress(EOFError, OSError):
        goodbye = pipe.recv_bytes()
    if goodbye == _RANK_IS_LOST:  # for which NCCL would wait
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickle_error(error: BaseException) -> bytes | None:
    """The exception as bytes, or None when it does not survive the way to the parent."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return None
    return payload


def _exit_with_parent() -> None:
    """Do not outlive a parent that was killed before it could kill its children."""
    multiprocessing.parent_process().join()
    os._exit(1)

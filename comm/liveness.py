"""Who is still there when a collective fails, and the news of a failure to the other ranks.

torch names no rank when one dies: gloo says 'Connection reset by peer' or 'Timed out'. So each
rank that sees a failure writes a sign of life into the store, waits for the others' a little, and
the ranks without one are named. A rank that fails for a reason of its own says so the same way,
and the others raise within a second instead of at their time-out.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from moe_ep.comm.errors import MoEEpTimeoutError, MoEEpTransportError
from moe_ep.comm.group import EpGroup

# How long survivors wait for each other's sign of life.
GRACE_S = 2.0
_POLL_S = 0.05
_FAILED = "failed"


class StoreLostError(Exception):
    """The store did not answer: the process that holds it is gone or stopped."""


def ask_store(question: Callable[[], Any], timeout_s: float) -> Any:
    """`question()`'s result, or `StoreLostError` after `timeout_s`.

    Most store calls wait for their host without a limit, so they run in a thread that is left
    behind when the host is stopped.
    """
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(_answer_or_error(question)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answer or isinstance(answer[0], Exception):
        raise StoreLostError(str(answer[0]) if answer else f"no answer in {timeout_s:g} s")
    return answer[0]


def _answer_or_error(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # handed to the asking thread
        return error


class Liveness:
    """Signs of life of one layer's ranks, in the group's store."""

    def __init__(self, group: EpGroup, layer_id: int, timeout_s: float) -> None:
        self._group = group
        self._store = dist.PrefixStore(f"moe_ep/layer{layer_id}", group.store)
        self._timeout_s = timeout_s

    def failed_elsewhere(self) -> bool:
        """Whether another rank has given up. A store that does not answer is no such news: the
        collective's own time-out decides."""
        try:
            return ask_store(lambda: self._store.check([_FAILED]), GRACE_S)
        except StoreLostError:
            return False

    def announce(self, reason: str) -> None:
        """Tell the other ranks that this one, alive, gives up; they raise with `reason`."""
        try:
            ask_store(lambda: self._post(reason), GRACE_S)
        except StoreLostError:
            pass  # nobody left to tell

    def raise_failure(self, phase: str, step: int, cause: BaseException) -> NoReturn:
        """Wait for the others' signs of life, then raise naming the ranks without one.

        `MoEEpTimeoutError` if a rank is missing, `MoEEpTransportError` if all are alive.
        """
        where = f"{phase} of step {step}"
        try:
            reason, missing = ask_store(lambda: self._survey(where, cause), GRACE_S + GRACE_S)
        except StoreLostError as error:
            self._raise_store_lost(phase, step, error, cause)
        if not missing:
            raise MoEEpTransportError(
                f"{where} failed although every rank is alive; first to give up: {reason}"
            ) from cause
        names = ", ".join(self._group.rank_name(rank) for rank in missing)
        raise MoEEpTimeoutError(
            f"{where} failed: no sign of life from {names}, lost or not in this call "
            f"(of {self._group.num_ranks} ranks; timeout_s={self._timeout_s:g})",
            phase=phase,
            step=step,
            ranks=missing,
        ) from cause

    def _post(self, reason: str) -> None:
        rank = self._group.rank
        # The first failure wins: `compare_set` writes only where nothing stands yet.
        self._store.compare_set(_FAILED, "", f"{self._group.rank_name(rank)}, {reason}")
        self._store.set(f"alive/{rank}", "yes")

    def _survey(self, where: str, cause: BaseException) -> tuple[str, list[int]]:
        self._post(f"{where} ({cause})")
        deadline = time.monotonic() + GRACE_S
        missing = list(range(self._group.num_ranks))
        while True:
            missing = [rank for rank in missing if not self._store.check([f"alive/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return self._store.get(_FAILED).decode(), missing
            time.sleep(_POLL_S)

    def _raise_store_lost(
        self, phase: str, step: int, error: StoreLostError, cause: BaseException
    ) -> NoReturn:
        """Without the store the only sign is the store itself: its host is lost."""
        group = self._group
        others = [rank for rank in range(group.num_ranks) if rank != group.rank]
        if len(others) > 1:  # init_process_group has global rank 0 hold the store
            others = [rank for rank in others if group.global_ranks[rank] == 0]
        names = ", ".join(group.rank_name(rank) for rank in others) or "a rank outside this group"
        raise MoEEpTimeoutError(
            f"{phase} of step {step} failed and the store that the ranks share is lost ({error}); "
            f"most likely {names} is gone (timeout_s={self._timeout_s:g})",
            phase=phase,
            step=step,
            ranks=others,
        ) from cause

"""An uneven all-to-all of rows over torch.distributed that a lost rank does not hold up.

gloo fails the exchange (a death at once, silence after the time-out). NCCL fails nothing, so the
host looks at the clock itself, and the caller has `_WATCHDOG_S` seconds between `MoEEpTimeoutError`
and torch's NCCL watchdog, which ends the process while the exchange is pending
(TORCH_NCCL_ASYNC_ERROR_HANDLING says how).
"""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness

# How often a waiting rank looks whether another one has given up.
_SLICE = timedelta(seconds=1)
_WATCHDOG_S = 30.0
# What the NCCL wait sleeps between two looks at its event.
_NAP_S = 20e-6


class _GivenUpElsewhere(RuntimeError):
    """Another rank left this call."""


class RowExchange:
    """Rows to every rank and from every rank, within `timeout_s` seconds. Collective."""

    def __init__(self, group: EpGroup, liveness: Liveness, timeout_s: float) -> None:
        self._group, self._liveness, self._timeout_s = group, liveness, timeout_s
        self._options = dist.AllToAllOptions()
        # Also what a gloo thread waits for a lost peer, hence what leaving the process may take.
        slack_s = 0.0 if group.backend == "gloo" else _WATCHDOG_S
        self._options.timeout = timedelta(seconds=timeout_s + slack_s)

    def __call__(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_rows: Sequence[int],
        sent_rows: Sequence[int],
        phase: str,
        step: int,
    ) -> None:
        """`sent_rows[r]` rows go to rank r and `received_rows[r]` come from it, in rank order; two
        empty lists: equal parts.

        Raises `MoEEpTimeoutError` naming `phase`, `step` and the ranks that are lost, or
        `MoEEpTransportError` if all are alive.
        """
        try:
            # Not dist.all_to_all_single, which takes no time-out, nor the ProcessGroup's method of
            # that name, which torch 2.11 lacks and 2.13 has.
            work = self._group.process_group.alltoall_base(
                received, sent, list(received_rows), list(sent_rows), self._options
            )
            if self._group.backend == "gloo":
                self._wait_in_slices(work)
            else:
                self._wait_for_event(work)
        except (RuntimeError, TimeoutError) as error:
            self._liveness.raise_failure(phase, step, error)

    def _wait_in_slices(self, work: dist.Work) -> None:
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it ended after the slice, or raises its own error
                    return
            self._check_the_others()

    def _wait_for_event(self, work: dist.Work) -> None:
        """For NCCL, whose wait(timeout) aborts the communicator, and whose wait() only orders the
        stream. The host waits for every exchange: the counts are host integers in any case."""
        deadline = time.monotonic() + self._timeout_s
        next_look = time.monotonic() + _SLICE.total_seconds()
        while not work.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"timed out after {self._timeout_s:g} s")
            if now > next_look:
                self._check_the_others()
                next_look = now + _SLICE.total_seconds()
            time.sleep(_NAP_S)
        work.wait()

    def _check_the_others(self) -> None:
        if self._liveness.failed_elsewhere():
            raise _GivenUpElsewhere("another rank gave up")

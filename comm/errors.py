"""Every exception that moe-ep raises on purpose.

A caller catches `MoEEpError` for all of them. Messages name the argument, the value given and what
is allowed; where a rank is at fault they name the rank.
"""

from collections.abc import Sequence


class MoEEpError(Exception):
    """Root of the family."""


class MoEEpConfigError(MoEEpError, ValueError):
    """A value a caller can get wrong: configuration, shape, dtype, device, id, capacity."""


class MoEEpUnavailableError(MoEEpConfigError):
    """A backend asked for by name that cannot run here; the text says what is missing."""


class MoEEpStateError(MoEEpError, RuntimeError):
    """A call that the life cycle does not allow: after `destroy()`, or after a failure."""


class MoEEpTransportError(MoEEpError, RuntimeError):
    """A transport failed although every rank is alive."""


class MoEEpTimeoutError(MoEEpError, TimeoutError):
    """A rank did not arrive in time. The layer is poisoned: only `destroy()` works.

    Attributes: `phase` (what was waited for), `step` (number of the forward call), `ranks` (those
    without a sign of life), and for device waits `expert`, `expected`, `seen`.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str = "",
        step: int | None = None,
        ranks: Sequence[int] = (),
        expert: int | None = None,
        expected: int | None = None,
        seen: int | None = None,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.step = step
        self.ranks = tuple(ranks)
        self.expert = expert
        self.expected = expected
        self.seen = seen

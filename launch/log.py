"""Log lines that say which rank wrote them."""

import logging
import os
import sys

from moe_ep.comm.errors import MoEEpConfigError

_LEVELS = ("debug", "info", "warning", "error")


def setup(rank: int = 0, num_ranks: int = 1, level: str | None = None) -> logging.Logger:
    """Send the logger "moe_ep" to stderr, each line prefixed with the rank; return it.

    level  one of debug, info, warning, error; None reads MOE_EP_LOG, without which rank 0 logs
           from info on and the others from warning on, so that N ranks do not say it N times

    Calling it again replaces the earlier handler. Raises `MoEEpConfigError` for another level.
    """
    name = check_level(level) or ("info" if rank == 0 else "warning")
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"rank {rank}/{num_ranks} " if num_ranks > 1 else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(message)s"))
    logger = logging.getLogger("moe_ep")
    logger.handlers[:] = [handler]
    logger.setLevel(name.upper())
    logger.propagate = False  # an application's root handler would print every line twice
    return logger


def check_level(level: str | None = None) -> str | None:
    """`level`, or what MOE_EP_LOG says, if anything; raises `MoEEpConfigError` if it is unknown."""
    name = level or os.environ.get("MOE_EP_LOG")
    if name and name.lower() not in _LEVELS:
        source = "level" if level else "MOE_EP_LOG"
        raise MoEEpConfigError(f"{source} {name!r} is not known; allowed: {', '.join(_LEVELS)}")
    return name

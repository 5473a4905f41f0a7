"""Many checks in one job of several ranks."""

import time
import traceback
from collections.abc import Callable, Mapping

import torch


def run_checks(rank: int, checks: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Check -> traceback, "" where it passed."""
    found = {}
    for name, check in checks.items():
        start = time.monotonic()
        found[name] = ""
        try:
            check()
        except Exception:
            found[name] = traceback.format_exc()
        torch.cuda.synchronize()
        print(f"rank {rank}: {name}: {time.monotonic() - start:.1f} s", flush=True)
    return found

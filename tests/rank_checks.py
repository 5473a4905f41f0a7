"""Many checks in one job of several ranks."""

import time
import traceback
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist

from moe_ep.megakernel import workspace_memory


def run_checks(rank: int, checks: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Check -> traceback, "" where it passed. Collective: where one failed, all ranks let go of the
    memory that its layers left, so that the next one finds the same on every rank."""
    found = {}
    for name, check in checks.items():
        start = time.monotonic()
        found[name] = ""
        try:
            check()
        except (Exception, pytest.fail.Exception):  # the latter is not one of the former
            found[name] = traceback.format_exc()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        failed: list = [None] * dist.get_world_size()
        dist.all_gather_object(failed, bool(found[name]))
        if any(failed):
            for memory in workspace_memory._shared.values():
                memory.destroy()
            workspace_memory._shared.clear()
        print(f"rank {rank}: {name}: {time.monotonic() - start:.1f} s", flush=True)
    return found

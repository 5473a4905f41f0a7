"""What a subcommand starts on several ranks ends with it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest


def processes_with(mark: str) -> list[int]:
    """Of this machine, those whose environment holds `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no signal tells of a parent's end")
@pytest.mark.parametrize("victim", ["moe-ep", "launcher"])
def test_ranks_end_with_who_started_them(victim, tmp_path):
    mark = f"MOE_EP_TEST_MARK={tmp_path}"
    command = [sys.executable, "-m", "moe_ep.launch.cli", "bench", "--ranks", "2"]
    environ = os.environ | dict([mark.split("=")])
    with subprocess.Popen(
        [*command, "--iterations", "100000000"], env=environ, start_new_session=True
    ) as started:
        try:
            deadline = time.monotonic() + 120
            while len(processes_with(mark)) < 4 and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(8)  # ranks come to their measuring
            others = [pid for pid in processes_with(mark) if pid != started.pid]
            assert len(others) >= 3
            os.kill(started.pid if victim == "moe-ep" else min(others), signal.SIGKILL)
            deadline = time.monotonic() + 60
            while processes_with(mark) and time.monotonic() < deadline:
                started.poll()
                time.sleep(0.2)
            assert not processes_with(mark)
        finally:
            for pid in processes_with(mark):
                os.kill(pid, signal.SIGKILL)

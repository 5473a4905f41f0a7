"""Start a subcommand again under torchrun, one process for each rank; say once why it failed."""

import argparse
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_PR_SET_PDEATHSIG = 1
REFUSED = 2  # exit code for arguments that no layer would take


def is_worker() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ


def end_with_parent() -> None:
    """On Linux: be sent SIGTERM when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def start(args: argparse.Namespace, num_ranks: int) -> int:
    """Run the parsed subcommand on `num_ranks` local processes; return 0, or the exit code of the
    rank whose error is printed: one that refused its arguments, else the first that failed."""
    # In a process of its own: torch's launcher sets signal handlers and levels of logging.
    command = [sys.executable, "-m", "moe_ep.launch.torchrun", str(num_ranks), *command_line(args)]
    # One thread for each rank is torchrun's own choice; said here, it does not warn about it.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=environ, check=False).returncode


def main(argv: Sequence[str]) -> int:
    """The process that `start` starts: number of ranks, then the words of the command."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    end_with_parent()
    num_ranks, *words = argv
    options = ["--standalone", f"--nproc-per-node={num_ranks}", "--module", "moe_ep.launch.cli"]
    _silence_elastic()
    try:
        run.run(run.parse_args(options + words))
    except ChildFailedError as error:
        return _report(words[0], error)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def record(error: Exception) -> bool:
    """Leave a worker's error to the process that started it; False where nothing waits for it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    return True


def command_line(args: argparse.Namespace) -> list[str]:
    """The words that parse to `args`: command and options (flags are False when not given)."""
    words = [args.command]
    for name, value in vars(args).items():
        if name in ("command", "run") or value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, list) else [value])]
    return words


def _report(command: str, error: "ChildFailedError") -> int:
    """Print what a rank refused; else the traceback of the rank that failed first, and a line for
    each that was not merely ended after it. The exit code of the one told."""
    failures = error.failures
    rank, failure = error.get_first_failure()
    refused = [rank for rank in failures if failures[rank].exitcode == REFUSED]
    if refused:
        print(f"moe-ep {command}: {_text(failures[refused[0]])}", file=sys.stderr)
        return REFUSED
    if isinstance(failure.message, dict):
        print(f"rank {rank}: {failure.message['extraInfo']['py_callstack']}", file=sys.stderr)
    for rank, each in failures.items():
        is_told = each.exitcode == 1 and not isinstance(each.message, dict)  # by the rank itself
        if not is_told and each.exitcode != -signal.SIGTERM:
            print(f"moe-ep {command}: rank {rank}: {_text(each)}", file=sys.stderr)
    return max(failure.exitcode, 1)


def _text(failure: "ProcessFailure") -> str:
    if isinstance(failure.message, dict):  # what `record` has left: "class: text"
        return failure.message["message"].partition(": ")[2]
    if failure.exitcode < 0:
        return f"ended by signal {-failure.exitcode}"
    return f"exit code {failure.exitcode}"


def _silence_elastic() -> None:
    """Its lines on a failure say what `_report` says; a logger of each module has its own level."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

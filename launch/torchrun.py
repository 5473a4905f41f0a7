"""Start a subcommand again under torchrun, one process for each rank."""

import argparse
import os
import subprocess
import sys


def is_worker() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ


def start(args: argparse.Namespace, num_ranks: int) -> int:
    """Run the parsed subcommand on `num_ranks` local processes; return torchrun's exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", "--module", "moe_ep.launch.cli"]
    # One thread for each rank is torchrun's own choice; said here, it does not warn about it.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command + command_line(args), env=environ, check=False).returncode


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

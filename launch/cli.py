"""The `moe-ep` command. Each subcommand is a module with `add_arguments(parser)` and `run(args)`.

Only the module of the subcommand asked for is imported, so `moe-ep --help` needs no torch.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.launch import log, torchrun

# name -> (module, one line of help)
COMMANDS = {
    "demo": ("moe_ep.launch.demo", "a language model reads real text, its experts over the ranks"),
    "bench": ("moe_ep.launch.bench", "latency of a layer against what the device allows"),
    "tune": ("moe_ep.launch.tune", "the mega kernel's builds for a layer, chosen by measuring"),
    "compile": ("moe_ep.launch.compile", "kernels into the cache ahead of a job, without a GPU"),
    "estimate": ("moe_ep.launch.estimate", "bytes of weights and buffers of a layer, per rank"),
    "inspect": ("moe_ep.launch.inspect", "experts of a checkpoint, and whether they can run"),
    "doctor": ("moe_ep.launch.doctor", "what this machine can run, and what is missing"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code, 2 for arguments that no layer would take."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="moe-ep",
        description="Expert-parallel Mixture-of-Experts layers: look, try, measure.",
    )
    parser.add_argument("--version", action="version", version=f"moe-ep {version('moe-ep')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module_name, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, description=help_line)
        if name in argv:
            module = import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if torchrun.is_worker():
        torchrun.end_with_parent()
    try:
        log.check_level()
        return args.run(args)
    except MoEEpConfigError as error:
        if not torchrun.record(error):
            print(f"moe-ep {args.command}: {error}", file=sys.stderr)
        return torchrun.REFUSED
    except KeyboardInterrupt:
        if not torchrun.is_worker():
            print(f"moe-ep {args.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if not torchrun.record(error):
            raise
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""`moe-ep tune`: time the builds of the mega kernel that fit a layer, and keep the best.

A layer with `MegaKernelConfig(knobs="auto")` of the same GPU, shape, format, ranks and capacity
takes them from then on, without measuring anything itself.
"""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table

from moe_ep.arguments import check_int
from moe_ep.backends import supports
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaConfig, MegaKernelConfig
from moe_ep.launch import bootstrap, torchrun
from moe_ep.launch.geometries import GEOMETRIES
from moe_ep.launch.output_file import output_file
from moe_ep.launch.random_layer import random_weights, shard_shape
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS, PARALLEL_MODES, WEIGHT_FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True)
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine")
    parser.add_argument(
        "--experts-per-rank", type=int, help="shrink the layer as moe-ep bench does"
    )
    parser.add_argument("--parallel", choices=PARALLEL_MODES, default="ep")
    parser.add_argument("--weights-format", choices=WEIGHT_FORMATS, default="nvfp4")
    parser.add_argument("--activation", choices=NAMED_ACTIVATIONS, help="default: swiglu")
    parser.add_argument(
        "--max-tokens-per-rank", type=int, default=512, help="capacity (default: 512)"
    )
    parser.add_argument("--max-sms", type=int, help="SMs of a launch, as in MegaKernelConfig")
    parser.add_argument("--skew", action="store_true", help="every second token has expert 0")
    parser.add_argument("--json", type=output_file, metavar="PATH", help="write every time")


def run(args: argparse.Namespace) -> int:
    check_int("--max-tokens-per-rank", args.max_tokens_per_rank, 1)
    check_int("--ranks", args.ranks, 1)
    if args.ranks > 1 and not torchrun.is_worker():
        return torchrun.start(args, args.ranks)
    with bootstrap.session() as group:
        tune_on_rank(args, group)
    return 0


def tune_on_rank(args: argparse.Namespace, group: EpGroup) -> None:
    """Collective over `group`; rank 0 prints."""
    config = MegaConfig(megakernel=MegaKernelConfig(max_sms=args.max_sms))
    shape = shard_shape(args.geometry, args.experts_per_rank, group.num_ranks)
    if args.activation:
        shape = dataclasses.replace(shape, activation=args.activation)
    answer = supports(
        *(shape, args.weights_format, config, group.device),
        parallel=args.parallel,
        num_ranks=group.num_ranks,
    )
    if not answer.ok:
        raise MoEEpConfigError(f"the mega kernel cannot run here: {answer.reason}")
    from moe_ep.mega_tune import Tuner, describe_knobs  # needs CuTe DSL, as the next
    from moe_ep.prepared import prepare_weights

    weights = random_weights(shape, args.weights_format, group, args.parallel)
    tuner = Tuner(
        *(group, shape, prepare_weights(shape, weights), args.max_tokens_per_rank),
        parallel=args.parallel,
        max_sms=args.max_sms,
        timeout_s=60.0,
    )
    tuned = tuner.run(is_skewed=args.skew)
    if group.rank:
        return
    table = Table(
        title=f"{args.geometry} E={shape.num_experts} on {group.num_ranks} rank(s), "
        f"{args.weights_format}{', skewed' if args.skew else ''}: us of the slowest rank",
    )
    table.add_column("build")
    for count in tuned.counts:
        table.add_column(f"{count} tokens", justify="right")
    best = [min(times) for times in zip(*tuned.seconds, strict=True)]
    for knobs, seconds in zip(tuned.knobs, tuned.seconds, strict=True):
        cells = [
            f"{1e6 * time:.1f}{' *' if time == least else ''}"
            for time, least in zip(seconds, best, strict=True)
        ]
        table.add_row(describe_knobs(knobs), *cells)
    console = Console()
    console.width = max(console.width, 60 + 12 * len(tuned.counts))
    console.print(table)
    for bucket in tuned.buckets:
        print(f"up to {bucket.max_tokens} tokens: {describe_knobs(bucket.knobs)}")
    print(f"kept in {tuned.path}" if tuned.path else "not kept")
    if args.json:
        record = {
            "counts": tuned.counts,
            "builds": [dataclasses.asdict(knobs) for knobs in tuned.knobs],
            "seconds": tuned.seconds,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")

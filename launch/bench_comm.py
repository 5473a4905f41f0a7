"""`moe-ep bench --comm`: what moving tokens to their experts and terms back takes, without GEMMs.

    torch        `TorchTransport`, all-to-all over torch.distributed; several ranks, never a graph
    fused        the mega kernel's dispatch and combine as a kernel of their own; GPUs. Its terms
                 are the tokens themselves
    fused-bare   the same built without the time-out checks of its waits, to show what they take
    nccl-ep-ll   NCCL-EP low latency, rank-major; GPUs. A rank sends one row for each token
    nccl-ep-ht   NCCL-EP high throughput, flat; the same

Ranks start together and the slowest counts, as in `timing.py`; wrong values end the bench. Combine
is what the round trip takes more than the dispatch. GB/s count what a rank sends to other ranks,
BF16, on average: a token once for each rank that it goes to (dispatch); what comes back is a term
for each slot, with NCCL-EP a row for each rank (combine). Between two GPUs a flag is also sent to
and fro.
"""

import argparse
import functools
import json
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.config import NCCL_EP_LAYOUTS
from moe_ep.inputs import MoEInputs
from moe_ep.launch.bench_report import git_commit
from moe_ep.launch.comm_cases import (
    Case,
    Times,
    bench_fused,
    bench_nccl_ep,
    bench_torch,
    compile_fused,
    destinations,
    fused_misfit,
    fused_moments,
    nccl_ep_misfit,
    owners,
    time_ping_pong,
)
from moe_ep.launch.random_layer import shard_shape
from moe_ep.launch.timing import all_reduce
from moe_ep.megakernel.problem import MoEShape
from moe_ep.random_inputs import random_inputs


@dataclass(frozen=True)
class CommResult:
    """One transport and number of tokens per rank; microseconds of the slowest rank, medians.

    None: combine, where the round trip was no longer than the dispatch (the host was slower)
    """

    transport: str
    is_graph: bool
    num_ranks: int
    tokens_per_rank: int
    dispatch_us: float
    combine_us: float | None
    round_us: float
    round_p99_us: float
    dispatch_gb_s: float
    combine_gb_s: float | None
    round_gb_s: float


@dataclass(frozen=True)
class Report:
    """
    left_out      transport -> why
    ping_pong_us  a round trip of a flag, between two GPUs
    moments_us    tokens per rank -> moment of the fused transport -> microseconds after the rank's
                  first CTA started, of its first, median and last CTA; rank 0's, with --stages
    """

    results: list[CommResult]
    left_out: dict[str, str]
    ping_pong_us: float | None
    moments_us: dict[int, dict[str, list[float]]]


@dataclass(frozen=True)
class Traffic:
    """What all ranks send to other ranks.

    num_tokens   a token once for each such rank
    num_terms    slots whose expert is on such a rank
    """

    num_tokens: int
    num_terms: int


def run(args: argparse.Namespace, group: EpGroup) -> Report:
    """Every transport that can run on `group`, for every number of tokens. Collective."""
    name, *others = args.geometry
    if others:
        raise MoEEpConfigError(f"--comm takes one --geometry, got {' '.join(args.geometry)}")
    shape = shard_shape(name, args.experts_per_rank, group.num_ranks)
    if shape.num_experts < group.num_ranks:
        raise MoEEpConfigError(f"{name} has too few experts for {group.num_ranks} ranks")
    is_cuda, is_several = group.device.type == "cuda", group.num_ranks > 1
    if not (is_cuda or is_several):
        raise MoEEpConfigError(
            "--comm on one CPU process has nothing to move; allowed: --ranks 2 or more, or a GPU"
        )
    benches, left_out = {}, {}
    if is_several:
        benches["torch"] = bench_torch
    fused_reason = fused_misfit(group) if is_cuda else None
    if fused_reason:
        left_out["fused"] = fused_reason
    elif is_cuda:
        compile_fused(shape, args.tokens, group.num_ranks, args.stages)
        benches["fused"] = bench_fused
        benches["fused-bare"] = functools.partial(bench_fused, is_bounded=False)
    for mode in NCCL_EP_LAYOUTS if is_cuda else ():
        misfit = nccl_ep_misfit(mode, shape, max(args.tokens), group)
        if misfit is None:
            benches[f"nccl-ep-{mode}"] = functools.partial(bench_nccl_ep, mode)
        else:
            left_out[f"nccl-ep-{mode}"] = misfit
    found = Report([], left_out, None, {})
    with Progress(console=Console(stderr=True), transient=True, disable=group.rank > 0) as progress:
        bar = progress.add_task("", total=len(args.tokens) * len(benches))
        for num_tokens in args.tokens:
            inputs = random_inputs(shape, num_tokens, group)
            if args.stages and "fused" in benches:
                found.moments_us[num_tokens] = fused_moments(shape, inputs, group)
            traffic = count_traffic(shape, inputs, group)
            for transport, bench in benches.items():
                progress.update(bar, description=f"{transport}, {num_tokens} tokens")
                is_captured = args.graph and transport != "torch"
                for is_graph in (True, False) if is_captured and args.eager else (is_captured,):
                    case = Case(
                        shape=shape,
                        inputs=inputs,
                        group=group,
                        iterations=args.iterations,
                        is_graph=is_graph,
                    )
                    found.results.append(make_result(transport, case, bench(case), traffic))
                    save(args, found, group)  # NCCL-EP may end the process in the next one
                progress.advance(bar)
    if is_cuda and group.num_ranks == 2:
        found = replace(found, ping_pong_us=time_ping_pong(group))
        save(args, found, group)
    return found


def count_traffic(shape: MoEShape, inputs: MoEInputs, group: EpGroup) -> Traffic:
    is_sent_TR = destinations(shape, inputs, group)
    is_sent_TR[:, group.rank] = 0
    num_terms = (owners(shape, group)[inputs.topk_ids.long()] != group.rank).sum()
    counts = torch.stack([is_sent_TR.sum(), num_terms])
    return Traffic(*all_reduce(counts, dist.ReduceOp.SUM, group).tolist())


def make_result(transport: str, case: Case, times: Times, traffic: Traffic) -> CommResult:
    row_bytes = 2 * case.shape.hidden / case.group.num_ranks
    sums_ranks = transport.startswith("nccl-ep")
    num_rows_back = traffic.num_tokens if sums_ranks else traffic.num_terms
    out_bytes, back_bytes = traffic.num_tokens * row_bytes, num_rows_back * row_bytes
    dispatch_us, round_us = float(times["dispatch"].median()), float(times["round"].median())
    combine_us = round_us - dispatch_us if round_us > dispatch_us else None
    return CommResult(
        transport=transport,
        is_graph=case.is_graph,
        num_ranks=case.group.num_ranks,
        tokens_per_rank=case.num_tokens,
        dispatch_us=dispatch_us,
        combine_us=combine_us,
        round_us=round_us,
        round_p99_us=float(times["round"].quantile(0.99)),
        dispatch_gb_s=out_bytes / dispatch_us / 1e3,
        combine_gb_s=back_bytes / combine_us / 1e3 if combine_us else None,
        round_gb_s=(out_bytes + back_bytes) / round_us / 1e3,
    )


def report(found: Report) -> None:
    """One line a case."""
    table = Table(box=None)
    for field in fields(CommResult):
        table.add_column(field.name.replace("_", " "), justify="right")
    for result in found.results:
        table.add_row(*map(cell, asdict(result).values()))
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)
    for transport, reason in found.left_out.items():
        console.print(f"not run: {transport}: {reason}", markup=False, highlight=False)
    if found.ping_pong_us is not None:
        console.print(f"a flag to the other GPU and back: {found.ping_pong_us:.2f} us")
    for num_tokens, moments in found.moments_us.items():
        spread = (
            f"{name} {'/'.join(f'{us:.1f}' for us in some)}" for name, some in moments.items()
        )
        console.print(f"fused, {num_tokens} tokens, first/median/last CTA, us: {', '.join(spread)}")


def save(args: argparse.Namespace, found: Report, group: EpGroup) -> None:
    """What has been measured so far, as JSON where asked for."""
    if args.json and group.rank == 0:
        record = {"commit": git_commit(), "geometry": args.geometry[0]} | asdict(found)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)

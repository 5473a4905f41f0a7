"""`moe-ep bench --comm`: what moving tokens to their experts and terms back takes, without GEMMs.

    torch        `TorchTransport`, all-to-all over torch.distributed; several ranks, never a graph
    fused        the mega kernel's dispatch and combine as a kernel of their own; GPUs. Its terms
                 are the tokens themselves
    fused-bare   the same built without the time-out checks of its waits, to show what they take
    nccl-ep-ll   NCCL-EP low latency, rank-major; several GPUs. A rank sends one row for each token
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
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.nccl_ep_limits import capacity_misfit, layer_misfit, library_misfit
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import Outgoing
from moe_ep.config import NCCL_EP_LAYOUTS
from moe_ep.inputs import MoEInputs
from moe_ep.launch.bench_report import git_commit
from moe_ep.launch.random_layer import shard_shape
from moe_ep.launch.stages import median_launch
from moe_ep.launch.timing import all_reduce, time_call
from moe_ep.megakernel.problem import MoEShape, owned_experts
from moe_ep.random_inputs import random_inputs
from moe_ep.reference import combine_terms

TIMEOUT_S = 60.0
LAYER_ID = 0  # layers count from 1
PING_PONG_ROUNDS = 1000


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
    if is_cuda:
        benches["fused"] = bench_fused
        benches["fused-bare"] = functools.partial(bench_fused, is_bounded=False)
    for mode in NCCL_EP_LAYOUTS if is_cuda and is_several else ():
        misfit = nccl_ep_misfit(mode, shape, max(args.tokens), group)
        if misfit is None:
            benches[f"nccl-ep-{mode}"] = functools.partial(bench_nccl_ep, mode)
        else:
            left_out[f"nccl-ep-{mode}"] = misfit
    results, moments_us = [], {}
    for num_tokens in args.tokens:
        inputs = random_inputs(shape, num_tokens, group)
        if args.stages and is_cuda:
            moments_us[num_tokens] = fused_moments(shape, inputs, group)
        traffic = count_traffic(shape, inputs, group)
        for transport, bench in benches.items():
            is_captured = args.graph and transport != "torch"
            for is_graph in (True, False) if is_captured and args.eager else (is_captured,):
                times, num_back = bench(args, shape, inputs, group, traffic, is_graph)
                results.append(
                    make_result(transport, is_graph, shape, inputs, group, times, traffic, num_back)
                )
    ping_pong_us = None
    if is_cuda and group.num_ranks == 2:
        ping_pong_us = time_ping_pong(group)
    return Report(results, left_out, ping_pong_us, moments_us)


Times = dict[str, torch.Tensor]  # "dispatch" and "round": microseconds of each call


def bench_torch(
    args: argparse.Namespace,
    shape: MoEShape,
    inputs: MoEInputs,
    group: EpGroup,
    traffic: Traffic,
    is_graph: bool,
) -> tuple[Times, int]:
    """Times, and the rows that all ranks send back to other ranks; as every function here."""
    owner_E = owners(shape, group)
    transport = TorchTransport(
        group,
        Liveness(group, LAYER_ID, TIMEOUT_S),
        layer_id=LAYER_ID,
        hidden=shape.hidden,
        top_k=shape.top_k,
        owner_E=owner_E,
        timeout_s=TIMEOUT_S,
    )
    outgoing = Outgoing(
        x_TH=inputs.hidden_states,
        topk_ids_TK=inputs.topk_ids,
        topk_weights_TK=inputs.topk_weights,
        bound=len(inputs.hidden_states),
    )
    received = transport.dispatch(outgoing)
    token_idx = (owner_E[received.topk_ids_NK.long()] == group.rank).nonzero()[:, 0]
    rows = received.x_NH[token_idx]
    terms_TKH = transport.combine(rows, received)
    check_equal("torch", terms_TKH, inputs.hidden_states[:, None].expand_as(terms_TKH))

    def round_trip() -> None:
        transport.combine(rows, transport.dispatch(outgoing))

    times = {
        "dispatch": microseconds(lambda: transport.dispatch(outgoing), group, args, is_graph),
        "round": microseconds(round_trip, group, args, is_graph),
    }
    transport.destroy()
    return times, traffic.num_terms


def bench_fused(
    args: argparse.Namespace,
    shape: MoEShape,
    inputs: MoEInputs,
    group: EpGroup,
    traffic: Traffic,
    is_graph: bool,
    *,
    is_bounded: bool = True,
) -> tuple[Times, int]:
    times = {}
    for name, combines in (("dispatch", False), ("round", True)):
        options = dict(combines=combines, is_bounded=is_bounded)
        transport, launch, out_TH = fused_transport(shape, inputs, group, **options)
        times[name] = microseconds(launch, group, args, is_graph)
        transport.check()
        transport.destroy()
    terms_TKH = inputs.hidden_states[:, None].expand(-1, shape.top_k, -1)
    expected_TH = combine_terms(terms_TKH, inputs.topk_ids, inputs.topk_weights)
    check_equal("fused", out_TH, expected_TH)
    return times, traffic.num_terms


def fused_moments(shape: MoEShape, inputs: MoEInputs, group: EpGroup) -> dict[str, list[float]]:
    transport, launch, _ = fused_transport(shape, inputs, group, has_stamps=True)
    moments = median_launch(launch, transport.stamps, group)
    transport.check()
    transport.destroy()
    return moments


def fused_transport(shape: MoEShape, inputs: MoEInputs, group: EpGroup, **options: bool):
    """A `FusedTransport` for these inputs, a function that launches it, and where its sums go.
    `options` as of `TransportSpec`."""
    from moe_ep.megakernel.fused_transport import FusedTransport  # needs CuTe DSL

    num_tokens = len(inputs.hidden_states)
    transport = FusedTransport(
        group,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        max_tokens_per_rank=num_tokens,
        timeout_s=TIMEOUT_S,
        **options,
    )
    out_TH = torch.empty_like(inputs.hidden_states)
    launch = functools.partial(
        transport.forward,
        *(inputs.hidden_states, inputs.topk_ids.int(), inputs.topk_weights),
        torch.tensor([num_tokens], dtype=torch.int32, device=group.device),
        torch.ones(shape.num_experts, device=group.device),
        out_TH,
    )
    return transport, launch, out_TH


def bench_nccl_ep(
    mode: str,
    args: argparse.Namespace,
    shape: MoEShape,
    inputs: MoEInputs,
    group: EpGroup,
    traffic: Traffic,
    is_graph: bool,
) -> tuple[Times, int]:
    from moe_ep.comm.nccl_ep import NcclEpSpec, NcclEpTransport  # needs nccl.ep when built

    num_tokens = len(inputs.hidden_states)
    spec = NcclEpSpec(
        mode=mode,
        layout=NCCL_EP_LAYOUTS[mode][0],
        hidden=shape.hidden,
        top_k=shape.top_k,
        num_experts=shape.num_experts,
        num_ranks=group.num_ranks,
        max_tokens_per_rank=num_tokens,
    )
    transport = NcclEpTransport(group, spec, TIMEOUT_S)
    x_TH, ids_TK = inputs.hidden_states, inputs.topk_ids.long()
    out_TH = torch.empty_like(x_TH)

    def dispatch() -> torch.Tensor:
        return transport.dispatch(x_TH, ids_TK, inputs.topk_weights).x_NH

    def round_trip() -> None:
        transport.combine(dispatch(), out_TH)

    round_trip()
    times = {"round": microseconds(round_trip, group, args, is_graph)}
    # One row came back from each rank that a token went to: the token itself.
    num_rows_T1 = destinations(shape, inputs, group).sum(1, keepdim=True)
    check_equal(f"nccl-ep-{mode}", out_TH, (x_TH.float() * num_rows_T1).bfloat16())
    rows_NH = dispatch()
    times["dispatch"] = microseconds(
        dispatch, group, args, is_graph, before=lambda: transport.combine(rows_NH, out_TH)
    )
    transport.combine(rows_NH, out_TH)
    torch.cuda.synchronize(group.device)
    transport.destroy()
    return times, traffic.num_tokens


def nccl_ep_misfit(mode: str, shape: MoEShape, max_tokens: int, group: EpGroup) -> str | None:
    kind = mode, NCCL_EP_LAYOUTS[mode][0]
    return (
        layer_misfit(
            *kind,
            hidden=shape.hidden,
            top_k=shape.top_k,
            num_experts=shape.num_experts,
            num_ranks=group.num_ranks,
        )
        or capacity_misfit(*kind, max_tokens_per_rank=max_tokens, top_k=1)
        or library_misfit()
    )


def time_ping_pong(group: EpGroup) -> float:
    from moe_ep.megakernel.ping_pong import PingPong  # needs CuTe DSL

    ping_pong = PingPong(group, TIMEOUT_S)
    ping_pong.round_trip_us(PING_PONG_ROUNDS)
    slowest = torch.tensor(ping_pong.round_trip_us(PING_PONG_ROUNDS), device=group.device)
    ping_pong.destroy()
    return float(all_reduce(slowest, dist.ReduceOp.MAX, group))


def microseconds(
    step: Callable[[], object],
    group: EpGroup,
    args: argparse.Namespace,
    use_graph: bool,
    before: Callable[[], object] | None = None,
) -> torch.Tensor:
    return 1e6 * time_call(step, group, args.iterations, use_graph, before=before)


def owners(shape: MoEShape, group: EpGroup) -> torch.Tensor:
    """Rank [E] of each expert."""
    owners = [
        rank
        for rank in range(group.num_ranks)
        for _ in owned_experts(shape.num_experts, group.num_ranks, rank)
    ]
    return torch.tensor(owners, device=group.device)


def destinations(shape: MoEShape, inputs: MoEInputs, group: EpGroup) -> torch.Tensor:
    """int64 [T, R]: 1 where a token goes to a rank."""
    is_sent_TR = torch.zeros(
        len(inputs.topk_ids), group.num_ranks, dtype=torch.int64, device=group.device
    )
    return is_sent_TR.scatter_(1, owners(shape, group)[inputs.topk_ids.long()], 1)


def count_traffic(shape: MoEShape, inputs: MoEInputs, group: EpGroup) -> Traffic:
    is_sent_TR = destinations(shape, inputs, group)
    is_sent_TR[:, group.rank] = 0
    num_terms = (owners(shape, group)[inputs.topk_ids.long()] != group.rank).sum()
    counts = torch.stack([is_sent_TR.sum(), num_terms])
    return Traffic(*all_reduce(counts, dist.ReduceOp.SUM, group).tolist())


def check_equal(transport: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got.view(torch.int16), expected.contiguous().view(torch.int16)):
        raise RuntimeError(f"{transport} transport: wrong values, so that no time means anything")


def make_result(
    name: str,
    is_graph: bool,
    shape: MoEShape,
    inputs: MoEInputs,
    group: EpGroup,
    times: Times,
    traffic: Traffic,
    num_rows_back: int,
) -> CommResult:
    row_bytes = 2 * shape.hidden / group.num_ranks
    out_bytes, back_bytes = traffic.num_tokens * row_bytes, num_rows_back * row_bytes
    dispatch_us, round_us = float(times["dispatch"].median()), float(times["round"].median())
    combine_us = round_us - dispatch_us if round_us > dispatch_us else None
    return CommResult(
        transport=name,
        is_graph=is_graph,
        num_ranks=group.num_ranks,
        tokens_per_rank=len(inputs.hidden_states),
        dispatch_us=dispatch_us,
        combine_us=combine_us,
        round_us=round_us,
        round_p99_us=float(times["round"].quantile(0.99)),
        dispatch_gb_s=out_bytes / dispatch_us / 1e3,
        combine_gb_s=back_bytes / combine_us / 1e3 if combine_us else None,
        round_gb_s=(out_bytes + back_bytes) / round_us / 1e3,
    )


def report(args: argparse.Namespace, found: Report) -> None:
    """One line a case; all of it as JSON where asked for."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for field in asdict(found.results[0]):
        table.add_column(field.replace("_", " "), justify="right")
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
    if args.json:
        record = {"commit": git_commit(), "geometry": args.geometry[0]} | asdict(found)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1f}" if isinstance(value, float) else str(value)

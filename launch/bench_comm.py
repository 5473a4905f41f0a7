"""`moe-ep bench --comm`: what moving tokens to their experts and terms back takes, without GEMMs.

    torch   `TorchTransport`, all-to-all over torch.distributed; several ranks
    fused   the mega kernel's dispatch and combine as a kernel of their own; GPUs. Its terms are the
            tokens themselves; combine is what the round trip takes more than the dispatch

Ranks start together and the slowest counts, as in `timing.py`; wrong values end the bench. GB/s
count what a rank sends and receives on average, BF16: a token once for each rank that it goes to
(dispatch), a term for each slot (combine).
"""

import argparse
import functools
import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import Outgoing
from moe_ep.inputs import MoEInputs
from moe_ep.launch.bench_report import git_commit
from moe_ep.launch.geometries import geometry
from moe_ep.launch.random_layer import random_inputs
from moe_ep.launch.timing import all_reduce, time_call
from moe_ep.megakernel.problem import MoEShape, owned_experts
from moe_ep.reference import combine_terms

TIMEOUT_S = 60.0
LAYER_ID = 0  # layers count from 1


@dataclass(frozen=True)
class CommResult:
    """One transport and number of tokens per rank; microseconds of the slowest rank, medians."""

    transport: str
    num_ranks: int
    tokens_per_rank: int
    dispatch_us: float
    combine_us: float
    round_us: float
    round_p99_us: float
    dispatch_gb_s: float
    combine_gb_s: float


def run(args: argparse.Namespace, group: EpGroup) -> list[CommResult]:
    """Every transport that can run on `group`, for every number of tokens. Collective."""
    name, *others = args.geometry
    if others:
        raise MoEEpConfigError(f"--comm takes one --geometry, got {' '.join(args.geometry)}")
    shape = geometry(name)
    if shape.num_experts < group.num_ranks:
        raise MoEEpConfigError(f"{name} has too few experts for {group.num_ranks} ranks")
    results = []
    for num_tokens in args.tokens:
        inputs = random_inputs(shape, num_tokens, group)
        if group.num_ranks > 1:
            results.append(bench_torch(args, shape, inputs, group))
        if group.device.type == "cuda":
            results.append(bench_fused(args, shape, inputs, group))
    if not results:
        raise MoEEpConfigError(
            "--comm on one CPU process has nothing to move; allowed: --ranks 2 or more, or a GPU"
        )
    return results


def bench_torch(
    args: argparse.Namespace, shape: MoEShape, inputs: MoEInputs, group: EpGroup
) -> CommResult:
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
    num_tokens = len(inputs.hidden_states)
    outgoing = Outgoing(
        x_TH=inputs.hidden_states,
        topk_ids_TK=inputs.topk_ids,
        topk_weights_TK=inputs.topk_weights,
        bound=num_tokens,
    )
    received = transport.dispatch(outgoing)
    token_idx = (owner_E[received.topk_ids_NK.long()] == group.rank).nonzero()[:, 0]
    rows = received.x_NH[token_idx]
    terms_TKH = transport.combine(rows, received)
    check_equal("torch", terms_TKH, inputs.hidden_states[:, None].expand_as(terms_TKH))

    def round_trip() -> None:
        transport.combine(rows, transport.dispatch(outgoing))

    steps = {
        "dispatch": lambda: transport.dispatch(outgoing),
        "combine": lambda: transport.combine(rows, received),
        "round": round_trip,
    }
    times = {
        name: 1e6 * time_call(step, group, args.iterations, False) for name, step in steps.items()
    }
    transport.destroy()
    return make_result("torch", shape, inputs, group, times)


def bench_fused(
    args: argparse.Namespace, shape: MoEShape, inputs: MoEInputs, group: EpGroup
) -> CommResult:
    from moe_ep.megakernel.fused_transport import FusedTransport  # needs CuTe DSL

    device, num_tokens = group.device, len(inputs.hidden_states)
    out_TH = torch.empty_like(inputs.hidden_states)
    arguments = (
        *(inputs.hidden_states, inputs.topk_ids.int(), inputs.topk_weights),
        torch.tensor([num_tokens], dtype=torch.int32, device=device),
        torch.ones(shape.num_experts, device=device),
        out_TH,
    )
    times = {}
    for name, combines in (("dispatch", False), ("round", True)):
        transport = FusedTransport(
            group,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden=shape.hidden,
            max_tokens_per_rank=num_tokens,
            combines=combines,
            timeout_s=TIMEOUT_S,
        )
        step = functools.partial(transport.forward, *arguments)
        times[name] = 1e6 * time_call(step, group, args.iterations, args.graph)
        transport.check()
        transport.destroy()
    terms_TKH = inputs.hidden_states[:, None].expand(-1, shape.top_k, -1)
    expected_TH = combine_terms(terms_TKH, inputs.topk_ids, inputs.topk_weights)
    check_equal("fused", out_TH, expected_TH)
    times["combine"] = (times["round"].median() - times["dispatch"].median()).reshape(1)
    return make_result("fused", shape, inputs, group, times)


def owners(shape: MoEShape, group: EpGroup) -> torch.Tensor:
    """Rank [E] of each expert."""
    owners = [
        rank
        for rank in range(group.num_ranks)
        for _ in owned_experts(shape.num_experts, group.num_ranks, rank)
    ]
    return torch.tensor(owners, device=group.device)


def check_equal(transport: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got.view(torch.int16), expected.contiguous().view(torch.int16)):
        raise RuntimeError(f"{transport} transport: wrong values, so that no time means anything")


def make_result(
    name: str,
    shape: MoEShape,
    inputs: MoEInputs,
    group: EpGroup,
    times: dict[str, torch.Tensor],
) -> CommResult:
    """`times`: microseconds of each call, of "dispatch", "combine" and "round"."""
    is_sent_TR = torch.zeros(
        len(inputs.topk_ids), group.num_ranks, dtype=torch.int64, device=group.device
    ).scatter_(1, owners(shape, group)[inputs.topk_ids.long()], 1)
    rows = torch.stack([is_sent_TR.sum(), torch.tensor(inputs.topk_ids.numel()).to(group.device)])
    all_reduce(rows, dist.ReduceOp.SUM, group)
    dispatch_bytes, combine_bytes = (rows.double() / group.num_ranks * 2 * shape.hidden).tolist()
    medians = {step: float(us.median()) for step, us in times.items()}
    return CommResult(
        transport=name,
        num_ranks=group.num_ranks,
        tokens_per_rank=len(inputs.hidden_states),
        dispatch_us=medians["dispatch"],
        combine_us=medians["combine"],
        round_us=medians["round"],
        round_p99_us=float(times["round"].quantile(0.99)),
        dispatch_gb_s=dispatch_bytes / medians["dispatch"] / 1e3,
        combine_gb_s=combine_bytes / medians["combine"] / 1e3,
    )


def report(args: argparse.Namespace, results: list[CommResult]) -> None:
    """One line a case; all of it as JSON where asked for."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    fields = list(asdict(results[0]))
    for field in fields:
        table.add_column(field.replace("_", " "), justify="right")
    for result in results:
        values = asdict(result).values()
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in values))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    if args.json:
        record = {
            "commit": git_commit(),
            "geometry": args.geometry[0],
            "is_graph": args.graph,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")

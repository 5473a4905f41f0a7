"""What `moe-ep bench --comm` times: each transport, tokens out and terms back, values checked.

A bench takes a `Case` and returns microseconds of its calls on the slowest rank. Collective. What
a rank's machine lacks for one is told by its `misfit`, before anything is built.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.nccl_ep_limits import capacity_misfit, layer_misfit, library_misfit
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import Outgoing
from moe_ep.config import NCCL_EP_LAYOUTS
from moe_ep.grouped_limits import device_misfit
from moe_ep.inputs import MoEInputs
from moe_ep.launch.stages import median_launch
from moe_ep.launch.timing import all_reduce, time_call
from moe_ep.mega_limits import peers_misfit
from moe_ep.megakernel.problem import MoEShape, owned_experts
from moe_ep.reference import combine_terms

TIMEOUT_S = 60.0
LAYER_ID = 0  # layers count from 1
PING_PONG_ROUNDS = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """`inputs` of this rank; `is_graph`: calls are replays of a CUDA graph."""

    shape: MoEShape
    inputs: MoEInputs
    group: EpGroup
    iterations: int
    is_graph: bool

    @property
    def num_tokens(self) -> int:
        return len(self.inputs.hidden_states)

    def microseconds(
        self, call: Callable[[], object], before: Callable[[], object] | None = None
    ) -> torch.Tensor:
        return 1e6 * time_call(call, self.group, self.iterations, self.is_graph, before=before)


Times = dict[str, torch.Tensor]  # "dispatch" and "round": microseconds of each call


def bench_torch(case: Case) -> Times:
    shape, inputs, group = case.shape, case.inputs, case.group
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
        bound=case.num_tokens,
    )
    received = transport.dispatch(outgoing)
    token_idx = (owner_E[received.topk_ids_NK.long()] == group.rank).nonzero()[:, 0]
    rows = received.x_NH[token_idx]
    terms_TKH = transport.combine(rows, received)
    check_equal("torch", terms_TKH, inputs.hidden_states[:, None].expand_as(terms_TKH))
    times = {
        "dispatch": case.microseconds(lambda: transport.dispatch(outgoing)),
        "round": case.microseconds(lambda: transport.combine(rows, transport.dispatch(outgoing))),
    }
    transport.destroy()
    return times


def bench_fused(case: Case, *, is_bounded: bool = True) -> Times:
    """Its terms are the tokens themselves."""
    times = {}
    for name, combines in (("dispatch", False), ("round", True)):
        options = dict(combines=combines, is_bounded=is_bounded)
        transport, launch, out_TH = fused_transport(case.shape, case.inputs, case.group, **options)
        times[name] = case.microseconds(launch)
        transport.check()
        transport.destroy()
    inputs = case.inputs
    terms_TKH = inputs.hidden_states[:, None].expand(-1, case.shape.top_k, -1)
    expected_TH = combine_terms(terms_TKH, inputs.topk_ids, inputs.topk_weights)
    check_equal("fused", out_TH, expected_TH)
    return times


def fused_moments(shape: MoEShape, inputs: MoEInputs, group: EpGroup) -> dict[str, list[float]]:
    """Microseconds of `protocol.Moment`s on this rank, see `stages.median_launch`."""
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
        group, timeout_s=TIMEOUT_S, **fused_geometry(shape, num_tokens), **options
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


def fused_geometry(shape: MoEShape, num_tokens: int) -> dict[str, int]:
    return dict(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        max_tokens_per_rank=num_tokens,
    )


def compile_fused(shape: MoEShape, tokens: list[int], num_ranks: int, has_stamps: bool) -> None:
    """Every kernel of the run, on all cores; ranks of one machine share the cache and the work."""
    from moe_ep.megakernel.compile_cache import compile_all  # needs CuTe DSL, as the next two
    from moe_ep.megakernel.fused_transport import transport_spec
    from moe_ep.megakernel.transport_sm90 import transport_build

    builds = [dict(combines=c, is_bounded=b) for c in (False, True) for b in (True, False)]
    builds += [dict(has_stamps=True)] if has_stamps else []
    specs = [
        transport_spec(num_ranks, is_virtual=False, **fused_geometry(shape, num_tokens), **options)
        for num_tokens in tokens
        for options in builds
    ]
    compile_all([transport_build(spec) for spec in specs])


def fused_misfit(group: EpGroup) -> str | None:
    return peers_misfit(group.num_ranks) or device_misfit(group.device, "the fused transport")


def bench_nccl_ep(mode: str, case: Case) -> Times:
    """For each rank that a token goes to a row is sent, and comes back as it was."""
    from moe_ep.comm.nccl_ep import NcclEpSpec, NcclEpTransport  # needs nccl.ep when built

    shape, inputs, group = case.shape, case.inputs, case.group
    spec = NcclEpSpec(
        mode=mode,
        layout=NCCL_EP_LAYOUTS[mode][0],
        hidden=shape.hidden,
        top_k=shape.top_k,
        num_experts=shape.num_experts,
        num_ranks=group.num_ranks,
        max_tokens_per_rank=case.num_tokens,
    )
    transport = NcclEpTransport(group, spec, TIMEOUT_S)
    x_TH, ids_TK = inputs.hidden_states, inputs.topk_ids.long()
    out_TH = torch.empty_like(x_TH)

    def dispatch() -> torch.Tensor:
        return transport.dispatch(x_TH, ids_TK, inputs.topk_weights).x_NH

    def round_trip() -> None:
        transport.combine(dispatch(), out_TH)

    round_trip()
    times = {"round": case.microseconds(round_trip)}
    num_rows_T1 = destinations(shape, inputs, group).sum(1, keepdim=True)
    check_equal(f"nccl-ep-{mode}", out_TH, (x_TH.float() * num_rows_T1).bfloat16())
    rows_NH = dispatch()
    times["dispatch"] = case.microseconds(
        dispatch, before=lambda: transport.combine(rows_NH, out_TH)
    )
    transport.combine(rows_NH, out_TH)
    torch.cuda.synchronize(group.device)
    transport.destroy()
    return times


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
    """Microseconds that a flag takes to the other rank and back."""
    from moe_ep.megakernel.ping_pong import PingPong  # needs CuTe DSL

    ping_pong = PingPong(group, TIMEOUT_S)
    ping_pong.round_trip_us(PING_PONG_ROUNDS)
    slowest = torch.tensor(ping_pong.round_trip_us(PING_PONG_ROUNDS), device=group.device)
    ping_pong.destroy()
    return float(all_reduce(slowest, dist.ReduceOp.MAX, group))


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


def check_equal(transport: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got.view(torch.int16), expected.contiguous().view(torch.int16)):
        raise RuntimeError(f"{transport} transport: wrong values, so that no time means anything")

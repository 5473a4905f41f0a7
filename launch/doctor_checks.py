"""What `moe-ep doctor` tries on the GPUs that are there, with values checked.

    GPUs  check           what runs
    1     virtual ranks   tokens to experts and terms back over four ranks of one launch; a rank
                          that never comes, which must be named in time; then the first again
    2     peers           a flag to and fro; tokens and terms through each other's memory
    1, 2  NCCL-EP         dispatch and combine in both modes

Each check has processes of its own, so that one that crashes or hangs is a line of the report.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.nccl_ep_limits import library_misfit
from moe_ep.config import NCCL_EP_LAYOUTS
from moe_ep.grouped_limits import device_misfit
from moe_ep.launch import spawn
from moe_ep.mega_limits import peers_misfit
from moe_ep.reference import combine_terms

NUM_EXPERTS, TOP_K, HIDDEN, NUM_TOKENS = 8, 2, 1024, 16
NUM_VIRTUAL_RANKS, ABSENT_RANK = 4, 2
ABSENCE_S = 0.5  # time-out of a kernel one of whose ranks never comes
FLAG_ROUNDS = 1000
CHECK_TIMEOUT_S = 300.0  # of one check, compiling included


@dataclass(frozen=True)
class Check:
    """`worker(rank, num_ranks)` returns what was seen, one line, or raises.

    least, most   ranks, a GPU each; as many as there are GPUs
    misfit        why it cannot run on this machine, whatever its GPUs, or None
    """

    name: str
    worker: Callable[[int, int], str]
    misfit: Callable[[], str | None] = lambda: None
    least: int = 1
    most: int = 1


@dataclass(frozen=True)
class Outcome:
    """`ok` is None for a check that did not run; `detail` says what was seen, or why not."""

    check: str
    ok: bool | None
    detail: str


def run_checks(say: Callable[[str], None]) -> list[Outcome]:
    """Every check for the GPUs of this machine, none without a GPU; `say` gets a line for each."""
    if not torch.cuda.is_available():
        return []
    num_gpus = torch.cuda.device_count()
    outcomes = []
    for check in CHECKS:
        reason = check.misfit()
        if num_gpus < check.least:
            reason = f"needs {check.least} GPUs, found {num_gpus}"
        if reason is None:
            say(f"checking {check.name}; at most {CHECK_TIMEOUT_S:.0f} s")
            outcomes.append(run_check(check, min(num_gpus, check.most)))
        else:
            outcomes.append(Outcome(check.name, None, reason))
    return outcomes


def run_check(check: Check, num_ranks: int = 1, device: str = "cuda") -> Outcome:
    try:
        seen, *_ = spawn.run(check.worker, num_ranks, device=device, timeout_s=CHECK_TIMEOUT_S)
    except Exception as error:  # whatever it is, it is what this machine does
        return Outcome(check.name, False, f"{type(error).__name__}: {error}")
    return Outcome(check.name, True, seen)


def kernels_misfit() -> str | None:
    return device_misfit(torch.device("cuda"), "the mega kernel's transport")


def two_gpus_misfit() -> str | None:
    return kernels_misfit() or peers_misfit(2)


def try_virtual_ranks(rank: int, num_ranks: int) -> str:
    group = EpGroup.virtual(NUM_VIRTUAL_RANKS)
    transport = make_transport(group, ABSENCE_S)
    check_transport(transport, group)
    start = time.monotonic()
    launch(transport, group, late_rank=ABSENT_RANK, late_s=-1.0)
    torch.cuda.synchronize()
    waited_s = time.monotonic() - start
    try:
        transport.check()
    except MoEEpTimeoutError as error:
        named = error.ranks
    else:
        named = ()
    if named != (ABSENT_RANK,):
        raise RuntimeError(f"rank {ABSENT_RANK} never came, the time-out names {named}")
    transport.destroy()
    transport = make_transport(group, ABSENCE_S)
    check_transport(transport, group)
    transport.destroy()
    return (
        f"values right over {NUM_VIRTUAL_RANKS} ranks of one GPU; a rank that never came is named "
        f"after {waited_s:.1f} s, and the next launch is right"
    )


def try_peers(rank: int, num_ranks: int) -> str:
    from moe_ep.comm.symmetric import finish_nvshmem
    from moe_ep.megakernel.ping_pong import PingPong  # needs CuTe DSL

    group = EpGroup.default("cuda")
    ping_pong = PingPong(group)
    ping_pong.round_trip_us(FLAG_ROUNDS)
    flag_us = ping_pong.round_trip_us(FLAG_ROUNDS)
    ping_pong.destroy()
    transport = make_transport(group, CHECK_TIMEOUT_S)
    check_transport(transport, group)
    transport.destroy()
    finish_nvshmem()
    return f"a flag to and fro in {flag_us:.2f} us; values right through peers' memory"


def try_nccl_ep(rank: int, num_ranks: int) -> str:
    from moe_ep.comm.nccl_ep import NcclEpSpec, NcclEpTransport  # needs nccl.ep when built

    group = EpGroup.default("cuda")
    x_TH, ids_TK, weights_TK, _ = (tensor[0] for tensor in make_inputs(group))
    share = NUM_EXPERTS // num_ranks
    is_to = (ids_TK[..., None] // share == torch.arange(num_ranks, device=ids_TK.device)).any(1)
    expected_TH = (x_TH.float() * is_to.sum(1, keepdim=True)).bfloat16()
    for mode, layouts in NCCL_EP_LAYOUTS.items():
        spec = NcclEpSpec(
            mode=mode,
            layout=layouts[0],
            hidden=HIDDEN,
            top_k=TOP_K,
            num_experts=NUM_EXPERTS,
            num_ranks=num_ranks,
            max_tokens_per_rank=NUM_TOKENS,
        )
        transport = NcclEpTransport(group, spec, CHECK_TIMEOUT_S)
        out_TH = torch.full_like(x_TH, float("nan"))
        transport.combine(transport.dispatch(x_TH, ids_TK.long(), weights_TK).x_NH, out_TH)
        torch.cuda.synchronize()
        transport.destroy()
        require_equal(out_TH, expected_TH, f"NCCL-EP {mode}")
    return f"values right over {num_ranks} ranks in modes {' and '.join(NCCL_EP_LAYOUTS)}"


CHECKS = (
    Check("virtual ranks", try_virtual_ranks, kernels_misfit),
    Check("peers", try_peers, two_gpus_misfit, least=2, most=2),
    Check("NCCL-EP", try_nccl_ep, library_misfit, most=2),
)


def make_transport(group: EpGroup, timeout_s: float):
    from moe_ep.megakernel.fused_transport import FusedTransport  # needs CuTe DSL

    return FusedTransport(
        group,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=NUM_TOKENS,
        timeout_s=timeout_s,
    )


def make_inputs(group: EpGroup) -> tuple[torch.Tensor, ...]:
    """x [n, T, H], ids [n, T, K] without repeats, weights [n, T, K] of the n ranks launched here,
    and a scale for each expert [E]; on the group's GPU."""
    num_launched = group.num_ranks if group.is_virtual else 1
    gen = torch.Generator().manual_seed(group.rank)
    shape = num_launched, NUM_TOKENS
    x = torch.randn(*shape, HIDDEN, generator=gen).bfloat16()
    ids = torch.rand(*shape, NUM_EXPERTS, generator=gen).topk(TOP_K).indices.int()
    weights = torch.rand(*shape, TOP_K, generator=gen)
    scale = torch.linspace(0.5, 1.5, NUM_EXPERTS)
    return tuple(tensor.to(group.device) for tensor in (x, ids, weights, scale))


def launch(transport, group: EpGroup, **late: float) -> torch.Tensor:
    x, ids, weights, scale = make_inputs(group)
    num_tokens = torch.full((len(x),), NUM_TOKENS, dtype=torch.int32, device=group.device)
    out = torch.full_like(x, float("nan"))
    transport.forward(x, ids, weights, num_tokens, scale, out, **late)
    return out


def check_transport(transport, group: EpGroup) -> None:
    """Each expert scales a row by its own factor. Raises where a bit of the sums is wrong."""
    out = launch(transport, group)
    torch.cuda.synchronize(group.device)
    transport.check()
    x, ids, weights, scale = (tensor.cpu() for tensor in make_inputs(group))
    terms = (x[:, :, None].float() * scale[ids.long()][..., None]).bfloat16()
    expected = combine_terms(terms.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1))
    require_equal(out.flatten(0, 1).cpu(), expected, "dispatch and combine")


def require_equal(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    num_wrong = int((got.view(torch.int16) != expected.view(torch.int16)).sum())
    if num_wrong:
        raise RuntimeError(f"{what}: {num_wrong} of {got.numel()} values are wrong")

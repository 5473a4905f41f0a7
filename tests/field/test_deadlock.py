"""Field cases of kind deadlock: each hung another runtime.

Every wait is bounded: by `timeout_s` of the layer, by the hard limit of `spawn.run`, by the test's.
"""

import dataclasses
import os
import random
import signal
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from field_ranks import (
    S0,
    TIMEOUT_S,
    TOP_1,
    Virtual,
    assert_near,
    backend_of,
    device_of,
    moved,
    on,
    parts_of,
    places,
    weights_of,
)
from layer_cases import make_inputs, with_ids

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEShape, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError, MoEEpError, MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.config import GroupedGemmConfig, NcclEpConfig
from moe_ep.launch import spawn
from moe_ep.reference import moe_oracle_fp64, moe_reference

TWO_PROCESSES = places(("cpu", 2), ("split", 2), ("mega", 2))


@on("cpu4", "split4", "mega4", "split@4", "mega@4")
def test_A01_a_rank_that_receives_no_token_still_takes_part(ranks):
    weights = ranks.weights(TOP_1)
    parts = [with_ids(part, part.topk_ids % 6) for part in ranks.parts(TOP_1, 16)]
    layer = ranks.layer(TOP_1, weights)
    first = layer(parts)
    calls = [layer.bind(parts) for _ in range(200)]
    for call in calls:  # 200 calls with no wait between
        call.launch()
    ranks.assert_right(first, parts, weights, TOP_1)
    for call in calls:
        assert all(map(torch.equal, call.outputs(), first))
    layer.check()


@on("cpu2", "split2", "mega2", "split@2", "mega@2")
def test_A02_ranks_with_nothing_to_do_stay_in_step(ranks):
    steps = torch.randint(4, (500, 2), generator=torch.Generator().manual_seed(0)).tolist()
    counts = (0, 1, 7, 16)
    layer = ranks.layer(S0, ranks.weights())
    bound = {}
    for step in steps:
        if tuple(step) not in bound:
            parts = parts_of(S0, [counts[choice] for choice in step])
            bound[tuple(step)] = parts, layer.bind(parts)
        bound[tuple(step)][1].launch()
    layer.check()
    for parts, call in bound.values():
        ranks.assert_right(call.outputs(), parts, ranks.weights())


@on("cpu2", "split2", "split@2")
def test_A03_two_layers_of_one_group_interleave(ranks):
    layers = [ranks.layer(S0, ranks.weights()), ranks.layer(S0, ranks.weights(seed=1))]
    parts = [parts_of(S0, [1, 1]), parts_of(S0, [2, 2], seed=9)]
    expected = [layer(part) for layer, part in zip(layers, parts, strict=True)]
    ranks.assert_right(expected[0], parts[0], ranks.weights())
    calls = [layer.bind(part) for layer, part in zip(layers, parts, strict=True)]
    order = random.Random(0)
    for _ in range(200):
        which = order.randrange(2)
        calls[which].launch()
        assert all(map(torch.equal, calls[which].outputs(), expected[which]))


NCCL_EP_SHAPE = MoEShape(num_experts=16, top_k=4, hidden=512, intermediate=256)


def over_nccl_ep(rank: int, num_ranks: int, seed: int):
    """A layer; of one rank, which takes no transport, its part over a group of one."""
    weights = weights_of(NCCL_EP_SHAPE, "nvfp4", seed).shard("ep", rank, num_ranks).to("cuda")
    comm, kernel = NcclEpConfig(mode="ll"), GroupedGemmConfig()
    if num_ranks > 1:
        backend = SplitConfig(comm=comm, kernel=kernel)
        return MoEEpLayer(NCCL_EP_SHAPE, weights, max_tokens_per_rank=24, backend=backend)
    from moe_ep.comm.liveness import Liveness
    from moe_ep.comm.torch_transport import TorchTransport
    from moe_ep.grouped import GroupedExperts
    from moe_ep.split_nccl_ep import make_nccl_ep_split

    group, options = EpGroup.default("cuda"), {"layer_id": seed, "timeout_s": TIMEOUT_S}
    liveness = Liveness(group, seed, TIMEOUT_S)
    control = TorchTransport(
        *(group, liveness), hidden=NCCL_EP_SHAPE.hidden, top_k=4, owner_E=None, **options
    )
    experts = GroupedExperts(NCCL_EP_SHAPE, weights, kernel.knobs)
    backend = make_nccl_ep_split(
        *(comm, experts, NCCL_EP_SHAPE, weights, group, 24, control, liveness, TIMEOUT_S)
    )
    return lambda inputs: backend.forward(inputs, 24)


def interleave_over_nccl_ep(rank: int, num_ranks: int) -> None:
    seeds = (1, 2)  # as many tokens
    layers = [over_nccl_ep(rank, num_ranks, seed) for seed in seeds]
    held = [make_inputs(NCCL_EP_SHAPE, seed, seed=10 * seed + rank) for seed in seeds]
    inputs = [moved(part, "cuda") for part in held]
    expected = [layer(part) for layer, part in zip(layers, inputs, strict=True)]
    for seed, part, output in zip(seeds, held, expected, strict=True):
        weights = weights_of(NCCL_EP_SHAPE, "nvfp4", seed)
        assert_near(output.cpu(), moe_oracle_fp64(part, weights, NCCL_EP_SHAPE))
    order = random.Random(0)
    for _ in range(200):
        which = order.randrange(2)
        assert torch.equal(layers[which](inputs[which]), expected[which])


@pytest.mark.parametrize("num_ranks", [
    pytest.param(1, marks=pytest.mark.gpu, id="split1"),
    pytest.param(2, marks=pytest.mark.gpus(2), id="split@2"),
])  # fmt: skip
def test_A03_two_layers_over_nccl_ep_interleave(num_ranks):
    pytest.importorskip("nccl.ep", reason="needs nccl-extensions")
    spawn.run(interleave_over_nccl_ep, num_ranks, device="cuda", timeout_s=280.0)  # nvcc compiles


@contextmanager
def spinning(milliseconds: float):
    """A function that holds one SM for so long, on a stream of its own."""
    side = torch.cuda.Stream()
    cycles = int(milliseconds * 1e-3 * torch.cuda.clock_rate() * 1e6)

    def spin() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)

    yield spin
    side.synchronize()


@on("mega1", "mega4")
def test_A04_a_small_kernel_that_holds_an_sm_delays_the_launch_only(ranks):
    parts = ranks.parts(S0, 16)
    layer = ranks.layer(S0, ranks.weights())
    expected = layer(parts)
    ranks.assert_right(expected, parts, ranks.weights())
    with spinning(5.0) as spin:
        calls = [layer.bind(parts) for _ in range(200)]
        for call in calls:
            spin()
            call.launch()
    layer.check()
    assert all(all(map(torch.equal, call.outputs(), expected)) for call in calls)


@on("mega@2")
def test_A04_all_reduces_on_another_stream_delay_the_launch_only(ranks):
    """NCCL has SMs of its own: else a rank could begin with the one, its peer with the other."""
    parts, weights = parts_of(S0, [16, 16]), ranks.weights()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = backend_of("mega", weights.weights_format).megakernel
    backend = MegaConfig(megakernel=dataclasses.replace(kernel, max_sms=num_sms - 32))
    layer = ranks.layer(S0, weights, backend=backend)
    expected = layer(parts)
    side, megabyte = torch.cuda.Stream(), torch.zeros(2**18, device="cuda")
    calls = [layer.bind(parts) for _ in range(200)]
    for call in calls:
        with torch.cuda.stream(side):
            dist.all_reduce(megabyte)
        call.launch()
    layer.check()
    ranks.assert_right(expected, parts, ranks.weights())
    assert all(all(map(torch.equal, call.outputs(), expected)) for call in calls)


@on("mega1", "mega8")
def test_A05_the_grid_is_what_the_device_can_hold(ranks):
    """One CTA for each SM or fewer, counted by the CTAs that noted their start."""
    from moe_ep.megakernel.mega_moe import MegaMoE
    from moe_ep.megakernel.protocol import Moment

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    group = EpGroup.virtual(8) if ranks.num_ranks > 1 else EpGroup.single("cuda")
    for max_sms, most in ((None, num_sms), (64, 64)):
        mega = MegaMoE(
            *(group, S0, "nvfp4"),
            max_tokens_per_rank=32,
            max_sms=max_sms,
            takes_stamps=True,
            timeout_s=TIMEOUT_S,
        )
        mega.stamps.zero_()
        launch_once(mega, ranks)
        num_ctas = int((mega.stamps[:, Moment.STARTED] > 0).sum())
        assert most - ranks.num_ranks < num_ctas <= most
        mega.destroy()
    if ranks.num_ranks > 1:
        with pytest.raises(MoEEpConfigError, match="max_sms is 7; allowed: at least 8"):
            MegaMoE(group, S0, "nvfp4", max_tokens_per_rank=32, max_sms=7)
    with pytest.raises(
        MoEEpConfigError, match=f"max_sms is 0; allowed: at least {ranks.num_ranks}"
    ):
        MegaMoE(group, S0, "nvfp4", max_tokens_per_rank=32, max_sms=0)


def launch_once(mega, ranks) -> None:
    from moe_ep.megakernel.formats import prepare

    parts = parts_of(S0, [32] * ranks.num_ranks)
    x, ids, weights = (
        torch.stack([getattr(part, name) for part in parts]).cuda()
        for name in ("hidden_states", "topk_ids", "topk_weights")
    )
    options = {}
    if ranks.num_ranks > 1:
        options["num_tokens"] = torch.full((ranks.num_ranks,), 32, dtype=torch.int32).cuda()
    else:
        x, ids, weights = x[0], ids[0], weights[0]
    mega.forward(
        x, ids, weights, prepare(ranks.weights().to("cuda")), torch.empty_like(x), **options
    )
    torch.cuda.synchronize()
    mega.check()


@on("cpu2", "split2", "mega2", "split@2", "mega@2")
def test_A06_odd_token_counts(ranks):
    layer = ranks.layer(S0, ranks.weights())
    for count in (1, 3, 15, 17, 31):
        parts = parts_of(S0, [count, count])
        ranks.assert_right(layer(parts), parts, ranks.weights())
    large = ranks.layer(S0, ranks.weights(), 4096, takes_table=True)
    parts = parts_of(S0, [4095, 4095])
    ranks.assert_right(large(parts), parts, ranks.weights())


@on("cpu2", "split2", "mega2", "split@2", "mega@2")
def test_A07_token_counts_that_differ_by_rank_and_change_by_call(ranks):
    layer = ranks.layer(S0, ranks.weights(), 64)
    for counts in ([5, 37], [37, 5], [64, 1], [1, 64]):
        parts = parts_of(S0, counts, seed=20)
        ranks.assert_right(layer(parts), parts, ranks.weights())


# ---- arguments that fail on one rank -------------------------------------------------------------


# A10: what rank 1 gives, and what the text says. MoEShape itself refuses top_k 0, so that rank
# has nothing to build a layer from, and rank 0 can only name it.
A10_MISTAKES = {
    "hidden": (250, "hidden of the weights is 256, the shape has 250"),
    "num_experts": (9, "num_experts of the weights is 8, the shape has 9"),
    "top_k": (0, "top_k must be at least 1, got 0"),
}


def make_layer(
    kind: str, rank: int, num_ranks: int, shape: MoEShape = S0, timeout_s: float = TIMEOUT_S
) -> MoEEpLayer:
    weights = weights_of(S0, "nvfp4").shard("ep", rank, num_ranks).to(device_of(kind))
    backend = backend_of(kind, "nvfp4")
    return MoEEpLayer(shape, weights, max_tokens_per_rank=32, backend=backend, timeout_s=timeout_s)


def is_right(layer: MoEEpLayer, inputs: MoEInputs) -> bool:
    device = layer.group.device
    output = layer(MoEInputs(*(tensor.to(device) for tensor in vars(inputs).values()))).cpu()
    expected = moe_reference(inputs, weights_of(S0, "nvfp4"), S0)
    if device.type == "cpu":
        return torch.equal(output, expected)
    difference = output.double() - expected.double()
    return bool(difference.norm() < 0.008 * expected.double().norm())


def build_wrongly_on_rank_one(
    rank: int, num_ranks: int, kind: str
) -> dict[str, tuple[Exception, bool]]:
    """The argument check of one rank fails before any collective; then both build a good layer."""
    seen = {}
    inputs = make_inputs(S0, 16, seed=rank)
    for name, (value, _) in A10_MISTAKES.items():
        timeout_s = 1.0 if name == "top_k" else 30.0
        try:
            shape = S0 if rank == 0 else dataclasses.replace(S0, **{name: value})
            make_layer(kind, rank, num_ranks, shape, timeout_s)
        except MoEEpError as error:
            seen[name] = error
        dist.barrier()  # until rank 0 has given up the layer that rank 1 does not build
        seen[name] = seen[name], is_right(make_layer(kind, rank, num_ranks), inputs)
    return seen


@pytest.mark.parametrize(("kind", "num_ranks"), TWO_PROCESSES)
def test_A10_arguments_that_fail_on_one_rank_raise_on_all_and_the_next_layer_works(kind, num_ranks):
    seen = spawn.run(build_wrongly_on_rank_one, num_ranks, kind, device=device_of(kind))
    for name, (_, text) in A10_MISTAKES.items():
        (on_rank_0, next_0_is_right), (on_rank_1, next_1_is_right) = seen[0][name], seen[1][name]
        assert isinstance(on_rank_1, MoEEpConfigError)
        assert str(on_rank_1) == text
        if name == "top_k":
            assert isinstance(on_rank_0, MoEEpTimeoutError)
            assert on_rank_0.ranks == (1,)
        else:
            assert isinstance(on_rank_0, MoEEpConfigError)
            assert str(on_rank_0) == f"rank 1: {text}"
        assert next_0_is_right and next_1_is_right


@on("split1", "mega1")
def test_A10_a_wrong_argument_raises_before_the_gpu_is_touched_and_the_next_layer_works(ranks):
    """What one GPU can show of the row: the text, and that nothing is left behind."""
    for name, (value, text) in A10_MISTAKES.items():
        with pytest.raises(MoEEpConfigError, match=text):
            ranks.module(dataclasses.replace(S0, **{name: value}), ranks.weights())
    parts = parts_of(S0, [16])
    ranks.assert_right(ranks.layer(S0, ranks.weights())(parts), parts, ranks.weights())


# ---- ranks that are lost -------------------------------------------------------------------------


def lose_rank_one(
    rank: int, num_ranks: int, kind: str, sign: int | None
) -> tuple[Exception, float] | None:
    """After 4 calls rank 1 dies, stops, or (no signal) leaves one call out; the others call."""
    # gloo sees a death at once; over NCCL and in the fused kernel it is silence like any other.
    timeout_s = 30.0 if sign == signal.SIGKILL and kind == "cpu" else 3.0
    layer = make_layer(kind, rank, num_ranks, timeout_s=timeout_s)
    inputs = make_inputs(S0, 16, seed=rank)
    pids = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    for _ in range(4):
        assert is_right(layer, inputs)
    if rank == 1 and sign is not None:
        os.kill(os.getpid(), sign)
    if rank == 1:
        time.sleep(30.0)
        return None
    start = time.monotonic()
    try:
        is_right(layer, inputs)
        layer.check()
    except MoEEpTimeoutError as error:
        error.__cause__ = None  # torch's own does not survive pickling
        return error, time.monotonic() - start
    finally:
        if rank == 0 and sign != signal.SIGKILL:
            os.kill(pids[1], signal.SIGKILL)
    return None


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    TWO_PROCESSES + places(("cpu", 4), ("split", 4), ("mega", 4)),
)
def test_A11_a_rank_killed_between_steps_is_named_by_the_others(kind, num_ranks):
    outcomes = spawn.run(
        *(lose_rank_one, num_ranks, kind, signal.SIGKILL),
        expect_killed=(1,),
        device=device_of(kind),
    )
    for rank in set(range(num_ranks)) - {1}:
        error, seconds = outcomes[rank]
        assert error.ranks == (1,)
        assert kind == "mega" or error.step == 4  # it counts its launches, those of warmup too
        assert seconds < 15.0  # of a time-out of 30 on a CPU, of 3 elsewhere


@pytest.mark.parametrize(("kind", "num_ranks"), TWO_PROCESSES)
@pytest.mark.parametrize("sign", [signal.SIGSTOP, None], ids=["stopped", "calls once less"])
def test_A11_a_rank_that_stands_still_or_leaves_a_call_out_is_named(kind, num_ranks, sign):
    outcomes = spawn.run(
        *(lose_rank_one, num_ranks, kind, sign), expect_killed=(1,), device=device_of(kind)
    )
    error, seconds = outcomes[0]
    assert 1 in error.ranks or "rank 1" in str(error)
    assert seconds < 15.0


@on("mega2")
def test_A11_a_virtual_rank_that_never_comes_is_named_and_the_gpu_is_free_at_once(ranks):
    parts = ranks.parts(S0, 16)
    # A capacity of its own: the workspace is broken by this row, and others share theirs.
    layer = ranks.layer(S0, ranks.weights(), 31, timeout_s=0.5)
    for _ in range(3):
        layer(parts)
    start = time.monotonic()
    layer.bind(parts, late_rank=1, late_s=-1.0).launch()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 5.0
    with pytest.raises(MoEEpTimeoutError, match="for rank 1") as error:
        layer.check()
    assert error.value.ranks == (1,)
    layer.destroy()
    again = ranks.layer(S0, ranks.weights(), 31)
    ranks.assert_right(again(parts), parts, ranks.weights())


A12_SHAPE = MoEShape(num_experts=64, top_k=10, hidden=1024, intermediate=256)


@on("split4", "mega4", "split@4", "mega@4")
def test_A12_a_thousand_calls_back_to_back_with_changing_ids(ranks):
    weights = ranks.weights(A12_SHAPE)
    layer = ranks.layer(A12_SHAPE, weights, 16)
    parts = [parts_of(A12_SHAPE, [16] * 4, seed=10 * i) for i in range(10)]
    calls = [layer.bind(part) for part in parts]
    for step in range(1000):
        calls[step % 10].launch()
    layer.check()
    for idx in (0, 9):
        ranks.assert_right(calls[idx].outputs(), parts[idx], weights, A12_SHAPE)


@on("cpu2", "split2", "mega2", "split@2", "mega@2")
def test_A61_no_rank_sees_what_was_sent_a_call_before(ranks):
    """Rank 1 comes late to every call, and inputs change with each."""
    layer = ranks.layer(S0, ranks.weights())
    for step in range(50):
        parts = parts_of(S0, [16, 16], seed=100 + 2 * step)
        late_s = 2.0 if step == 49 else 0.01
        options = {}
        if isinstance(ranks, Virtual):
            options = {"late_rank": 1, "late_s": late_s}
        elif getattr(ranks, "rank", 0) == 1:
            time.sleep(late_s)
        call = layer.bind(parts, **options)
        call.launch()
        outputs = call.outputs()
        if step % 10 == 9:
            ranks.assert_right(outputs, parts, ranks.weights())
        else:
            expected = torch.cat(
                [moe_reference(part, ranks.weights(), S0) for part in parts]
            ).double()
            assert (torch.cat(outputs).double() - expected).norm() < 0.008 * expected.norm()
    layer.check()

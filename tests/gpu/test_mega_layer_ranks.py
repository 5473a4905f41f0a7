"""The layer over the mega kernel on two GPUs: the bits of one rank, and a whole life in step.

Two H200: pytest tests/gpu/test_mega_layer_ranks.py. One job of two ranks does everything that ends
well, and each test asks what it found; a rank is lost in a job of its own. Some 40 kernels are
compiled on the way.
"""

import functools
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import gathered, make_inputs, make_weights
from rank_checks import run_checks

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError, MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaKernelConfig
from moe_ep.launch import spawn
from moe_ep.launch.compile import mega_builds
from moe_ep.megakernel.compile_cache import compile_all
from moe_ep.megakernel.problem import WEIGHT_FORMATS

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(500)]

SHAPE = MoEShape(num_experts=13, top_k=4, hidden=512, intermediate=256)
FEW = 24  # tokens of one build
CAPACITY = 60  # two builds
UNEVEN = [(0, CAPACITY), (CAPACITY, 0), (0, 0), (1, 0), (13, 57), (CAPACITY, CAPACITY)]


@functools.cache
def weights_of(name: str = "nvfp4", seed: int = 0) -> MoEWeights:
    """All experts, on this rank's GPU."""
    return make_weights(SHAPE, "bf16", seed).to(torch.cuda.current_device()).quantize(name)


def make_layer(name: str = "nvfp4", seed: int = 0, **options) -> MoEEpLayer:
    """Of both ranks. Collective."""
    options = {
        "max_tokens_per_rank": CAPACITY,
        "backend": MegaConfig(),
        "timeout_s": 20.0,
    } | options
    weights = weights_of(name, seed).shard("ep", dist.get_rank(), 2)
    return MoEEpLayer(SHAPE, weights, **options)


@functools.cache
def alone(name: str = "nvfp4", seed: int = 0, capacity: int = CAPACITY) -> MoEEpLayer:
    """The same layer as one rank, on this rank's own GPU."""
    return MoEEpLayer(
        SHAPE,
        weights_of(name, seed),
        max_tokens_per_rank=2 * capacity,
        backend=MegaConfig(),
        group=EpGroup.single(torch.device("cuda", torch.cuda.current_device())),
    )


def tokens(counts: tuple[int, int], seed: int, masked: float = 0.1) -> tuple[MoEInputs, slice]:
    """The tokens of both ranks, and which of them are this rank's."""
    parts = [make_inputs(SHAPE, n, 10 * seed + rank, masked) for rank, n in enumerate(counts)]
    whole = MoEInputs(*(tensor.cuda() for tensor in vars(gathered(parts)).values()))
    first = sum(counts[: dist.get_rank()])
    return whole, slice(first, first + counts[dist.get_rank()])


def part_of(inputs: MoEInputs, part: slice) -> MoEInputs:
    return MoEInputs(*(tensor[part].contiguous() for tensor in vars(inputs).values()))


def assert_bits(layer: MoEEpLayer, one: MoEEpLayer, counts: tuple[int, int], seed: int, **options):
    whole, own = tokens(counts, seed)
    out = layer.forward(part_of(whole, own), **options)
    assert torch.equal(out, one.forward(whole)[own]), f"{counts}, {options}"


# ---- what the job does; each of these runs on both ranks at the same time


def format_has_the_bits_of_one_rank(name: str) -> None:
    layer = make_layer(name, max_tokens_per_rank=FEW)
    for seed, counts in enumerate([(FEW, FEW), (0, FEW), (5, 1)]):
        assert_bits(layer, alone(name, capacity=FEW), counts, seed)
    layer.check()
    layer.destroy()


def any_number_of_tokens_and_any_bound_has_the_bits_of_one_rank() -> None:
    layer = make_layer()
    for seed, counts in enumerate(UNEVEN):
        assert_bits(layer, alone(), counts, seed)
        assert_bits(layer, alone(), counts, seed, max_tokens=max(counts))
    layer.check()
    layer.destroy()


def ranks_may_launch_different_builds() -> None:
    layer, rank = make_layer(), dist.get_rank()
    for seed, few_rank in enumerate((0, 1, 0), start=20):
        bound = FEW if rank == few_rank else None
        assert_bits(layer, alone(), (FEW, FEW - 1), seed, max_tokens=bound)
    layer.check()
    layer.destroy()


def tuned_builds_are_the_same_on_all_ranks_and_have_the_bits_of_one() -> None:
    knobs = MegaConfig(megakernel=MegaKernelConfig(knobs="auto"))
    layer = make_layer(backend=knobs, max_tokens_per_rank=FEW)
    layer.warmup()
    buckets = layer._backend._mega.buckets
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, buckets)
    assert of_ranks == [buckets, buckets]
    assert_bits(layer, alone(capacity=FEW), (FEW, 3), 30)
    later = make_layer(backend=knobs, max_tokens_per_rank=FEW)
    assert later._backend._mega.buckets == buckets
    for each in (layer, later):
        each.destroy()


def auto_takes_it() -> None:
    layer = make_layer(backend="auto")
    assert isinstance(layer.backend, MegaConfig), layer.explain()
    assert_bits(layer, alone(), (3, 4), 9)
    layer.destroy()


def a_refused_input_is_raised_by_all_and_the_next_call_works() -> None:
    layer, rank = make_layer(), dist.get_rank()
    layer.warmup()
    whole, own = tokens((20, 30), 1)
    for by_check in (True, False):
        inputs = part_of(whole, own)
        if rank == 1:
            bad = MoEInputs(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights.double())
            with pytest.raises(MoEEpConfigError, match="rank 1: topk_weights has dtype"):
                layer.forward(bad)
        else:
            layer.forward(inputs)
            torch.cuda.synchronize()
            with pytest.raises(MoEEpConfigError, match="rank 1 refused its topk_weights"):
                if by_check:
                    layer.check()
                else:
                    layer.forward(inputs)
        if rank == 1 and not by_check:
            assert torch.equal(layer.forward(inputs), alone().forward(whole)[own])
        assert_bits(layer, alone(), (20, 30), 2)
        layer.check()
    layer.destroy()


def a_bad_id_is_masked_and_raised_where_it_was_given() -> None:
    layer, rank = make_layer(), dist.get_rank()
    whole, own = tokens((20, 30), 3)
    inputs = part_of(whole, own)
    ids = inputs.topk_ids.clone()
    if rank == 1:
        ids[4, 2] = SHAPE.num_experts
    layer.forward(MoEInputs(inputs.hidden_states, ids, inputs.topk_weights))
    torch.cuda.synchronize()
    if rank == 1:  # by the next call, after its own step
        with pytest.raises(MoEEpConfigError, match=r"topk_ids\[4, 2\] was 13"):
            layer.forward(inputs)
    else:
        layer.forward(inputs)
    assert_bits(layer, alone(), (20, 30), 4)
    layer.check()
    layer.destroy()


def a_graph_follows_other_routing_and_new_weights() -> None:
    layer = make_layer()
    layer.warmup()
    whole, own = tokens((40, 50), 5)
    static = part_of(whole, own)
    out = torch.empty_like(static.hidden_states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(static, out=out)
    for seed in range(6, 12):
        whole, own = tokens((40, 50), seed, masked=0.1 * (seed - 6))
        if seed == 10:
            layer.update_weights(weights_of(seed=1).shard("ep", dist.get_rank(), 2))
        for name, tensor in vars(static).items():
            tensor.copy_(getattr(whole, name)[own])
        out.fill_(float("nan"))
        graph.replay()
        expected = alone(seed=1 if seed >= 10 else 0).forward(whole)[own]
        assert torch.equal(out, expected), seed
    layer.check()
    layer.destroy()


def layers_share_a_workspace_on_other_streams_and_end_in_any_order() -> None:
    first, second, small = make_layer(), make_layer(seed=1), make_layer(max_tokens_per_rank=FEW)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for layer in (first, second, small):
        layer.warmup()
    whole, own = tokens((FEW, FEW), 12)
    expected = [alone(seed=seed).forward(whole)[own] for seed in (0, 1)]
    torch.cuda.synchronize()
    outs = []
    for call in range(30):
        layer = (first, second, small)[call % 3]
        with torch.cuda.stream(streams[call % 2]):
            outs.append(layer.forward(part_of(whole, own)))
    torch.cuda.synchronize()
    for call, out in enumerate(outs):
        assert torch.equal(out, expected[1 if call % 3 == 1 else 0]), call
    order = [first, small, second]
    for layer in order if dist.get_rank() else reversed(order):
        layer.destroy()
        layer.destroy()
    later = make_layer(max_tokens_per_rank=CAPACITY + 1)
    assert_bits(later, alone(), (CAPACITY, 1), 13)
    later.destroy()


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{name} has the bits of one rank": functools.partial(format_has_the_bits_of_one_rank, name)
        for name in WEIGHT_FORMATS
    },
    **{
        check.__name__.replace("_", " "): check
        for check in (
            any_number_of_tokens_and_any_bound_has_the_bits_of_one_rank,
            ranks_may_launch_different_builds,
            tuned_builds_are_the_same_on_all_ranks_and_have_the_bits_of_one,
            auto_takes_it,
            a_refused_input_is_raised_by_all_and_the_next_call_works,
            a_bad_id_is_masked_and_raised_where_it_was_given,
            a_graph_follows_other_routing_and_new_weights,
            layers_share_a_workspace_on_other_streams_and_end_in_any_order,
        )
    },
}


def do_everything(rank: int, num_ranks: int) -> dict[str, str]:
    return run_checks(rank, CHECKS)


def fill_cache() -> None:
    """All kernels of the job at once, on every core."""
    builds = []
    for num_ranks, name, capacity in (
        *((1, name, 2 * FEW) for name in WEIGHT_FORMATS),
        *((2, name, FEW) for name in WEIGHT_FORMATS),
        *((1, "nvfp4", 2 * CAPACITY), (2, "nvfp4", CAPACITY), (2, "nvfp4", CAPACITY + 1)),
    ):
        builds += mega_builds(SHAPE, name, max_tokens_per_rank=capacity, num_ranks=num_ranks)
    compile_all(builds)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    fill_cache()
    return spawn.run(do_everything, 2, timeout_s=400.0, device="cuda")


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_gpus(found, check):
    assert [part[check] for part in found] == ["", ""]


# ---- a rank that is lost


def lose_a_rank(rank: int, num_ranks: int, is_killed: bool) -> tuple[str, tuple[int, ...], float]:
    """What the surviving rank is told, and after how many seconds."""
    layer = make_layer(max_tokens_per_rank=FEW, timeout_s=3.0)
    layer.warmup()
    assert_bits(layer, alone(capacity=FEW), (FEW, FEW), 1)
    dist.barrier()
    if rank == 1:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12.0)
        return "", (), 0.0
    whole, own = tokens((FEW, FEW), 2)
    start = time.monotonic()
    layer.forward(part_of(whole, own))
    with pytest.raises(MoEEpTimeoutError, match="phase routed") as error:
        layer.check()
    seconds = time.monotonic() - start
    with pytest.raises(MoEEpStateError, match="only destroy"):
        layer.forward(part_of(whole, own))
    layer.destroy()
    # The GPU is usable at once.
    assert torch.equal(alone(capacity=FEW).forward(whole), alone(capacity=FEW).forward(whole))
    return error.value.phase, error.value.ranks, seconds


@pytest.mark.parametrize("is_killed", [False, True], ids=["it does not call", "SIGKILL"])
def test_a_lost_rank_is_named_within_the_time_out(is_killed):
    killed = [1] if is_killed else []
    results = spawn.run(
        lose_a_rank, 2, is_killed, timeout_s=120.0, device="cuda", expect_killed=killed
    )
    phase, ranks, seconds = results[0]
    assert (phase, ranks) == ("routed", (1,))
    assert seconds < 3.0 + 2.0 + 2.0

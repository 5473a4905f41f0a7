"""Dispatch, scale by expert and combine over two real ranks, a GPU each, through NVSHMEM: the cases
of `test_mega_transport.py`, which has the oracle, and what only real ranks have.

Two H200: pytest tests/gpu/test_mega_transport_ranks.py. One job of two ranks does everything that
ends well, and each test asks what it found; a rank that never comes has a job of its own.
"""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from rank_checks import run_checks
from test_mega_transport import (
    CAPACITY,
    CASES,
    Stage,
    random_ids,
    replay_every_case,
    run_500_calls,
    run_10000_calls,
)

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.symmetric import SIZE_VARIABLE, finish_nvshmem, heap_of
from moe_ep.launch import spawn
from moe_ep.megakernel.ping_pong import PingPong

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(300)]

NUM_REBUILDS, NUM_LAYERS = 8, 8


def group_of_job() -> EpGroup:
    return EpGroup.default("cuda")


def make_stage(**options) -> Stage:
    group = group_of_job()
    return Stage(group.num_ranks, group=group, **options)


# ---- what the job does; each of these runs on both ranks at the same time


def every_case_has_the_right_bits() -> None:
    stage = make_stage()
    for case in CASES.values():
        stage.run(*case(stage))
    stage.transport.destroy()


def other_geometries_have_the_right_bits() -> None:
    for options in (
        dict(hidden=7168, top_k=8, num_experts=256, capacity=128),
        dict(hidden=2880, top_k=22, num_experts=65),
        dict(ids_dtype=torch.int64),
        dict(is_bounded=False),
        dict(ctas_per_rank=1),
    ):
        stage = make_stage(**options)
        for seed, counts in enumerate([(stage.capacity, 11), (0, 1), (3, stage.capacity)]):
            stage.run(random_ids(stage, seed), list(counts))
        stage.transport.destroy()


def many_calls_back_to_back_change_tokens_and_routing() -> None:
    stage = make_stage()
    run_500_calls(stage)
    stage.transport.destroy()


def ten_thousand_calls_repeat_their_bits_in_flat_memory() -> None:
    stage = make_stage()
    run_10000_calls(stage)
    stage.transport.destroy()


def a_graph_follows_other_routing() -> None:
    stage = make_stage()
    replay_every_case(stage)
    stage.transport.destroy()


def a_late_rank_and_a_busy_stream_change_no_bits() -> None:
    stage = make_stage()
    busy = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for late_rank in (-1, 0, 1):
        with torch.cuda.stream(busy):
            for _ in range(20):
                a = (a @ a) * 1e-3
        stage.run(*CASES["odd_and_uneven"](stage), late_rank=late_rank, late_s=2e-3)
    stage.transport.destroy()


def a_refusing_rank_is_named_to_all_and_the_next_call_works() -> None:
    stage = make_stage()
    ids, counts = CASES["full"](stage)
    stage.set_routing(ids, [5, -3])
    out = stage.launch()
    torch.cuda.synchronize()
    assert out.isnan().all()
    if dist.get_rank() == 0:  # the rank that refuses is not told of it once more
        with pytest.raises(MoEEpConfigError, match=r"rank 1 refused"):
            stage.transport.check()
    stage.transport.check()
    stage.run(ids, counts)
    stage.transport.destroy()


def built_and_destroyed_again_and_again_it_takes_no_more_memory() -> None:
    num_regions = []
    for number in range(NUM_REBUILDS):
        stage = make_stage()
        stage.run(random_ids(stage, number), [CAPACITY, 3])
        stage.transport.destroy()
        num_regions.append(len(heap_of(group_of_job())._regions))
        if number == 0:
            free = torch.cuda.mem_get_info()[0]
    torch.cuda.empty_cache()
    assert len(set(num_regions)) == 1
    assert torch.cuda.mem_get_info()[0] >= free - 2**24


def layers_of_one_geometry_cost_one_workspace() -> None:
    stages = [make_stage() for _ in range(NUM_LAYERS)]
    heap = heap_of(group_of_job())
    assert len({id(stage.transport.memory) for stage in stages}) == 1
    assert len(heap._buffers) == 1
    for seed, stage in enumerate(stages):
        stage.run(random_ids(stage, seed), [CAPACITY, 3])
    for stage in stages:
        stage.transport.destroy()
    assert not heap._buffers


def a_flag_goes_to_and_fro() -> None:
    ping_pong = PingPong(group_of_job())
    for num_rounds in (1, 500, 500):
        assert 0.1 < ping_pong.round_trip_us(num_rounds) < 1000
    ping_pong.destroy()


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__.replace("_", " "): check
    for check in (
        every_case_has_the_right_bits,
        other_geometries_have_the_right_bits,
        many_calls_back_to_back_change_tokens_and_routing,
        ten_thousand_calls_repeat_their_bits_in_flat_memory,
        a_graph_follows_other_routing,
        a_late_rank_and_a_busy_stream_change_no_bits,
        a_refusing_rank_is_named_to_all_and_the_next_call_works,
        built_and_destroyed_again_and_again_it_takes_no_more_memory,
        layers_of_one_geometry_cost_one_workspace,
        a_flag_goes_to_and_fro,
    )
}


def do_everything(rank: int, num_ranks: int) -> dict[str, str]:
    found = run_checks(rank, CHECKS)
    finish_nvshmem()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return spawn.run(do_everything, 2, timeout_s=280.0, device="cuda")


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_gpus(found, check):
    assert [part[check] for part in found] == ["", ""]


# ---- jobs of their own


def miss_a_rank(rank: int, num_ranks: int) -> tuple[tuple[int, ...], str, float]:
    """What the rank that came is told, and after how many seconds."""
    stage = make_stage(timeout_s=1.0)
    call = CASES["full"](stage)
    stage.run(*call)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(4.0)
        return (), "", 0.0
    stage.set_routing(*call)
    start = time.monotonic()
    stage.launch()
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    with pytest.raises(MoEEpTimeoutError) as error:
        stage.transport.check()
    # The GPU is usable at once.
    alone = Stage(1)
    alone.run(*CASES["full"](alone))
    return error.value.ranks, error.value.phase, seconds


def test_a_rank_that_never_comes_is_named_within_the_time_out():
    ranks, phase, seconds = spawn.run(miss_a_rank, 2, timeout_s=120.0, device="cuda")[0]
    assert (ranks, phase) == ((1,), "routed")
    assert 1.0 <= seconds < 2.0


def ask_for_more_than_there_is(rank: int, num_ranks: int) -> str:
    os.environ[SIZE_VARIABLE] = "1M"
    with pytest.raises(MoEEpConfigError) as error:
        make_stage(capacity=4096)
    return str(error.value)


def test_a_heap_that_is_too_small_is_named_with_the_size_needed():
    for message in spawn.run(ask_for_more_than_there_is, 2, timeout_s=120.0, device="cuda"):
        assert f"{SIZE_VARIABLE} is 1048576; set it to at least" in message

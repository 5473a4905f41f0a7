"""Field cases of kind deadlock, and their neighbours, on the CPU over gloo.

Each is a situation that hung another runtime. Every wait here is bounded: by `timeout_s` of the
layer and by the hard limit of `spawn.run`.
"""

import dataclasses
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from layer_cases import make_inputs, make_weights, with_ids

from moe_ep import MoEEpLayer, MoEInputs, MoEShape
from moe_ep.comm.errors import MoEEpConfigError, MoEEpError, MoEEpTimeoutError
from moe_ep.launch import spawn
from moe_ep.reference import moe_reference

# The base case of the list.
SHAPE = MoEShape(num_experts=8, top_k=2, hidden=256, intermediate=128)
TOP_1 = MoEShape(num_experts=8, top_k=1, hidden=256, intermediate=128)


def make_layer(
    rank: int,
    num_ranks: int,
    shape: MoEShape = SHAPE,
    *,
    capacity: int = 32,
    timeout_s: float = 60.0,
    weights_shape: MoEShape | None = None,
) -> MoEEpLayer:
    weights = make_weights(weights_shape or shape).shard("ep", rank, num_ranks)
    return MoEEpLayer(shape, weights, max_tokens_per_rank=capacity, timeout_s=timeout_s)


def is_right(output: torch.Tensor, inputs: MoEInputs, shape: MoEShape = SHAPE) -> bool:
    return torch.equal(output, moe_reference(inputs, make_weights(shape), shape))


def on_four_ranks(rank: int, num_ranks: int) -> dict[str, bool]:
    seen = {}
    # A01: rank 3's experts get nothing, rank 3 still sends; 200 calls back to back.
    inputs = make_inputs(TOP_1, 16, seed=rank)
    inputs = with_ids(inputs, inputs.topk_ids % 6)
    layer = make_layer(rank, num_ranks, TOP_1)
    outputs = [layer(inputs) for _ in range(200)]
    seen["a01"] = is_right(outputs[0], inputs, TOP_1) and all(
        torch.equal(output, outputs[0]) for output in outputs
    )
    # A26: every token of every full rank to the last expert.
    inputs = with_ids(make_inputs(TOP_1, 32, seed=rank), TOP_1.num_experts - 1)
    seen["a26"] = is_right(layer(inputs), inputs, TOP_1)
    return seen


def on_two_ranks(rank: int, num_ranks: int) -> dict[str, bool | list[int]]:
    seen = {}
    # A02: one seed gives every rank its T in {0, 1, 7, 16}; every rank calls each of 500 times.
    generator = torch.Generator().manual_seed(0)
    tokens_per_step = torch.tensor([0, 1, 7, 16])[
        torch.randint(4, (500, num_ranks), generator=generator)
    ]
    by_count = {count: make_inputs(SHAPE, count, seed=10 * rank + count) for count in (0, 1, 7, 16)}
    layer = make_layer(rank, num_ranks)
    last = {}
    for tokens in tokens_per_step.tolist():
        last[tokens[rank]] = layer(by_count[tokens[rank]])
    seen["a02"] = all(is_right(output, by_count[count]) for count, output in last.items())
    seen["a02 steps"] = layer._backend._transport._step

    # A06: odd and unequal counts, and one less than a large capacity.
    large = make_layer(rank, num_ranks, capacity=4096)
    counts = [1, 3, 15, 17, 31, 4095]
    pairs = [make_inputs(SHAPE, count, seed=rank) for count in counts]
    seen["a06"] = all(is_right(large(inputs), inputs) for inputs in pairs)

    # A07: counts that differ between ranks and change by call, up to the capacity.
    layer = make_layer(rank, num_ranks, capacity=64)
    steps = [(5, 37), (37, 5), (64, 1), (1, 64)]
    pairs = [make_inputs(SHAPE, counts[rank], seed=20 + rank) for counts in steps]
    seen["a07"] = all(is_right(layer(inputs), inputs) for inputs in pairs)

    # A26 on two ranks.
    layer = make_layer(rank, num_ranks, TOP_1)
    inputs = with_ids(make_inputs(TOP_1, 32, seed=rank), TOP_1.num_experts - 1)
    seen["a26"] = is_right(layer(inputs), inputs, TOP_1)
    return seen


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return spawn.run(on_two_ranks, 2)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict]:
    return spawn.run(on_four_ranks, 4)


def test_a01_a_rank_that_receives_no_token_still_takes_part(four_ranks):
    assert all(rank["a01"] for rank in four_ranks)


def test_a02_ranks_with_nothing_to_do_stay_in_step(two_ranks):
    assert [rank["a02 steps"] for rank in two_ranks] == [499, 499]
    assert all(rank["a02"] for rank in two_ranks)


def test_a06_odd_token_counts(two_ranks):
    assert all(rank["a06"] for rank in two_ranks)


def test_a07_token_counts_that_differ_by_rank_and_change_by_call(two_ranks):
    assert all(rank["a07"] for rank in two_ranks)


def test_a26_all_tokens_of_all_ranks_to_the_last_expert(two_ranks, four_ranks):
    assert all(rank["a26"] for rank in two_ranks + four_ranks)


# A10: what rank 1 gives, and what the text says. MoEShape itself refuses top_k 0, so that rank
# has nothing to build a layer from, and rank 0 can only name it.
A10_MISTAKES = {
    "hidden": (250, "hidden of the weights is 256, the shape has 250"),
    "num_experts": (9, "num_experts of the weights is 8, the shape has 9"),
    "top_k": (0, "top_k must be at least 1, got 0"),
}


def build_wrongly_on_rank_one(rank: int, num_ranks: int) -> dict[str, tuple[Exception, bool]]:
    """The argument check of one rank fails before any collective; then both build a good layer."""
    seen = {}
    inputs = make_inputs(SHAPE, 16, seed=rank)
    for name, (value, _) in A10_MISTAKES.items():
        timeout_s = 1.0 if name == "top_k" else 30.0
        try:
            shape = SHAPE if rank == 0 else dataclasses.replace(SHAPE, **{name: value})
            make_layer(rank, num_ranks, shape, timeout_s=timeout_s, weights_shape=SHAPE)
        except MoEEpError as error:
            seen[name] = error
        dist.barrier()  # until rank 0 has given up the layer that rank 1 does not build
        seen[name] = seen[name], is_right(make_layer(rank, num_ranks)(inputs), inputs)
    return seen


@pytest.fixture(scope="module")
def a10() -> list[dict]:
    return spawn.run(build_wrongly_on_rank_one, 2)


@pytest.mark.parametrize("name", A10_MISTAKES)
def test_a10_arguments_that_fail_on_one_rank_raise_on_all_and_the_next_layer_works(a10, name):
    (on_rank_0, next_0_is_right), (on_rank_1, next_1_is_right) = a10[0][name], a10[1][name]
    text = A10_MISTAKES[name][1]
    assert isinstance(on_rank_1, MoEEpConfigError)
    assert str(on_rank_1) == text
    if name == "top_k":
        assert isinstance(on_rank_0, MoEEpTimeoutError)
        assert on_rank_0.ranks == (1,)
    else:
        assert isinstance(on_rank_0, MoEEpConfigError)
        assert str(on_rank_0) == f"rank 1: {text}"
    assert next_0_is_right and next_1_is_right


def die_between_steps(rank: int, num_ranks: int) -> tuple[Exception, float] | None:
    layer = make_layer(rank, num_ranks, timeout_s=30.0)
    inputs = make_inputs(SHAPE, 16, seed=rank)
    for _ in range(4):
        layer(inputs)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        layer(inputs)
    except MoEEpTimeoutError as error:
        error.__cause__ = None  # torch's own does not survive pickling
        return error, time.monotonic() - start
    return None


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a11_a_rank_killed_between_steps_is_named_by_the_others(num_ranks):
    outcomes = spawn.run(die_between_steps, num_ranks, expect_killed=(1,))
    for rank in set(range(num_ranks)) - {1}:
        error, seconds = outcomes[rank]
        assert error.ranks == (1,)
        assert error.step == 4
        assert seconds < 30.0  # a death is seen at once, not at the time-out

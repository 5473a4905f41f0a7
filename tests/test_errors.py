"""What a caller gets wrong, and ranks that go missing: every rank raises, named, in time."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, SplitConfig
from moe_ep.comm.errors import (
    MoEEpConfigError,
    MoEEpError,
    MoEEpStateError,
    MoEEpTimeoutError,
    MoEEpTransportError,
    MoEEpUnavailableError,
)
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.config import NcclEpConfig
from moe_ep.launch import spawn
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=4, top_k=2, hidden=64, intermediate=32)
CAPACITY = 16


def make_layer(rank: int, num_ranks: int, **changes: object) -> MoEEpLayer:
    arguments = {
        "shape": SHAPE,
        "weights": make_weights(SHAPE).shard("ep", rank, num_ranks),
        "max_tokens_per_rank": CAPACITY,
    } | changes
    return MoEEpLayer(**arguments)


def good_inputs(num_tokens: int = 8) -> MoEInputs:
    return make_inputs(SHAPE, num_tokens, seed=3)


def changed(**tensors: torch.Tensor) -> MoEInputs:
    return MoEInputs(**vars(good_inputs()) | tensors)


def id_4_in_token_3() -> torch.Tensor:
    ids = good_inputs().topk_ids.clone()
    ids[3, 1] = 4
    return ids


good = good_inputs()
# Name -> (arguments of forward, what the message says of argument, value and allowed values).
BAD_CALLS: dict[str, tuple[Callable[[], dict], str]] = {
    "not MoEInputs": (lambda: {"inputs": "x"}, "inputs must be MoEInputs, got str"),
    "tensors in place of MoEInputs": (
        lambda: {
            "inputs": good.hidden_states,
            "out": good.topk_ids,
            "max_tokens": good.topk_weights,
        },
        "inputs must be MoEInputs, got Tensor",
    ),
    "x dtype": (
        lambda: {"inputs": changed(hidden_states=good.hidden_states.float())},
        "hidden_states has dtype torch.float32; allowed: torch.bfloat16",
    ),
    "x width": (
        lambda: {"inputs": changed(hidden_states=good.hidden_states[:, :63])},
        r"hidden_states has shape \[8, 63\]; allowed: \[any, 64\]",
    ),
    "x dimensions": (
        lambda: {"inputs": changed(hidden_states=good.hidden_states[0])},
        r"hidden_states has shape \[64\]; allowed: \[any, 64\]",
    ),
    "x device": (
        lambda: {"inputs": changed(hidden_states=good.hidden_states.to("meta"))},
        "hidden_states is on meta; allowed: cpu",
    ),
    "x layout": (
        lambda: {"inputs": changed(hidden_states=good.hidden_states.to_sparse())},
        "hidden_states has layout torch.sparse_coo; allowed: torch.strided",
    ),
    "weights require grad": (
        lambda: {"inputs": changed(topk_weights=good.topk_weights.clone().requires_grad_())},
        "topk_weights requires grad",
    ),
    "x requires grad": (
        lambda: {"inputs": changed(hidden_states=good.hidden_states.clone().requires_grad_())},
        "hidden_states requires grad",
    ),
    **{
        f"ids {dtype}": (
            lambda dtype=dtype: {"inputs": changed(topk_ids=good.topk_ids.to(dtype))},
            f"topk_ids has dtype {dtype}; allowed: torch.int32 or torch.int64",
        )
        for dtype in (torch.int16, torch.uint8, torch.float32)
    },
    "ids shape": (
        lambda: {"inputs": changed(topk_ids=good.topk_ids[:, :1])},
        r"topk_ids has shape \[8, 1\]; allowed: \[8, 2\]",
    ),
    "id too large": (
        lambda: {"inputs": changed(topk_ids=id_4_in_token_3())},
        "topk_ids holds 4; allowed: 0 to 3, negative for a masked slot",
    ),
    **{
        f"weights {dtype}": (
            lambda dtype=dtype: {"inputs": changed(topk_weights=good.topk_weights.to(dtype))},
            f"topk_weights has dtype {dtype}; allowed: torch.float32",
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    },
    "weights tokens": (
        lambda: {"inputs": changed(topk_weights=good.topk_weights[:7])},
        r"topk_weights has shape \[7, 2\]; allowed: \[8, 2\]",
    ),
    "above capacity": (
        lambda: {"inputs": good_inputs(CAPACITY + 1)},
        "hidden_states has 17 tokens; allowed: at most 16",
    ),
    "above max_tokens": (
        lambda: {"inputs": good_inputs(8), "max_tokens": 7},
        "hidden_states has 8 tokens; allowed: at most 7",
    ),
    "max_tokens above capacity": (
        lambda: {"inputs": good_inputs(8), "max_tokens": 17},
        "max_tokens is 17; allowed: 0 to max_tokens_per_rank 16",
    ),
    "max_tokens not an int": (
        lambda: {"inputs": good_inputs(8), "max_tokens": 8.0},
        "max_tokens must be an int, got 8.0",
    ),
    "max_tokens differs": (
        lambda: {"inputs": good_inputs(8), "max_tokens": 9},
        "max_tokens is 9, rank 0 gave 16; allowed: the same on all ranks",
    ),
    "out dtype": (
        lambda: {"inputs": good_inputs(8), "out": torch.empty(8, 64)},
        "out has dtype torch.float32; allowed: torch.bfloat16",
    ),
    "out shape": (
        lambda: {"inputs": good_inputs(8), "out": torch.empty(9, 64, dtype=torch.bfloat16)},
        r"out has shape \[9, 64\]; allowed: \[8, 64\]",
    ),
    "out overlaps itself": (
        lambda: {"inputs": good_inputs(8), "out": torch.empty(64).bfloat16().expand(8, 64)},
        r"out has strides \(0, 1\)",
    ),
}


def other_shape(**changes: object) -> dict:
    """Arguments of a layer whose shape and weights agree with each other, not with rank 0."""
    fields = {"num_experts": 4, "top_k": 2, "hidden": 64, "intermediate": 32} | changes
    shape = MoEShape(**fields)
    return {"shape": shape, "weights": make_weights(shape).shard("ep", 1, 2)}


# Name -> (what rank 1 changes, error, what its message says).
BAD_LAYERS: dict[str, tuple[Callable[[], dict], type[Exception], str]] = {
    "capacity": (
        lambda: {"max_tokens_per_rank": 64},
        MoEEpConfigError,
        "rank 1: max_tokens_per_rank is 64, rank 0 has 16",
    ),
    **{
        name: (
            lambda name=name, value=value: other_shape(**{name: value}),
            MoEEpConfigError,
            f"rank 1: {name} is ",
        )
        for name, value in {
            "num_experts": 5,
            "top_k": 1,
            "hidden": 32,
            "intermediate": 64,
            "activation": "geglu_tanh",
        }.items()
    },
    "weights format": (
        lambda: {"weights": make_weights(SHAPE, "mxfp8").shard("ep", 1, 2)},
        MoEEpConfigError,
        "rank 1: weights_format is mxfp8, rank 0 has bf16",
    ),
    "parallel": (
        lambda: {"weights": make_weights(SHAPE).shard("tp", 1, 2)},
        MoEEpConfigError,
        "rank 1: parallel is tp, rank 0 has ep",
    ),
    "weights of another rank": (
        lambda: {"weights": make_weights(SHAPE).shard("ep", 0, 2)},
        MoEEpConfigError,
        "weights are those of rank 0 of 2, the group has rank 1 of 2",
    ),
    "weights of all ranks": (
        lambda: {"weights": make_weights(SHAPE)},
        MoEEpConfigError,
        "weights are those of rank 0 of 1, the group has rank 1 of 2",
    ),
    "shape against weights": (
        lambda: {"shape": MoEShape(num_experts=9, top_k=2, hidden=64, intermediate=32)},
        MoEEpConfigError,
        "num_experts of the weights is 4, the shape has 9",
    ),
    "no shape": (lambda: {"shape": None}, MoEEpConfigError, "shape must be a MoEShape, got None"),
    "no weights": (lambda: {"weights": None}, MoEEpConfigError, "weights must be MoEWeights"),
    "capacity 0": (
        lambda: {"max_tokens_per_rank": 0},
        MoEEpConfigError,
        "max_tokens_per_rank must be from 1 to 2147483647, got 0",
    ),
    "backend not known": (
        lambda: {"backend": "fastest"},
        MoEEpConfigError,
        "backend must be 'auto', .* got 'fastest'",
    ),
    "backend not there": (
        lambda: {"backend": SplitConfig(comm=NcclEpConfig())},
        MoEEpUnavailableError,
        "NCCL-EP needs NVIDIA GPUs, device is cpu",
    ),
}


def outcome(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except MoEEpError as error:
        return error
    return None


def make_mistakes(rank: int, num_ranks: int) -> dict:
    """Rank 1 makes every mistake once; a valid call or layer follows each."""
    seen = {"calls": {}, "layers": {}}
    layer = make_layer(rank, num_ranks)
    for name, (arguments, _) in BAD_CALLS.items():
        bad = arguments() if rank == 1 else {"inputs": good_inputs()}
        error = outcome(lambda bad=bad: layer(**bad))
        seen["calls"][name] = error, layer(good_inputs())
    for name, (changes, _, _) in BAD_LAYERS.items():
        changes = changes() if rank == 1 else {}
        error = outcome(lambda changes=changes: make_layer(rank, num_ranks, **changes))
        seen["layers"][name] = error, make_layer(rank, num_ranks)(good_inputs())
    return seen


@pytest.fixture(scope="module")
def mistakes() -> list[dict]:
    return spawn.run(make_mistakes, 2)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return moe_reference(good_inputs(), make_weights(SHAPE), SHAPE)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_of_one_rank_raises_on_all_and_the_next_call_works(mistakes, expected, name):
    for rank in mistakes:
        error, next_output = rank["calls"][name]
        assert isinstance(error, MoEEpConfigError)
        with pytest.raises(MoEEpConfigError, match="rank 1: " + BAD_CALLS[name][1]):
            raise error
        assert torch.equal(next_output, expected)


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_bad_layer_of_one_rank_raises_on_all_and_the_next_one_works(mistakes, expected, name):
    _, error_type, text = BAD_LAYERS[name]
    for rank_idx, rank in enumerate(mistakes):
        error, next_output = rank["layers"][name]
        assert type(error) is error_type
        with pytest.raises(error_type, match=text):
            raise error
        if rank_idx == 0:
            assert "rank 1: " in str(error)
        assert torch.equal(next_output, expected)


def lose_rank_one(rank: int, num_ranks: int, how: str, pid_file: str) -> dict | None:
    """Two good calls, then rank 1 goes missing; what the others see, and how long it takes."""
    layer = make_layer(rank, num_ranks, timeout_s=3.0)
    for _ in range(2):
        layer(good_inputs())
    if rank == 1 and how == "stopped":
        with open(pid_file, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)  # until rank 0 has seen enough
    if rank == 1 and how == "absent":
        return None  # leaves without destroy()
    start = time.monotonic()
    first = outcome_of_any(lambda: layer(good_inputs()))
    seconds = time.monotonic() - start
    second = outcome(lambda: layer(good_inputs()))
    layer.destroy()
    layer.destroy()
    if how == "stopped" and rank == 0:
        with open(pid_file) as file:
            os.kill(int(file.read()), signal.SIGCONT)
    return {"first": first, "second": second, "seconds": seconds}


def outcome_of_any(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        error.__cause__ = None  # torch's own may not survive pickling
        return error
    return None


@pytest.mark.parametrize("how", ["stopped", "absent"])
def test_a_rank_that_goes_missing_is_named(how, tmp_path):
    """A killed rank: field case A11."""
    seen = spawn.run(lose_rank_one, 2, how, str(tmp_path / "pid"))[0]
    error = seen["first"]
    assert isinstance(error, MoEEpTimeoutError)
    assert (error.ranks, error.step) == ((1,), 2)
    assert "no sign of life from rank 1" in str(error)
    assert seen["seconds"] < 30.0  # time-out 3, grace 2, and a busy machine
    assert isinstance(seen["second"], MoEEpStateError)


def fail_on_rank_one(rank: int, num_ranks: int) -> dict[str, tuple[Exception, Exception]]:
    """Rank 1 runs out of memory in a call, then, with a new layer, in warm-up."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory left")

    called, warmed = make_layer(rank, num_ranks), make_layer(rank, num_ranks)
    if rank == 1:
        called._backend.forward = fail
        warmed._backend.warmup = fail
    return {
        "call": (
            outcome_of_any(lambda: called(good_inputs())),
            outcome_of_any(lambda: called(good_inputs())),
        ),
        "warm-up": (outcome_of_any(warmed.warmup), outcome_of_any(warmed.warmup)),
    }


def test_a_rank_that_fails_by_itself_tells_the_others_why_long_before_the_time_out():
    on_rank_0, on_rank_1 = spawn.run(fail_on_rank_one, 2, timeout_s=55.0)
    for when in ("call", "warm-up"):
        assert isinstance(on_rank_1[when][0], MemoryError)
        assert isinstance(on_rank_0[when][0], MoEEpTransportError)
        assert "rank 1, MemoryError: no memory left" in str(on_rank_0[when][0])
        assert isinstance(on_rank_0[when][1], MoEEpStateError)
        assert isinstance(on_rank_1[when][1], MoEEpStateError)


def test_a_lost_store_names_the_rank_that_holds_it():
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", master.port, is_master=False)
    group = EpGroup(
        rank=1, num_ranks=3, device=torch.device("cpu"), store=store, global_ranks=(0, 1, 2)
    )
    liveness = Liveness(group, layer_id=1, timeout_s=5.0)
    del master  # what the death of rank 0 does where torchrun's agent does not hold the store
    assert not liveness.failed_elsewhere()
    with pytest.raises(MoEEpTimeoutError, match="most likely rank 0 is gone") as error:
        liveness.raise_failure("combine", 7, RuntimeError("connection reset"))
    assert (error.value.phase, error.value.step, error.value.ranks) == ("combine", 7, (0,))


def build_late_on_rank_one(rank: int, num_ranks: int) -> tuple[Exception | None, torch.Tensor]:
    """Rank 0 gives up before rank 1 comes, then both build a layer."""
    error = None
    if rank == 0:
        error = outcome(lambda: make_layer(rank, num_ranks, timeout_s=1.0))
    dist.barrier()
    return error, make_layer(rank, num_ranks)(good_inputs())


def test_a_layer_that_another_rank_does_not_build_times_out_and_the_next_one_works(expected):
    seen = spawn.run(build_late_on_rank_one, 2)
    error = seen[0][0]
    assert isinstance(error, MoEEpTimeoutError)
    assert error.ranks == (1,)
    assert "rank 1 did not come within timeout_s=1" in str(error)
    assert all(torch.equal(output, expected) for _, output in seen)

"""On CPU a row's FP32 sums do not depend on the rows beside it, their number, or the threads."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
import torch
from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEShape, MoEWeights
from moe_ep.cpu_matmul import run_tasks
from moe_ep.megakernel.problem import Activation
from moe_ep.reference import activate, expert_terms, fc1_sums, fc2_sums

NUM_ROWS = 300
HIDDEN = 1024
# format -> intermediate; tails that no vector width divides where the format allows them
INTERMEDIATES = {"bf16": 100, "nvfp4": 112, "mxfp4": 160, "mxfp8": 96, "fp8_block": 199}
ACTIVATIONS = ("swiglu", "gpt_oss", "deepseek_v4", "geglu_tanh", "reglu", "situ")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def one_expert(format_name: str) -> MoEWeights:
    intermediate = INTERMEDIATES[format_name]
    w13 = torch.randn(1, 2 * intermediate, HIDDEN).bfloat16()
    w2 = torch.randn(1, HIDDEN, intermediate).bfloat16()
    weights = MoEWeights.from_dense(w13, w2, b13=torch.randn(1, 2 * intermediate))
    return weights.quantize(format_name)


# Every format shares bf16's matmul, so that the others are held to fewer counts.
ALL_COUNTS = range(1, NUM_ROWS + 1)
SOME_COUNTS = [*range(1, 34), *range(34, NUM_ROWS, 19), NUM_ROWS]


def spans(counts: Iterable[int]) -> list[slice]:
    """So many rows, each time at another offset."""
    return [
        slice(first := (37 * count) % (NUM_ROWS - count + 1), first + count) for count in counts
    ]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("format_name", INTERMEDIATES)
def test_fc1_and_fc2_rows_keep_their_bits(format_name, num_threads, monkeypatch):
    torch.manual_seed(0)
    # Decoding does not see the rows; once is enough.
    monkeypatch.setattr(MoEWeights, "unscaled", cache(MoEWeights.unscaled))
    monkeypatch.setattr(MoEWeights, "fp8_scales", cache(MoEWeights.fp8_scales))
    weights = one_expert(format_name)
    x_PH = torch.randn(NUM_ROWS, HIDDEN).bfloat16()
    hidden_PI = torch.randn(NUM_ROWS, INTERMEDIATES[format_name]).bfloat16()
    torch.set_num_threads(1)
    fc1_PN, fc2_PH = fc1_sums(x_PH, weights, 0), fc2_sums(hidden_PI, weights, 0)
    torch.set_num_threads(num_threads)
    for rows in spans(ALL_COUNTS if format_name == "bf16" else SOME_COUNTS):
        assert torch.equal(fc1_sums(x_PH[rows], weights, 0), fc1_PN[rows]), rows
        assert torch.equal(fc2_sums(hidden_PI[rows], weights, 0), fc2_PH[rows]), rows


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("format_name", INTERMEDIATES)
def test_rows_keep_their_bits_through_a_whole_expert(format_name, num_threads, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(MoEWeights, "unscaled", cache(MoEWeights.unscaled))
    weights = one_expert(format_name).shard("tp", 0, 1)  # terms in FP32
    x_PH = torch.randn(NUM_ROWS, HIDDEN).bfloat16()
    torch.set_num_threads(1)
    want_PH = expert_terms(x_PH, weights, 0, Activation("swiglu"))
    assert want_PH.dtype == torch.float32
    torch.set_num_threads(num_threads)
    for rows in spans(SOME_COUNTS):
        got_PH = expert_terms(x_PH[rows], weights, 0, Activation("swiglu"))
        assert torch.equal(got_PH, want_PH[rows]), rows


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_rows_keep_their_bits(name, num_threads):
    torch.manual_seed(0)
    fc1_PN = torch.randn(NUM_ROWS, 2 * 353)
    torch.set_num_threads(1)
    want_PI = activate(fc1_PN, Activation.from_name(name))
    torch.set_num_threads(num_threads)
    for rows in spans(SOME_COUNTS):
        got_PI = activate(fc1_PN[rows], Activation.from_name(name))
        assert torch.equal(got_PI, want_PI[rows]), rows


def test_wide_sums_keep_their_bits():
    torch.manual_seed(0)
    weights = MoEWeights.from_dense(
        torch.randn(1, 64, 7168).bfloat16(), torch.randn(1, 7168, 32).bfloat16()
    )
    x_PH = torch.randn(48, 7168).bfloat16()
    torch.set_num_threads(1)
    want_PN = fc1_sums(x_PH, weights, 0)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in range(1, 49, 3):
            assert torch.equal(fc1_sums(x_PH[-num_rows:], weights, 0), want_PN[-num_rows:])


@pytest.mark.parametrize("instructions", ["AVX2", "SSE4_2"])
def test_kernels_for_other_processors_keep_them_too(instructions):
    """MKL has kernels for each instruction set; Intel processors can be told to use older ones."""
    names = "whole_expert and (nvfp4 or bf16) or wide"
    environment = os.environ | {"MKL_ENABLE_INSTRUCTIONS": instructions}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "-k", names, __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and "5 passed" in result.stdout, result.stdout[-2000:]


def test_tasks_have_one_thread_and_the_modes_of_who_asks():
    torch.set_num_threads(2)

    def task() -> tuple[int, bool, bool]:
        return torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    assert run_tasks([task] * 3) == [(1, False, True)] * 3
    with torch.no_grad():
        assert run_tasks([task]) == [(1, False, False)]
    with torch.inference_mode():
        assert run_tasks([task]) == [(1, True, False)]
    assert run_tasks([]) == []
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_task_that_raises_is_heard_and_leaves_the_threads_as_they_were(num_threads):
    torch.set_num_threads(num_threads)
    with pytest.raises(ZeroDivisionError):
        run_tasks([lambda: 1 // 0, lambda: 1])
    assert torch.get_num_threads() == num_threads


def test_a_thread_that_begins_meanwhile_has_as_many_threads_as_before():
    torch.set_num_threads(2)
    seen = []

    def begin() -> None:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()

    run_tasks([begin] * 3)
    assert seen == [2] * 3


AT_THE_END = """
import atexit, torch
from moe_ep.cpu_matmul import run_tasks
torch.set_num_threads(2)
atexit.register(lambda: print(run_tasks([torch.get_num_threads] * 2), torch.get_num_threads()))
"""


def test_tasks_run_while_the_interpreter_ends():
    command = [sys.executable, "-c", AT_THE_END]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[1, 1] 2\n", result.stderr


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("format_name", ["bf16", "nvfp4", "fp8_block"])
def test_defaults_of_torch_change_nothing(format_name, num_threads):
    torch.set_num_threads(num_threads)
    shape = MoEShape(num_experts=8, top_k=2, hidden=128, intermediate=128)
    inputs = make_inputs(shape, 16, seed=1)
    layer = MoEEpLayer(shape, make_weights(shape, format_name), max_tokens_per_rank=32)
    want, weights = layer.forward(inputs), make_weights(shape)
    quantised = weights.quantize(format_name)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer.warmup()
        assert torch.equal(layer.forward(inputs), want)
        again = weights.quantize(format_name)
        for field in ("w13", "w13_sf", "gate_scale"):
            tensors = getattr(quantised, field), getattr(again, field)
            assert tensors == (None, None) or torch.equal(*(t.view(torch.uint8) for t in tensors))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert torch.equal(layer.forward(inputs), want)

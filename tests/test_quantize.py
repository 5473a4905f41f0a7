"""Quantised tensors are exact to the bit against NumPy, ml_dtypes and closed formulas."""

import math

import ml_dtypes
import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import FINITE_BF16, assert_same_values

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.quantize import BLOCKS, QuantSpec, dequantize, qdq, quantize


def spec_of(format_name: str) -> QuantSpec:
    return QuantSpec(format=format_name)


def spec_id(value: object) -> str | None:
    return value.format if isinstance(value, QuantSpec) else None


def wide_range(num_rows: int, num_cols: int, seed: int = 0) -> torch.Tensor:
    """BF16 blocks whose magnitudes spread over 2^24, some all zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_cols // 16, 16, generator=generator)
    exponents = torch.randint(-20, 5, (num_rows, num_cols // 16, 1), generator=generator)
    zero = torch.rand(num_rows, num_cols // 16, 1, generator=generator) < 0.05
    return torch.where(zero, 0.0, torch.ldexp(x, exponents)).view(num_rows, num_cols).bfloat16()


# NVFP4


@pytest.mark.parametrize("per_token", [False, True], ids=["tensor", "token"])
@pytest.mark.parametrize("sf_max", [448, 256])
@pytest.mark.parametrize("kind", ["normal", "wide_range", "zero"])
def test_nvfp4_is_the_exact_chain(per_token, sf_max, kind):
    x = wide_range(64, 512) if kind == "wide_range" else torch.randn(64, 512).bfloat16()
    x = x * 0 if kind == "zero" else x
    got = quantize(x, QuantSpec(format="nvfp4", sf_max=sf_max, per_token=per_token))
    q, s, decode = oracles.nvfp4(oracles.to_numpy(x), sf_max, per_token)
    assert_same_values(oracles.to_numpy(got.sf), s)
    has_scale = np.repeat(s, 16, axis=1) > 0  # codes mean nothing under a zero scale
    codes = oracles.unpack_e2m1(got.codes.numpy())
    assert_same_values(codes * has_scale, q * has_scale)
    assert_same_values(got.global_scale.numpy(), np.squeeze(decode))


@pytest.mark.parametrize("per_token", [False, True], ids=["tensor", "token"])
@pytest.mark.parametrize("error_scale", ["amax", "decode"])
@pytest.mark.parametrize("rule", ["mse", "mae", "max"])
@pytest.mark.parametrize("sf_max", [448, 256])
def test_four_over_six_is_the_strict_chain(sf_max, rule, error_scale, per_token):
    x = torch.cat([wide_range(16, 1024), torch.randn(48, 1024).bfloat16()])
    spec = QuantSpec(
        format="nvfp4",
        sf_max=sf_max,
        four_over_six=rule,
        error_scale=error_scale,
        per_token=per_token,
    )
    got = quantize(x, spec)
    q, s, _ = oracles.four_over_six(oracles.to_numpy(x), sf_max, rule, error_scale, per_token)
    assert_same_values(oracles.to_numpy(got.sf), s)
    has_scale = np.repeat(s, 16, axis=1) > 0
    assert_same_values(oracles.unpack_e2m1(got.codes.numpy()) * has_scale, q * has_scale)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (QuantSpec(format="nvfp4"), 0.0951),
        (QuantSpec(format="nvfp4", four_over_six="mse", sf_max=256), 0.0870),
        (QuantSpec(format="nvfp4", four_over_six="mae", sf_max=448), 0.0883),
        (QuantSpec(format="mxfp4"), 0.1153),
        (QuantSpec(format="mxfp4", sf_rule="floor"), 0.1148),
        (QuantSpec(format="mxfp8"), 0.0267),
        (QuantSpec(format="mxfp8", sf_rule="floor"), 0.0293),
        (QuantSpec(format="mxfp8", element="e5m2"), 0.0529),
        (QuantSpec(format="fp8_vector"), 0.0257),
        (QuantSpec(format="fp8_vector", sf_power_of_two=True), 0.0267),
    ],
    ids=spec_id,
)
def test_relative_error_of_normal_data_is_the_published_one(spec, want):
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    error = (dequantize(quantize(x, spec), torch.float64) - x.double()).norm() / x.double().norm()
    assert abs(error.item() / want - 1) < 0.01


def test_global_scale_is_taken_for_each_matrix_and_stated_as_asked():
    x = torch.stack([torch.ones(2, 16), 7 * torch.ones(2, 16), torch.zeros(2, 16)]).bfloat16()
    decode = quantize(x, "nvfp4")
    encode = quantize(x, QuantSpec(format="nvfp4", global_scale="encode"))
    assert encode.global_scale.tolist() == [2688.0, 384.0, 1.0]
    assert torch.equal(decode.global_scale, 1 / encode.global_scale)
    assert torch.equal(dequantize(decode), dequantize(encode))


# MX


@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize(
    ("format_name", "element", "largest"),
    [("mxfp4", "e4m3", 6), ("mxfp8", "e4m3", 448), ("mxfp8", "e5m2", 57344)],
)
def test_mx_scale_of_every_bf16_is_exact(format_name, element, largest, rule):
    values = FINITE_BF16[FINITE_BF16 >= 0]
    x = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    x[:, 5] = -values
    got = quantize(x, QuantSpec(format=format_name, element=element, sf_rule=rule))
    want = [oracles.mx_byte(value, largest, rule) for value in values.tolist()]
    assert_same_values(got.sf[:, 0].numpy(), np.array(want))


@pytest.mark.parametrize(
    ("format_name", "element", "amax", "want"),
    [
        ("mxfp8", "e4m3", 448.0, (127, 127)),
        ("mxfp8", "e4m3", 449.0, (128, 127)),
        ("mxfp8", "e4m3", 512.0, (128, 128)),
        ("mxfp8", "e4m3", 1.75, (119, 119)),
        ("mxfp8", "e4m3", 1.76, (120, 119)),
        ("mxfp4", "e4m3", 448.0, (134, 133)),
        ("mxfp4", "e4m3", 1.75, (126, 125)),
    ],
)
def test_mx_scale_examples(format_name, element, amax, want):
    x = torch.full((1, 32), amax)
    for rule, byte in zip(("ceil", "floor"), want, strict=True):
        spec = QuantSpec(format=format_name, element=element, sf_rule=rule)
        assert quantize(x, spec).sf.item() == byte


@pytest.mark.parametrize("rule", ["ceil", "floor"])
def test_mx_elements_are_the_scaled_values_rounded_once(rule):
    x = wide_range(64, 512)
    for format_name, dtype, largest in (
        ("mxfp4", ml_dtypes.float4_e2m1fn, 6),
        ("mxfp8", ml_dtypes.float8_e4m3fn, 448),
    ):
        got = quantize(x, QuantSpec(format=format_name, sf_rule=rule))
        scale = np.repeat(oracles.e8m0(got.sf.numpy()), 32, axis=1)
        want = oracles.cast(oracles.to_numpy(x) / scale, dtype, largest) * scale
        assert_same_values(dequantize(got, torch.float64).numpy(), want)


def test_a_block_too_small_for_its_scale_becomes_zero():
    x = torch.full((1, 64), 2.0**-126)
    x[:, 32:] = 1.0
    got = quantize(x, "mxfp8")
    assert got.sf.tolist() == [[0, 119]]
    assert dequantize(got)[0, :32].abs().max() == 0


# FP8 blocks


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 1), (129, 256)])
@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_vector"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_divides_by_amax_over_448_and_pads_ragged_blocks(shape, format_name, power_of_two):
    x = torch.randn(shape).bfloat16()
    x[:1, :1] = 0
    got = quantize(x, QuantSpec(format=format_name, sf_power_of_two=power_of_two))
    block_rows, block_cols = BLOCKS[format_name]
    dense = oracles.to_numpy(x)
    for row in range(got.sf.shape[0]):
        for col in range(got.sf.shape[1]):
            rows = slice(row * block_rows, (row + 1) * block_rows)
            cols = slice(col * block_cols, (col + 1) * block_cols)
            block = dense[rows, cols]
            scale = np.abs(block).max() / np.float32(448)
            if power_of_two:
                scale = np.float32(2.0 ** math.ceil(math.log2(scale))) if scale else scale
            scale = scale or np.float32(1)
            assert got.sf[row, col].item() == scale
            assert_same_values(oracles.to_numpy(got.codes[rows, cols]), oracles.e4m3(block / scale))


# Non-finite input and options


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format_name", BLOCKS)
def test_non_finite_input_is_refused_by_name(format_name, bad):
    x = torch.randn(3, 128, 128).bfloat16()
    x[2, 70, 9] = bad
    with pytest.raises(MoEEpConfigError, match=r"experts\.w2\[2\] holds NaN or Inf"):
        quantize(x, format_name, name="experts.w2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "spec",
    [*map(spec_of, BLOCKS), QuantSpec(format="nvfp4", four_over_six="mse", sf_max=256)],
    ids=spec_id,
)
def test_an_allowed_nan_decodes_to_nan_and_spoils_its_block_alone(spec, dtype):
    x = torch.randn(256, 256).to(dtype)
    clean = x.clone()
    clean[3, 40] = 0
    x[3, 40] = math.nan
    got = dequantize(quantize(x, spec, allow_nonfinite=True))
    want = dequantize(quantize(clean, spec))
    assert torch.isnan(got[3, 40])
    rows, cols = BLOCKS[spec.format]
    outside = torch.ones(256, 256, dtype=torch.bool)
    outside[: max(rows, 4), 40 // cols * cols : (40 // cols + 1) * cols] = False
    outside[: 3 // rows * rows] = True
    assert torch.equal(got[outside], want[outside])


@pytest.mark.parametrize("format_name", BLOCKS)
def test_an_allowed_inf_saturates_or_stays_but_never_shrinks(format_name):
    x = torch.randn(128, 256).bfloat16()
    x[3, 40] = -math.inf
    got = dequantize(quantize(x, format_name, allow_nonfinite=True))[3, 40]
    if format_name == "nvfp4":  # S = 1: the largest code times the largest scale factor
        assert got == -6 * 448
    elif format_name.startswith("mx"):
        assert got == -math.inf
    else:
        assert got.isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int4"}, "'int4' is not known; allowed: nvfp4"),
        ({"format": "nvfp4", "sf_max": 384}, "sf_max must be one of"),
        ({"format": "mxfp8", "four_over_six": "mse"}, "four_over_six='mse' is for nvfp4"),
        ({"format": "nvfp4", "sf_rule": "floor"}, "sf_rule='floor' is for mxfp4 and mxfp8"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(MoEEpConfigError, match=message):
        QuantSpec(**options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 40, dtype=torch.bfloat16), "w has 40 columns; nvfp4 takes multiples of 16"),
        (torch.zeros(2, 32, dtype=torch.float64), "w must be BF16, FP16 or FP32"),
        (torch.zeros(32), r"w must be \[..., N, K\]"),
    ],
)
def test_tensors_are_checked(x, message):
    with pytest.raises(MoEEpConfigError, match=message):
        quantize(x, "nvfp4", name="w")


# Whole tensors


@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    rows=st.integers(1, 300),
    blocks=st.integers(1, 4),
    format_name=st.sampled_from(list(BLOCKS)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_a_stack_is_its_matrices_whatever_their_strides(lead, rows, blocks, format_name, seed):
    cols = blocks * BLOCKS[format_name][1]
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*lead, rows, 2 * cols, generator=generator).bfloat16()
    view = wide[..., ::2]
    stack = quantize(view, format_name)
    assert stack.shape == tuple(view.shape)
    for index in np.ndindex(*lead):
        alone = quantize(view[index].contiguous(), format_name)
        part = stack.matrix(index)
        assert torch.equal(part.codes.view(torch.uint8), alone.codes.view(torch.uint8))
        assert torch.equal(part.sf.view(torch.uint8), alone.sf.view(torch.uint8))
        if alone.global_scale is not None:
            assert torch.equal(part.global_scale, alone.global_scale)


@pytest.mark.parametrize("format_name", BLOCKS)
def test_chunks_leave_no_trace(format_name, monkeypatch):
    x = wide_range(300, 512)
    whole = quantize(x, format_name)
    monkeypatch.setitem(quantize.__globals__["_ELEMENTS_PER_CHUNK"], "cpu", 1)
    chunked = quantize(x, format_name)
    assert torch.equal(whole.codes.view(torch.uint8), chunked.codes.view(torch.uint8))
    assert torch.equal(whole.sf.view(torch.uint8), chunked.sf.view(torch.uint8))


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("format_name", BLOCKS)
def test_threads_leave_no_trace_and_keep_torchs_setting(format_name, num_threads, monkeypatch):
    x = wide_range(300, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = quantize(x, format_name)
    monkeypatch.setitem(quantize.__globals__["_ELEMENTS_PER_CHUNK"], "cpu", 4096)
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            together = quantize(x, format_name)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone.codes.view(torch.uint8), together.codes.view(torch.uint8))
    assert torch.equal(dequantize(alone), dequantize(together))


def test_progress_counts_every_element_and_leaves_stdout_alone(capsys, monkeypatch):
    done = []
    quantize(torch.zeros(3, 200, 128), "mxfp8", advance=done.append)
    assert sum(done) == 3 * 200 * 128
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setitem(quantize.__globals__, "_PROGRESS_ELEMENTS", 0)
    quantize(torch.zeros(200, 128), "mxfp8", name="w2")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "quantising w2 to mxfp8" in printed.err


# Training


@pytest.mark.parametrize(
    "spec",
    [*map(spec_of, BLOCKS), QuantSpec(format="nvfp4", per_token=True, global_scale="encode")],
    ids=spec_id,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_qdq_rounds_values_and_passes_the_gradient(spec, dtype):
    x = torch.randn(3, 40, 256).to(dtype).requires_grad_()
    y = qdq(x, spec)
    assert torch.equal(y, dequantize(quantize(x.detach(), spec)).to(dtype))
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_qdq_twice_changes_nothing_more_for_powers_of_two():
    x = torch.randn(64, 256).bfloat16()
    once = qdq(x, "mxfp8")
    assert torch.equal(qdq(once, "mxfp8"), once)


def test_qdq_refuses_nan_by_name():
    with pytest.raises(MoEEpConfigError, match="w2 holds NaN"):
        qdq(torch.full((1, 16), math.nan), "nvfp4", name="w2")

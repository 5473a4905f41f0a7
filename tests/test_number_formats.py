"""Casts to and from narrow number formats, and their products, for every code and all of BF16."""

import math

import ml_dtypes
import numpy as np
import oracles
import pytest
import torch
from oracles import ALL_BF16, FINITE_BF16, assert_same_values

from moe_ep.number_formats import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_e8m0_ceil,
    round_e2m1,
)
from moe_ep.quantize import BLOCKS, unscaled

# Halfway points between E2M1 values.
E2M1_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def near(values: torch.Tensor) -> torch.Tensor:
    """The values, both signs, with their FP32 neighbours."""
    bits = values.view(torch.int32)
    steps = torch.cat([bits + step for step in (-2, -1, 0, 1, 2)]).view(torch.float32)
    return torch.cat([steps, -steps])


@pytest.mark.parametrize("values", [FINITE_BF16.float(), near(E2M1_TIES)], ids=["bf16", "ties"])
def test_e2m1_rounds_as_ml_dtypes(values):
    want = oracles.e2m1(values.numpy())
    assert_same_values(round_e2m1(values).numpy(), want)
    assert_same_values(decode_e2m1(encode_e2m1(values)).numpy(), want)


def test_e2m1_rounds_a_million_fp32_values_as_ml_dtypes():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0x3D000000, 0x41800000, (1 << 20,), generator=generator)
    values = bits.int().view(torch.float32)
    assert_same_values(decode_e2m1(encode_e2m1(values)).numpy(), oracles.e2m1(values.numpy()))


def test_e2m1_low_nibble_is_the_even_column_and_minus_zero_is_code_8():
    packed = encode_e2m1(torch.tensor([[0.5, -6.0, -0.0, 3.0]]))
    assert packed.tolist() == [[0xF1, 0x58]]


def test_e2m1_decodes_every_byte():
    packed = torch.arange(256, dtype=torch.uint8)
    assert_same_values(decode_e2m1(packed).numpy(), oracles.unpack_e2m1(packed.numpy()))


@pytest.mark.parametrize(
    ("encode", "dtype", "largest"),
    [
        (encode_e4m3, ml_dtypes.float8_e4m3fn, 448.0),
        (encode_e5m2, ml_dtypes.float8_e5m2, 57344.0),
    ],
    ids=["e4m3", "e5m2"],
)
def test_fp8_rounds_as_ml_dtypes_saturates_and_keeps_nan(encode, dtype, largest):
    values = ALL_BF16.float()
    halfway = torch.from_numpy(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32))
    halfway = halfway[torch.isfinite(halfway) & (halfway > 0)].sort().values
    values = torch.cat([values, near((halfway[1:] + halfway[:-1]) / 2)])
    assert_same_values(encode(values).float().numpy(), oracles.cast(values.numpy(), dtype, largest))


def test_e8m0_rounds_every_bf16_up_to_a_power_of_two():
    values = FINITE_BF16[FINITE_BF16 >= 0].float()
    got = encode_e8m0_ceil(values).numpy()
    want = [oracles.mx_byte(value, 1, "ceil") for value in values.tolist()]
    assert_same_values(got, np.minimum(want, 254))


def test_e8m0_special_values():
    special = torch.tensor([0.0, math.inf, math.nan])
    assert encode_e8m0_ceil(special).tolist() == [0, 254, 255]
    byte = torch.arange(256, dtype=torch.uint8)
    assert_same_values(decode_e8m0(byte).double().numpy(), oracles.e8m0(byte.numpy()))


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4", "mxfp8"])
def test_every_code_times_every_scale_is_exact(format_name):
    codes = torch.arange(256, dtype=torch.uint8)
    num_cols = BLOCKS[format_name][1]
    if format_name == "mxfp8":
        codes = codes.view(torch.float8_e4m3fn)
        q = codes.float().double().numpy()
    else:
        codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(16) + 16 * (codes % 16)
        q = oracles.unpack_e2m1(codes.numpy()).astype(np.float64)
    sf = torch.arange(256, dtype=torch.uint8)
    num_blocks = q.size // num_cols
    if format_name == "nvfp4":
        sf = sf.view(torch.float8_e4m3fn)
        s = sf.float().double().numpy()
    else:
        s = oracles.e8m0(sf.numpy())
    row_per_scale = codes.view(torch.uint8).repeat(256, 1).view(codes.dtype)
    sf_per_block = sf.view(torch.uint8)[:, None].repeat(1, num_blocks).view(sf.dtype)
    got = unscaled(row_per_scale, sf_per_block, format_name)
    want = q[None, :] * s[:, None]
    fits = np.abs(want) <= oracles.FLT_MAX
    assert_same_values(np.where(fits, got.double().numpy(), 0), np.where(fits, want, 0))
    if format_name == "nvfp4":
        assert_same_values(got.bfloat16().double().numpy(), want)

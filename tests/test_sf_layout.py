"""The 128x4 scale-factor layout follows its closed formula and gives every byte back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.sf_layout import swizzle_sf, unswizzle_sf


def offset(row: int, col: int, num_cols: int) -> int:
    padded_cols = 4 * -(-num_cols // 4)
    tile = row // 128 * 128 * padded_cols + col // 4 * 512
    return tile + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (256, 12), (1, 1), (200, 7), (129, 5)])
def test_every_byte_is_where_the_formula_puts_it_and_padding_is_zero(rows, cols):
    sf = torch.randint(1, 256, (rows, cols), dtype=torch.uint8)
    want = torch.zeros(128 * -(-rows // 128) * 4 * -(-cols // 4), dtype=torch.uint8)
    for row in range(rows):
        for col in range(cols):
            want[offset(row, col, cols)] = sf[row, col]
    assert torch.equal(swizzle_sf(sf), want)


@given(
    lead=st.lists(st.integers(0, 3), max_size=2),
    rows=st.integers(1, 300),
    cols=st.integers(1, 20),
    dtype=st.sampled_from([torch.uint8, torch.float8_e4m3fn]),
)
@settings(max_examples=50, deadline=None)
def test_unswizzle_is_the_inverse_and_experts_are_padded_alone(lead, rows, cols, dtype):
    sf = torch.randint(0, 256, (*lead, rows, cols), dtype=torch.uint8).view(dtype)
    swizzled = swizzle_sf(sf)
    back = unswizzle_sf(swizzled, rows, cols)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), sf.view(torch.uint8))
    if len(lead) == 1 and lead[0]:
        assert torch.equal(swizzle_sf(sf[-1]).view(torch.uint8), swizzled[-1].view(torch.uint8))


def test_wide_scales_and_wrong_sizes_are_refused():
    with pytest.raises(MoEEpConfigError, match="one-byte scale factors, got torch.float32"):
        swizzle_sf(torch.ones(4, 4))
    with pytest.raises(MoEEpConfigError, match="200 x 7 take 2048 bytes, got 512"):
        unswizzle_sf(torch.zeros(512, dtype=torch.uint8), 200, 7)

"""The knob table and what a build may ask for. CPU, no kernel."""

import math
from dataclasses import replace

import pytest
import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.grouped_gemm import GemmSpec
from moe_ep.megakernel.knobs import (
    KNOB_TABLE,
    MAX_LOCAL_EXPERTS,
    MAX_SMEM_BYTES,
    KernelKnobs,
    choose_knobs,
    choose_routed_knobs,
    usual_rows,
)
from moe_ep.megakernel.problem import WEIGHT_FORMATS, Activation

DECODE = KernelKnobs(
    num_math_warpgroups=4,
    slices_per_item=2,
    tile_widths=(8, 16, 24, 32),
    stages=5,
    producer_registers=32,
    math_registers=112,
)
SPEC = GemmSpec(
    name="fc1",
    weights_format="nvfp4",
    num_cols=7168,
    num_channels=2048,
    activation=Activation(),
    has_bias=False,
    num_experts=32,
    scatters_rows=False,
    knobs=DECODE,
)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_every_format_has_a_build_for_any_number_of_rows(name):
    for rows in (0.01, 1, 32, 33, 64, 65, 128, 129, 1e6):
        knobs = choose_knobs(name, rows)
        assert knobs.smem_bytes(name, MAX_LOCAL_EXPERTS) <= MAX_SMEM_BYTES


def test_more_rows_never_get_narrower_tiles():
    for name in WEIGHT_FORMATS:
        widest = [choose_knobs(name, rows).max_tile_width for rows in range(1, 300)]
        assert widest == sorted(widest)


def test_every_row_of_the_table_can_be_reached_and_says_why():
    reached = {choose_knobs(n, r) for n in WEIGHT_FORMATS for r in range(1, 300)}
    assert reached == {row.knobs for row in KNOB_TABLE}
    assert all(row.reason for row in KNOB_TABLE)


def test_nine_experts_in_ten_fit_one_tile_at_the_limit_of_a_build():
    for row in KNOB_TABLE:
        if math.isfinite(row.max_rows):
            mean = usual_rows(row.max_rows)
            assert mean + 1.5 * math.sqrt(mean) == pytest.approx(row.max_rows)
    assert math.isinf(usual_rows(math.inf))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_experts_that_a_router_fills_get_the_build_of_their_fullest(name):
    for mean in (0.01, 1, 8, 20, 24, 25, 32, 52, 53, 64, 100, 128, 500):
        assert choose_routed_knobs(name, mean) == choose_knobs(name, mean + 1.5 * math.sqrt(mean))
    torch.manual_seed(0)
    rows = torch.bincount(torch.rand(128, 32).topk(8).indices.flatten(), minlength=32)
    fits = rows <= choose_routed_knobs("nvfp4", 32).max_tile_width
    assert rows.float().mean() == 32 and fits.float().mean() >= 0.9
    assert (rows <= choose_knobs("nvfp4", 32).max_tile_width).float().mean() < 0.7


@pytest.mark.parametrize(
    "change, named",
    [
        ({"num_math_warpgroups": 3}, "num_math_warpgroups"),
        ({"slices_per_item": 4}, "slices_per_item"),
        ({"stages": 1}, "stages must be an int of at least 2, got 1"),
        ({"stages": 4.0}, "stages"),
        ({"math_registers": 100}, "math_registers must be a multiple of 8 from 24 to 256, got 100"),
        ({"producer_registers": 16}, "producer_registers"),
        ({"tile_widths": ()}, "tile_widths"),
        ({"tile_widths": [8, 16]}, "tile_widths"),
        ({"tile_widths": (16, 8, 32)}, "tile_widths"),
        ({"tile_widths": (8, 12, 32)}, "tile_widths"),
        ({"tile_widths": (8, 24)}, "tile_widths"),
        ({"tile_widths": (256, 264)}, "tile_widths"),
        # 640 threads launch with 96 registers each: 40 + 4 x 112 would hang in setmaxnreg.
        ({"producer_registers": 40}, "62464.*61440"),
    ],
)
def test_knobs_that_cannot_run_are_refused(change, named):
    with pytest.raises(MoEEpConfigError, match=named):
        replace(DECODE, **change)


def test_a_ring_that_exceeds_shared_memory_is_refused_with_both_numbers():
    with pytest.raises(MoEEpConfigError, match=rf"6 stages.*{MAX_SMEM_BYTES}"):
        replace(SPEC, knobs=replace(DECODE, stages=6))


def test_slices_cover_the_padded_rows():
    assert SPEC.num_slices == 16
    assert replace(SPEC, num_channels=160).num_slices == 2  # 2 x 160 rows, halves padded to 256
    prefill = choose_knobs("nvfp4", 1000)
    assert replace(SPEC, knobs=prefill).num_slices == 32

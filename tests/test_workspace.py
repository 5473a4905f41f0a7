"""The workspace's one list of regions: sizes, offsets, limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import PARALLEL_MODES
from moe_ep.megakernel.workspace import ALIGNMENT, Workspace

GEOMETRY = dict(
    num_ranks=2,
    num_local_experts=32,
    top_k=8,
    hidden=7168,
    intermediate=2048,
    max_tokens_per_rank=512,
    max_tile_width=32,
)
SMALL = st.integers(1, 9)


def make_workspace(**changed) -> Workspace:
    return Workspace(**GEOMETRY | changed)


@given(
    num_ranks=SMALL,
    num_local_experts=SMALL,
    top_k=SMALL,
    hidden=SMALL.map(lambda n: 8 * n),
    intermediate=st.integers(0, 9),
    max_tokens_per_rank=SMALL,
    max_tile_width=SMALL.map(lambda n: 8 * n),
    parallel=st.sampled_from(PARALLEL_MODES),
)
def test_regions_of_a_scope_are_aligned_and_do_not_overlap(**geometry):
    workspace = Workspace(**geometry)
    for scope in ("symmetric", "local"):
        end = 0
        for region in (r for r in workspace.regions if r.scope == scope):
            assert workspace.offsets[region.name] % ALIGNMENT == 0
            assert workspace.offsets[region.name] >= end
            end = workspace.offsets[region.name] + region.num_bytes
        assert end <= workspace.num_bytes(scope) < end + ALIGNMENT


@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    max_tile_width=st.sampled_from([8, 16, 32]),
)
def test_there_is_a_counter_for_every_token_tile(rows, max_tile_width):
    workspace = make_workspace(
        num_ranks=1,
        num_local_experts=len(rows),
        top_k=1,
        max_tokens_per_rank=max(1, sum(rows)),
        max_tile_width=max_tile_width,
    )
    num_tiles = sum(-(-n // max_tile_width) for n in rows)
    counters = workspace.counters
    assert counters.num_tiles >= num_tiles
    assert counters.next_item < counters.tokens_arrived
    assert counters.fc1_done + num_tiles <= counters.num_counters


def test_sizes_of_a_known_geometry():
    workspace = make_workspace()
    bytes_of = {region.name: region.num_bytes for region in workspace.regions}
    assert workspace.num_pool_rows == 2 * 512 * 8
    assert bytes_of["terms"] == 512 * 8 * 7168 * 2
    assert bytes_of["x_stage"] == 512 * 7168 * 2
    assert bytes_of["pool"] == 8192 * 7168 * 2
    assert bytes_of["hidden"] == 8192 * 2048 * 2
    assert bytes_of["src_meta"] == 8192 * 8


def test_sums_travel_instead_of_terms_under_tp():
    regions = {region.name: region for region in make_workspace(parallel="tp").regions}
    assert regions["weights"].num_bytes == regions["ids"].num_bytes == 2 * 512 * 8 * 4
    assert regions["parts"].num_bytes == 2 * 512 * 7168 * 4
    assert regions["terms"].num_bytes == 2 * 512 * 8 * 7168 * 4
    assert [regions[n].scope for n in ("weights", "parts", "terms")] == 2 * ["symmetric"] + [
        "local"
    ]
    alone = make_workspace(parallel="tp", num_ranks=1).regions
    assert {region.name for region in alone if region.scope == "symmetric"} == {"parts"}


def test_one_rank_stages_and_publishes_nothing():
    symmetric = {r.name for r in make_workspace(num_ranks=1).regions if r.scope == "symmetric"}
    assert symmetric == {"terms"}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"hidden": 12}, "hidden must be a multiple of 8, got 12"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        ({"intermediate": -1}, "intermediate must be at least 0, got -1"),
        ({"top_k": 33}, "top_k must be at most 32, got 33"),
        ({"max_tokens_per_rank": 2**27}, "allowed: less than 2147483648"),
        ({"parallel": "pp"}, "parallel must be one of"),
        (
            {"parallel": "tp", "top_k": 1, "hidden": 8192, "max_tokens_per_rank": 2**18 + 1},
            "allowed under tp: at most 4294967296",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named(changed, message):
    with pytest.raises(MoEEpConfigError, match=message):
        make_workspace(**changed)


def test_the_largest_number_of_slots_is_allowed():
    assert make_workspace(max_tokens_per_rank=2**27 - 1).num_pool_rows == 2**31 - 16

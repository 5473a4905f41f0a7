"""The dispatch and combine protocol holds under any interleaving, and every fault is caught.

`run` raises `ProtocolError` for a race, a deadlock, a row moved twice, a wrong output or counter.
"""

import random

import pytest

from moe_ep.megakernel import schedule
from moe_ep.megakernel.interpreter import Routing, Setup, run
from moe_ep.megakernel.memory_model import Fault, ProtocolError
from moe_ep.megakernel.workspace import Workspace

NUM_SEEDS = 120  # of each of the twelve geometries below


def make_setup(
    num_ranks: int, num_ctas: int, num_experts: int, capacity: int, top_k: int, **slices
) -> Setup:
    widths = slices.get("tile_widths", (8,))
    workspace = Workspace(
        num_ranks=num_ranks,
        num_local_experts=-(-num_experts // num_ranks),
        top_k=top_k,
        hidden=8,
        intermediate=8,
        max_tokens_per_rank=capacity,
        max_tile_width=max(widths),
        least_tile_width=min(widths),
    )
    return Setup(workspace=workspace, num_experts=num_experts, num_ctas=num_ctas, **slices)


def random_routing(rng: random.Random, setup: Setup) -> Routing:
    """Any number of tokens, masked slots and repeated experts included; one in ten is refused."""
    workspace = setup.workspace
    routing = [
        [
            [rng.randrange(-1, setup.num_experts) for _ in range(workspace.top_k)]
            for _ in range(rng.randint(0, workspace.max_tokens_per_rank))
        ]
        for _ in range(workspace.num_ranks)
    ]
    if workspace.num_ranks > 1 and rng.random() < 0.1:
        routing[rng.randrange(workspace.num_ranks)] = -1 - rng.randint(0, 3)
    return routing


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ctas", [1, 2, 5])
def test_random_routings_and_interleavings_keep_every_promise(num_ranks, num_ctas):
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        setup = make_setup(
            *(num_ranks, num_ctas, rng.randint(num_ranks, 5), 2, rng.randint(1, 2)),
            most_few=rng.randint(1, 2),
            num_math_warps=rng.randint(1, 2),
        )
        run(setup, [random_routing(rng, setup) for _ in range(3)], seed)


@pytest.mark.parametrize("tile_widths", [(8, 16), (24, 8, 16)])
def test_ranks_may_launch_other_builds_than_their_peers_and_than_before(tile_widths):
    """Their tiles differ, so that rows of an expert are counted by other counters."""
    for seed in range(NUM_SEEDS // 4):
        rng = random.Random(seed)
        setup = make_setup(2, 2, 2, 12, 2, tile_widths=tile_widths)
        run(setup, [random_routing(rng, setup) for _ in range(4)], seed)


CASES = {
    "one_empty_rank": [[[0, 1], [2, 5]], [], [[3, 4]]],
    "every_rank_empty": [[], [], []],
    "empty_experts": [[[0, 0]], [[0, 5]], [[5, 0]]],
    "all_to_one_expert": [[[4, 4]] * 5, [[4, 4]] * 5, [[4, 4]] * 5],
    "all_to_one_rank": [[[2, 3]] * 5, [[3, 2]] * 4, [[2, 2]] * 3],
    "masked_slots": [[[-1, 2], [-1, -1]], [[0, -1]], [[-1, -1]]],
    "one_token": [[], [[1, 4]], []],
    "several_tiles_of_one_expert": [[[0, 3]] * 5] * 3,
    "a_rank_refuses": [[[0, 1]], -2, [[3, 4]]],
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_common_cases_hold_between_ordinary_steps(case):
    setup = make_setup(num_ranks=3, num_ctas=2, num_experts=6, capacity=5, top_k=2)
    ordinary = [[[0, 5], [1, 2]], [[3, 4]], [[2, 2], [0, 1]]]
    for seed in range(20):
        run(setup, [ordinary, CASES[case], CASES[case], ordinary], seed)


@pytest.mark.parametrize("num_ctas", [1, 2, 5])
@pytest.mark.parametrize("fc1_slices, fc2_slices", [(2, 4), (3, 5), (1, 1)])
def test_half_items_keep_every_promise(num_ctas, fc1_slices, fc2_slices):
    """Few FC1 items: all are halved; many: only the end of FC2 is."""
    for seed in range(30):
        rng = random.Random(seed)
        setup = make_setup(
            *(2, num_ctas, 4, rng.randint(1, 9), 2),
            fc1_slices=fc1_slices,
            fc2_slices=fc2_slices,
            slices_per_item=2,
        )
        run(setup, [random_routing(rng, setup) for _ in range(2)], seed)


def test_many_ctas_share_few_tokens():
    setup = make_setup(num_ranks=2, num_ctas=7, num_experts=4, capacity=2, top_k=2)
    for seed in range(20):
        run(setup, [[[[0, 3]], [[2, 1], [1, 0]]]] * 3, seed)


# One tile per expert: expert 0 of rank 0 is tile 0, so counters.tokens_arrived + 0 is its counter.
# Row 2 of rank 0 is a peer's token that CTA 1 routes and CTA 0 pulls.
FAULT_SETUP = make_setup(num_ranks=2, num_ctas=2, num_experts=2, capacity=2, top_k=1)
FAULT_ROUTING = [[[0], [0]], [[0], [1]]]
COUNTERS = FAULT_SETUP.workspace.counters
FAULTS = {
    "lost_routed": Fault("drop", "routed", "store", nth=1),
    "lost_arrived": Fault("drop", "arrived", "store", rank=1),
    "lost_drained": Fault("drop", "drained", "store", nth=1),
    "lost_routing_of_a_row": Fault("drop", "src_meta", "store", index=2),
    "lost_count_of_staged": Fault("drop", "counters", "add", index=COUNTERS.staged),
    "lost_count_of_finished": Fault("drop", "counters", "add", index=COUNTERS.finished),
    "lost_count_of_tokens": Fault("drop", "counters", "add", index=COUNTERS.tokens_arrived),
    "lost_count_of_fc1": Fault("drop", "counters", "add", index=COUNTERS.fc1_done),
    "item_taken_twice": Fault("drop", "counters", "add", index=COUNTERS.next_item),
    "item_skipped": Fault("double", "counters", "add", index=COUNTERS.next_item),
    "staged_counted_twice": Fault("double", "counters", "add", index=COUNTERS.staged),
    "finished_counted_twice": Fault("double", "counters", "add", index=COUNTERS.finished),
    "tokens_counted_twice": Fault("double", "counters", "add", index=COUNTERS.tokens_arrived),
    "fc1_counted_twice": Fault("double", "counters", "add", index=COUNTERS.fc1_done),
    "staged_in_the_other_bank": Fault("bank", "counters", "add", index=COUNTERS.staged),
    "finished_in_the_other_bank": Fault("bank", "counters", "add", index=COUNTERS.finished),
    "tokens_in_the_other_bank": Fault("bank", "counters", "add", index=COUNTERS.tokens_arrived),
    "fc1_in_the_other_bank": Fault("bank", "counters", "add", index=COUNTERS.fc1_done),
    "waits_for_the_other_bank": Fault("bank", "counters", "wait", index=COUNTERS.fc1_done),
    "routed_of_the_step_before": Fault("bank", "routed", "store", nth=1),
    "arrived_of_the_step_before": Fault("bank", "arrived", "store", rank=1),
    "drained_of_the_step_before": Fault("bank", "drained", "store", nth=1),
    "routed_before_its_data": Fault("early", "routed", "store", nth=1),
    "arrived_before_its_data": Fault("early", "arrived", "store", rank=1),
    "drained_before_its_data": Fault("early", "drained", "store", nth=1),
    "row_routed_before_its_data": Fault("early", "src_meta", "store", index=2),
    "staged_before_its_data": Fault("early", "counters", "add", rank=1, index=COUNTERS.staged),
    "finished_before_its_data": Fault("early", "counters", "add", index=COUNTERS.finished),
    "tokens_before_their_data": Fault("early", "counters", "add", index=COUNTERS.tokens_arrived),
    "fc1_before_its_data": Fault("early", "counters", "add", index=COUNTERS.fc1_done),
    "copy_not_made": Fault("drop", "pool", "bulk_write"),
    "copy_not_awaited": Fault("drop", "pool", "bulk_wait"),
    "routed_at_gpu_scope": Fault("narrow", "routed", "store", nth=1),
    "arrived_at_gpu_scope": Fault("narrow", "arrived", "store", rank=1),
    "drained_at_gpu_scope": Fault("narrow", "drained", "store", nth=1),
    "routed_awaited_at_gpu_scope": Fault("narrow", "routed", "wait", index=1),
    "arrived_awaited_at_gpu_scope": Fault("narrow", "arrived", "wait", index=1),
    "drained_awaited_at_gpu_scope": Fault("narrow", "drained", "wait", index=1),
    "routed_not_awaited": Fault("drop", "routed", "wait", index=1),
    "arrived_not_awaited": Fault("drop", "arrived", "wait", index=1),
    "drained_not_awaited": Fault("drop", "drained", "wait", rank=1, index=0),
    "tokens_not_awaited": Fault("drop", "counters", "wait", index=COUNTERS.tokens_arrived),
    "fc1_not_awaited": Fault("drop", "counters", "wait", index=COUNTERS.fc1_done),
    "routing_not_awaited": Fault("drop", "src_meta", "wait", index=2),
    # Of step 2, which clears what step 1 counted.
    "staged_not_cleared": Fault("drop", "counters", "write", nth=1, index=COUNTERS.staged),
    "tokens_not_cleared": Fault("drop", "counters", "write", nth=1, index=COUNTERS.tokens_arrived),
    "fc1_not_cleared": Fault("drop", "counters", "write", nth=1, index=COUNTERS.fc1_done),
    "own_bank_cleared": Fault("bank", "counters", "write", nth=1, index=COUNTERS.fc1_done),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_fault_is_caught_within_a_few_interleavings(fault):
    """Not in each: who signals and who waits may be the same CTA, where nothing is wrong."""
    with pytest.raises(ProtocolError):
        for seed in range(40):
            run(FAULT_SETUP, [FAULT_ROUTING] * 4, seed, fault)


# Few tokens: no signal between placing a row and writing it, and no bulk copies.
FAULTS_OF_FEW = {
    name: FAULTS[name]
    for name in (
        *("routed_not_awaited", "arrived_not_awaited", "arrived_before_its_data"),
        *("tokens_before_their_data", "lost_count_of_tokens"),
    )
} | {"row_not_written": Fault("drop", "pool", "write")}


@pytest.mark.parametrize("num_ctas, most_few", [(4, 1), (2, 2)], ids=["a-cta-each", "two-a-cta"])
@pytest.mark.parametrize("fault", FAULTS_OF_FEW.values(), ids=FAULTS_OF_FEW)
def test_faults_of_few_tokens_are_caught(fault, num_ctas, most_few):
    setup = make_setup(2, num_ctas, num_experts=2, capacity=2, top_k=1, most_few=most_few)
    run(setup, [FAULT_ROUTING] * 4, 0)
    with pytest.raises(ProtocolError):
        for seed in range(40):
            run(setup, [FAULT_ROUTING] * 4, seed, fault)


def test_the_run_that_the_faults_disturb_is_right_without_them():
    for seed in range(10):
        run(FAULT_SETUP, [FAULT_ROUTING] * 4, seed)


def test_a_deadlock_names_phase_and_missing_rank():
    setup = make_setup(num_ranks=3, num_ctas=1, num_experts=3, capacity=1, top_k=1)
    lost = Fault("drop", "routed", "store", rank=2)
    with pytest.raises(ProtocolError, match=r"phase ROUTED for rank 2: routed expected 1, seen"):
        run(setup, [[[[0]], [[1]], [[2]]]], 0, lost)


ROWS = [[3, 0, 40, 9], [1], [0, 0], [100, 1, 1], [8] * 32, [1] * 8 + [0] * 24]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("fc1_slices, fc2_slices", [(16, 28), (4, 3), (1, 7)])
@pytest.mark.parametrize("slices_per_item", [1, 2])
def test_the_fused_list_holds_every_slice_once_and_fc2_behind_its_fc1(
    rows, fc1_slices, fc2_slices, slices_per_item
):
    grids = [schedule.GemmGrid(n, slices_per_item, 32, 132) for n in (fc1_slices, fc2_slices)]
    done = {}
    for gemm, item in schedule.fused_items(rows, *grids):
        tile = item.expert, item.first_row
        for s in range(item.first_slice, item.first_slice + item.num_slices):
            assert (gemm, *tile, s) not in done
            done[gemm, *tile, s] = item.num_rows
        if gemm == 1:
            assert all((0, *tile, s) in done for s in range(fc1_slices))
    assert sum(done.values()) == sum(rows) * (fc1_slices + fc2_slices)


@pytest.mark.parametrize(
    "rows, halved",
    [([1] * 8, (64, 112)), ([1] * 17, (4, 66)), ([8] * 32, (0, 66)), ([0], (0, 0))],
)
def test_items_are_halved_where_few_and_at_the_end(rows, halved):
    """The measured cases of 8 experts hit, and of all 32; of 17, four items are one too many."""
    hit = sum(n > 0 for n in rows)
    assert schedule.num_halved_fused(8 * hit, 14 * hit, 132, 2) == halved


@pytest.mark.parametrize("rows", [[3, 0, 40, 9], [1], [0, 0], [100, 1, 1]], ids=str)
def test_no_item_waits_for_work_behind_it(rows):
    """FC1 of every tile stands before the FC2 items of the tile: a list-order walk never blocks."""
    grid = schedule.GemmGrid(num_slices=4, slices_per_item=2, max_tile_width=32, num_ctas=8)
    done = {}
    for item in schedule.items(rows, grid):
        tile = item.expert, item.first_row
        done[tile] = done.get(tile, 0) + item.num_slices
    assert all(done[item.expert, item.first_row] == 4 for item in schedule.items(rows, grid))
    assert sum(item.num_rows * item.num_slices for item in schedule.items(rows, grid)) == 4 * sum(
        rows
    )

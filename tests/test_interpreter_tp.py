"""The protocol under tp, where sums over the slots travel instead of terms: any interleaving, and
every fault of what tp adds."""

import random
from dataclasses import replace

import pytest
from test_interpreter import CASES, FAULT_ROUTING, make_setup, random_routing

from moe_ep.megakernel.interpreter import Setup, run
from moe_ep.megakernel.memory_model import Fault, ProtocolError


def make_tp_setup(*geometry: int, **options: int) -> Setup:
    setup = make_setup(*geometry, **options)
    workspace = replace(setup.workspace, parallel="tp", num_local_experts=setup.num_experts)
    return replace(setup, workspace=workspace)


@pytest.mark.parametrize("num_ranks, num_seeds", [(1, 60), (2, 60), (3, 30), (8, 2)])
@pytest.mark.parametrize("num_ctas", [1, 2, 5])
def test_random_routings_and_interleavings_keep_every_promise(num_ranks, num_seeds, num_ctas):
    for seed in range(num_seeds):
        rng = random.Random(seed)
        setup = make_tp_setup(
            *(num_ranks, num_ctas, rng.randint(1, 5), 2, 1),
            most_few=rng.randint(1, 2),
        )
        run(setup, [random_routing(rng, setup) for _ in range(3)], seed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_common_cases_hold_between_ordinary_steps(case):
    setup = make_tp_setup(num_ranks=3, num_ctas=2, num_experts=6, capacity=5, top_k=2)
    ordinary = [[[0, 5], [1, 2]], [[3, 4]], [[2, 2], [0, 1]]]
    for seed in range(4):
        run(setup, [ordinary, CASES[case], CASES[case], ordinary], seed)


FAULT_SETUP = make_tp_setup(num_ranks=2, num_ctas=2, num_experts=2, capacity=2, top_k=1)
COUNTERS = FAULT_SETUP.workspace.counters
FAULTS = {
    "weights_not_sent": Fault("drop", "weights", "write"),
    "part_not_written": Fault("drop", "parts", "write"),
    "part_not_written_to_the_peer": Fault("drop", "parts", "write", nth=1),
    "lost_count_of_finished": Fault("drop", "counters", "add", index=COUNTERS.finished),
    "lost_count_of_summed": Fault("drop", "counters", "add", index=COUNTERS.summed),
    "finished_counted_twice": Fault("double", "counters", "add", index=COUNTERS.finished),
    "summed_counted_twice": Fault("double", "counters", "add", index=COUNTERS.summed),
    "finished_in_the_other_bank": Fault("bank", "counters", "add", index=COUNTERS.finished),
    "summed_in_the_other_bank": Fault("bank", "counters", "add", index=COUNTERS.summed),
    "finished_before_its_data": Fault("early", "counters", "add", index=COUNTERS.finished),
    "summed_before_its_data": Fault("early", "counters", "add", index=COUNTERS.summed),
    "finished_not_awaited": Fault("drop", "counters", "wait", index=COUNTERS.finished),
    "finished_awaited_in_the_other_bank": Fault(
        "bank", "counters", "wait", index=COUNTERS.finished
    ),
    "drained_before_its_data": Fault("early", "drained", "store", nth=1),
    "drained_not_awaited": Fault("drop", "drained", "wait", rank=1, index=0),
    "routed_before_its_data": Fault("early", "routed", "store", nth=1),
    # Of step 2, which clears what step 1 counted.
    "finished_not_cleared": Fault("drop", "counters", "write", nth=1, index=COUNTERS.finished),
    "summed_not_cleared": Fault("drop", "counters", "write", nth=1, index=COUNTERS.summed),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_fault_is_caught_within_a_few_interleavings(fault):
    with pytest.raises(ProtocolError):
        for seed in range(40):
            run(FAULT_SETUP, [FAULT_ROUTING] * 4, seed, fault)


def test_the_run_that_the_faults_disturb_is_right_without_them():
    for seed in range(10):
        run(FAULT_SETUP, [FAULT_ROUTING] * 4, seed)

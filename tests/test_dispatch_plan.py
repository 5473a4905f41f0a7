"""The plan against plain Python loops over (rank, token, slot)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep import MoEEpError
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.megakernel.problem import owned_experts


def rows_by_loop(topk_ids: torch.Tensor, local_experts: range) -> list[tuple[int, int, int]]:
    """(expert, token, slot) of every pool row, by sorting tuples."""
    return sorted(
        (expert_idx, token_idx, slot_idx)
        for token_idx, ids in enumerate(topk_ids.tolist())
        for slot_idx, expert_idx in enumerate(ids)
        if expert_idx in local_experts
    )


@st.composite
def routings(draw) -> tuple[torch.Tensor, int, range]:
    num_experts = draw(st.integers(1, 12))
    num_ranks = draw(st.integers(1, num_experts))
    local_experts = owned_experts(num_experts, num_ranks, draw(st.integers(0, num_ranks - 1)))
    num_tokens, top_k = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    ids = st.integers(-2, num_experts - 1)
    flat = draw(st.lists(ids, min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(flat, dtype=dtype).view(num_tokens, top_k), num_experts, local_experts


@given(routings())
@settings(max_examples=200, deadline=None)
def test_rows_are_sorted_by_expert_then_token_then_slot(routing):
    topk_ids, num_experts, local_experts = routing
    plan = DispatchPlan.from_topk_ids(
        topk_ids, num_experts=num_experts, local_experts=local_experts
    )
    rows = rows_by_loop(topk_ids, local_experts)
    num_rows, top_k = len(rows), topk_ids.shape[1]
    experts = [expert_idx for expert_idx, _, _ in rows]
    assert plan.counts.tolist() == [experts.count(expert_idx) for expert_idx in local_experts]
    assert plan.offsets.tolist() == [0, *plan.counts.cumsum(0).tolist()]
    assert plan.src_slot[:num_rows].tolist() == [t * top_k + k for _, t, k in rows]
    assert plan.src_slot[num_rows:].eq(-1).all()
    expected = torch.full(topk_ids.shape, -1, dtype=torch.int32)
    for pool_row, (_, token_idx, slot_idx) in enumerate(rows):
        expected[token_idx, slot_idx] = pool_row
    assert torch.equal(plan.pool_row, expected)
    assert plan.status.tolist() == [0]


def test_example_of_the_module_docstring():
    plan = DispatchPlan.from_topk_ids(
        torch.tensor([[5, 4], [-1, 5], [7, 4]]), num_experts=8, local_experts=range(4, 6)
    )
    assert plan.counts.tolist() == [2, 2]
    assert plan.offsets.tolist() == [0, 2, 4]
    assert plan.src_slot.tolist() == [1, 5, 0, 3, -1, -1]
    assert plan.pool_row.tolist() == [[2, 0], [-1, 3], [-1, 1]]


def test_all_fields_are_int32_for_either_id_dtype():
    for dtype in (torch.int32, torch.int64):
        plan = DispatchPlan.from_topk_ids(torch.zeros(3, 2, dtype=dtype), num_experts=4)
        assert {getattr(plan, name).dtype for name in plan.__dataclass_fields__} == {torch.int32}


@pytest.mark.parametrize("bad_id", [8, 9, 2**31 - 1, 2**32 + 1])
def test_id_that_is_no_expert_is_skipped_and_reported(bad_id):
    topk_ids = torch.tensor([[0, 7], [bad_id, 1], [bad_id, 2]])
    plan = DispatchPlan.from_topk_ids(topk_ids, num_experts=8)
    assert plan.status.tolist() == [3]
    assert plan.pool_row[1, 0] == -1 and plan.pool_row[2, 0] == -1
    assert int(plan.offsets[-1]) == 4
    with pytest.raises(MoEEpConfigError, match=rf"topk_ids\[1, 0\] is {bad_id}.*num_experts 8"):
        plan.check(topk_ids, 8)


def test_check_passes_a_plan_of_valid_ids():
    topk_ids = torch.tensor([[0, -1]])
    DispatchPlan.from_topk_ids(topk_ids, num_experts=1).check(topk_ids, 1)


def test_gather_brings_each_token_to_its_rows():
    topk_ids = torch.tensor([[5, 4], [-1, 5], [7, 4]])
    plan = DispatchPlan.from_topk_ids(topk_ids, num_experts=8, local_experts=range(4, 6))
    hidden_states = torch.tensor([[10.0], [11.0], [12.0]])
    assert plan.gather(hidden_states).flatten().tolist() == [10, 12, 10, 11, 0, 0]


def test_combine_undoes_gather_and_skips_slots_without_a_row():
    """Small integers and powers of two: every sum is exact, so the loop is an exact oracle."""
    gen = torch.Generator().manual_seed(0)
    topk_ids = torch.randint(-1, 6, (17, 3), generator=gen)
    plan = DispatchPlan.from_topk_ids(topk_ids, num_experts=6, local_experts=range(2, 5))
    terms_PH = torch.randint(-8, 9, (51, 4), generator=gen).bfloat16()
    terms_PH[plan.offsets[-1] :] = float("nan")
    weights = 2.0 ** torch.randint(-2, 3, (17, 3), generator=gen)
    expected = torch.zeros(17, 4)
    for pool_row, (_, token_idx, slot_idx) in enumerate(rows_by_loop(topk_ids, range(2, 5))):
        expected[token_idx] += weights[token_idx, slot_idx] * terms_PH[pool_row].float()
    assert torch.equal(plan.combine(terms_PH, weights).float(), expected)


@pytest.mark.parametrize(
    ("topk_ids", "local_experts", "message"),
    [
        (torch.zeros(4, 2), None, "topk_ids.*float32"),
        (torch.zeros(4, dtype=torch.int32), None, r"topk_ids.*\[4\]"),
        (torch.zeros(4, 2, dtype=torch.int32), range(0, 9), "local_experts.*num_experts 8"),
        (torch.zeros(4, 2, dtype=torch.int32), range(0, 8, 2), "local_experts"),
    ],
)
def test_wrong_arguments_are_named(topk_ids, local_experts, message):
    with pytest.raises(MoEEpError, match=message):
        DispatchPlan.from_topk_ids(topk_ids, num_experts=8, local_experts=local_experts)

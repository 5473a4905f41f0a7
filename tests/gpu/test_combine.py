"""The combine kernel against `DispatchPlan.combine`, bit for bit."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.megakernel.combine_sm90 import Combine, CombineConfig

pytestmark = pytest.mark.gpu


def problem(
    num_tokens: int, top_k: int, hidden: int, num_experts: int = 32
) -> tuple[DispatchPlan, torch.Tensor, torch.Tensor]:
    """(plan, terms [T * K, H], topk_weights), on the CPU; a fifth of the slots masked.

    Terms span 2^-8 .. 2^8, so that the order of the sum and a fused multiply-add both show.
    """
    gen = torch.Generator().manual_seed(num_tokens + 7 * top_k)
    ids = torch.rand(num_tokens, num_experts, generator=gen).topk(top_k).indices
    ids[torch.rand(num_tokens, top_k, generator=gen) < 0.2] = -1
    plan = DispatchPlan.from_topk_ids(ids, num_experts=num_experts)
    terms = torch.randn(num_tokens * top_k, hidden, generator=gen)
    terms *= 2.0 ** torch.randint(-8, 9, terms.shape, generator=gen)
    terms = terms.bfloat16()
    terms[int(plan.offsets[-1]) :] = float("nan")
    return plan, terms, torch.rand(num_tokens, top_k, generator=gen)


def run(plan: DispatchPlan, terms: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    num_tokens, top_k = plan.pool_row.shape
    hidden = terms.shape[1]
    out = torch.full((num_tokens, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    combine = Combine(CombineConfig(top_k=top_k, hidden=hidden))
    combine(terms.cuda(), plan.pool_row.cuda(), weights.cuda(), out)
    return out.cpu()


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("num_tokens", [1, 8, 129, 512])
@pytest.mark.parametrize(("top_k", "hidden"), [(8, 7168), (6, 4096), (1, 8), (22, 2880)])
def test_bits_equal_the_specification(num_tokens, top_k, hidden):
    plan, terms, weights = problem(num_tokens, top_k, hidden)
    assert_same_bits(run(plan, terms, weights), plan.combine(terms, weights))


def test_oracle_would_notice_another_order_and_a_fused_multiply_add():
    plan, terms, weights = problem(128, 8, 7168)
    out = plan.combine(terms, weights)
    backwards = DispatchPlan(**{**vars(plan), "pool_row": plan.pool_row.flip(1)})
    assert not torch.equal(backwards.combine(terms, weights.flip(1)), out)
    # One rounding of the exact product and sum, as an FMA makes it: FP64 holds both.
    fused = torch.zeros(128, 7168)
    for k in range(8):
        rows = plan.pool_row[:, k]
        step = fused.double() + terms[rows.clamp(min=0)].double() * weights[:, k, None].double()
        fused = torch.where(rows[:, None] >= 0, step.float(), fused)
    assert not torch.equal(fused.bfloat16(), out)


def test_masked_slots_are_skipped_whatever_row_0_holds():
    plan, terms, weights = problem(64, 4, 256)
    expected = plan.combine(terms, weights)
    owner_of_row_0 = int(plan.src_slot[0]) // 4
    terms[0] = float("nan")
    weights[plan.pool_row < 0] = float("inf")
    got = run(plan, terms, weights)
    others = torch.arange(64) != owner_of_row_0
    assert_same_bits(got[others], expected[others])


def test_token_without_a_row_is_positive_zero():
    pool_row = torch.full((3, 2), -1, dtype=torch.int32)
    empty = torch.empty(0, dtype=torch.int32)
    plan = DispatchPlan(empty, empty, empty, pool_row, empty)
    terms = torch.full((1, 64), float("nan"), dtype=torch.bfloat16)
    got = run(plan, terms, torch.ones(3, 2))
    assert_same_bits(got, torch.zeros(3, 64, dtype=torch.bfloat16))


def test_a_tokens_bits_do_not_depend_on_the_batch():
    plan, terms, weights = problem(300, 8, 2048)
    whole = run(plan, terms, weights)
    for token_idx in (0, 1, 150, 299):
        alone = DispatchPlan(**{**vars(plan), "pool_row": plan.pool_row[token_idx : token_idx + 1]})
        got = run(alone, terms, weights[token_idx : token_idx + 1])
        assert_same_bits(got, whole[token_idx : token_idx + 1])


def test_many_tokens_address_beyond_two_gigabytes():
    """8192 x 8 x 7168 terms are 0.94 GB; 20000 tokens reach past 2^31 bytes."""
    num_tokens, top_k, hidden = 20000, 8, 7168
    pool_row = torch.arange(num_tokens * top_k, dtype=torch.int32, device="cuda").flip(0)
    pool_row = pool_row.view(num_tokens, top_k)
    terms = torch.randint(-8, 9, (num_tokens * top_k, hidden), device="cuda").bfloat16()
    out = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    weights = torch.ones(num_tokens, top_k, device="cuda")
    Combine(CombineConfig(top_k=top_k, hidden=hidden))(terms, pool_row, weights, out)
    expected = terms.flip(0).view(num_tokens, top_k, hidden).sum(1, dtype=torch.float32)
    assert torch.equal(out.float(), expected)


def test_no_tokens_write_nothing():
    out = torch.empty(0, 64, dtype=torch.bfloat16, device="cuda")
    nothing = torch.empty(0, 2, device="cuda")
    terms = torch.empty(1, 64, dtype=torch.bfloat16, device="cuda")
    Combine(CombineConfig(top_k=2, hidden=64))(terms, nothing.int(), nothing, out)
    torch.cuda.synchronize()

"""The permutation kernel against `DispatchPlan`, its specification in plain torch."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.megakernel.permute_sm90 import Permute, PermuteConfig
from moe_ep.megakernel.problem import owned_experts

pytestmark = pytest.mark.gpu

POISON = -77


class Buffers:
    """Outputs of one launch, poisoned: what the kernel does not write stays visible."""

    def __init__(self, num_tokens: int, top_k: int, num_local_experts: int, hidden: int) -> None:
        def poisoned(*shape: int) -> torch.Tensor:
            return torch.full(shape, POISON, dtype=torch.int32, device="cuda")

        num_slots = num_tokens * top_k
        self.counts, self.offsets = poisoned(num_local_experts), poisoned(num_local_experts + 1)
        self.src_slot, self.pool_row = poisoned(num_slots), poisoned(num_tokens, top_k)
        self.status = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.pool = torch.full((num_slots, hidden), POISON, dtype=torch.bfloat16, device="cuda")

    def launch(
        self,
        permute: Permute,
        topk_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        num_experts: int,
        first_expert: int = 0,
    ) -> None:
        permute(
            topk_ids,
            num_experts=num_experts,
            first_expert=first_expert,
            out_counts=self.counts,
            out_offsets=self.offsets,
            out_src_slot=self.src_slot,
            out_pool_row=self.pool_row,
            status=self.status,
            hidden_states=hidden_states,
            out_pool=self.pool,
        )

    def assert_equal(self, plan: DispatchPlan, hidden_states: torch.Tensor) -> None:
        num_rows = int(plan.offsets[-1])
        for name in ("counts", "offsets", "pool_row", "status"):
            assert torch.equal(getattr(self, name).cpu(), getattr(plan, name)), name
        assert torch.equal(self.src_slot[:num_rows].cpu(), plan.src_slot[:num_rows])
        assert self.src_slot[num_rows:].eq(POISON).all()
        expected = plan.gather(hidden_states.cpu())[:num_rows].view(torch.int16)
        assert torch.equal(self.pool[:num_rows].cpu().view(torch.int16), expected)
        assert self.pool[num_rows:].eq(POISON).all()


def distinct_rows(num_tokens: int, hidden: int) -> torch.Tensor:
    """BF16 [T, H]; the bits of an element name its token and its column."""
    numbers = torch.arange(num_tokens * hidden, dtype=torch.int64).mul(40503) % 0x7F00
    return numbers.to(torch.int16).view(torch.bfloat16).view(num_tokens, hidden).cuda()


def random_ids(
    num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, masked: float = 0.1
) -> torch.Tensor:
    """[T, K] on the GPU; a tenth of the slots masked, by any negative number."""
    gen = torch.Generator().manual_seed(num_tokens * 1000 + num_experts)
    scores = torch.rand(num_tokens, num_experts, generator=gen)
    ids = scores.topk(top_k).indices
    is_masked = torch.rand(num_tokens, top_k, generator=gen) < masked
    return torch.where(is_masked, -1 - ids, ids).to(dtype).cuda()


def check(
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    local_experts: range | None = None,
    hidden: int = 64,
) -> Buffers:
    local_experts = range(num_experts) if local_experts is None else local_experts
    num_tokens, top_k = topk_ids.shape
    config = PermuteConfig(
        num_local_experts=len(local_experts),
        top_k=top_k,
        hidden=hidden,
        ids_are_int64=topk_ids.dtype == torch.int64,
    )
    hidden_states = distinct_rows(num_tokens, hidden)
    buffers = Buffers(num_tokens, top_k, len(local_experts), hidden)
    buffers.launch(Permute(config), topk_ids, hidden_states, num_experts, local_experts.start)
    plan = DispatchPlan.from_topk_ids(
        topk_ids.cpu(), num_experts=num_experts, local_experts=local_experts
    )
    buffers.assert_equal(plan, hidden_states)
    return buffers


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 31, 128, 133, 265, 512, 1000, 8192])
def test_any_number_of_tokens(num_tokens, dtype):
    check(random_ids(num_tokens, 8, 32, dtype), num_experts=32)


@pytest.mark.parametrize("hidden", [8, 2048, 2880, 7168, 8192, 16384])
@pytest.mark.parametrize("num_tokens", [3, 140])
def test_any_width_of_a_token(num_tokens, hidden):
    check(random_ids(num_tokens, 8, 32, torch.int32), num_experts=32, hidden=hidden)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 8), (384, 6), (896, 16), (7, 1)])
def test_slots_of_other_ranks_are_skipped(num_experts, top_k, rank):
    ids = random_ids(300, top_k, num_experts, torch.int32)
    check(ids, num_experts=num_experts, local_experts=owned_experts(num_experts, 3, rank))


@pytest.mark.parametrize("num_experts", [1, 31, 32, 33, 384, 896])
def test_any_number_of_local_experts(num_experts):
    check(random_ids(50, 1, num_experts, torch.int64), num_experts=num_experts)


def test_all_tokens_to_one_expert():
    check(torch.full((8192, 8), 5, dtype=torch.int32, device="cuda"), num_experts=32)


def test_all_slots_masked():
    check(torch.full((40, 8), -3, dtype=torch.int64, device="cuda"), num_experts=32)


def test_repeated_expert_within_a_token_gives_two_rows():
    check(torch.tensor([[2, 2, 0], [2, -1, 2]], device="cuda"), num_experts=4)


def test_no_tokens_give_zero_counts():
    buffers = Buffers(0, 8, 32, 64)
    config = PermuteConfig(num_local_experts=32, top_k=8, hidden=64, ids_are_int64=False)
    ids = torch.empty(0, 8, dtype=torch.int32, device="cuda")
    buffers.launch(Permute(config), ids, distinct_rows(0, 64), 32)
    assert buffers.counts.eq(0).all() and buffers.offsets.eq(0).all()


@pytest.mark.parametrize("bad_id", [32, 33, 2**31 - 1, 2**32 + 1])
def test_id_that_is_no_expert_is_skipped_and_its_first_slot_reported(bad_id):
    ids = random_ids(500, 8, 32, torch.int64)
    ids[313, 5] = ids[313, 6] = ids[499, 0] = bad_id
    buffers = check(ids, num_experts=32)
    assert buffers.status.tolist() == [313 * 8 + 5 + 1]


def test_status_stays_until_the_caller_clears_it():
    config = PermuteConfig(num_local_experts=32, top_k=8, hidden=64, ids_are_int64=False)
    permute, buffers = Permute(config), Buffers(20, 8, 32, 64)
    ids = random_ids(20, 8, 32, torch.int32)
    bad_ids = ids.clone()
    bad_ids[3, 1] = 99
    hidden_states = distinct_rows(20, 64)
    for given in (bad_ids, ids):
        buffers.launch(permute, given, hidden_states, 32)
        assert buffers.status.tolist() == [3 * 8 + 1 + 1]


def test_thousand_repeats_give_the_same_bits():
    config = PermuteConfig(num_local_experts=32, top_k=8, hidden=64, ids_are_int64=False)
    permute, buffers = Permute(config), Buffers(512, 8, 32, 64)
    ids, hidden_states = random_ids(512, 8, 32, torch.int32), distinct_rows(512, 64)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    buffers.launch(permute, ids, hidden_states, 32)
    first = [t.clone() for t in (buffers.src_slot, buffers.pool_row, buffers.pool)]
    for _ in range(1000):
        for tensor in (buffers.src_slot, buffers.pool_row, buffers.pool):
            tensor.fill_(POISON)
        buffers.launch(permute, ids, hidden_states, 32)
        for tensor, expected in zip(
            (buffers.src_slot, buffers.pool_row, buffers.pool), first, strict=True
        ):
            differs |= tensor.ne(expected).any()
    assert not differs


def test_graph_replays_with_other_routing():
    num_tokens, hidden = 128, 256
    config = PermuteConfig(num_local_experts=32, top_k=8, hidden=hidden, ids_are_int64=False)
    permute, buffers = Permute(config), Buffers(num_tokens, 8, 32, hidden)
    ids = random_ids(num_tokens, 8, 32, torch.int32)
    hidden_states = distinct_rows(num_tokens, hidden)
    buffers.launch(permute, ids, hidden_states, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.launch(permute, ids, hidden_states, 32)
    for expert_shift in (1, 7, 30):
        ids.copy_(torch.where(ids >= 0, (ids + expert_shift) % 32, ids))
        buffers.src_slot.fill_(POISON)
        buffers.pool.fill_(POISON)
        graph.replay()
        plan = DispatchPlan.from_topk_ids(ids.cpu(), num_experts=32)
        buffers.assert_equal(plan, hidden_states)


def test_launches_back_to_back_do_not_overtake_each_other():
    """Programmatic launches overlap; each must still see what the one before wrote.

    The last token goes to expert 0, the others to expert 1: a rotation of the rows by one.
    """
    num_tokens, hidden, num_launches = 600, 2048, 50
    config = PermuteConfig(num_local_experts=2, top_k=1, hidden=hidden, ids_are_int64=False)
    permute = Permute(config)
    ids = torch.ones(num_tokens, 1, dtype=torch.int32, device="cuda")
    ids[-1] = 0
    start = distinct_rows(num_tokens, hidden)
    a, b = Buffers(num_tokens, 1, 2, hidden), Buffers(num_tokens, 1, 2, hidden)
    a.pool.copy_(start)
    for _ in range(num_launches // 2):
        b.launch(permute, ids, a.pool, 2)
        a.launch(permute, ids, b.pool, 2)
    expected = start.view(torch.int16).roll(num_launches, 0)
    assert torch.equal(a.pool.view(torch.int16), expected)

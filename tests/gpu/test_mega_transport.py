"""Dispatch, scale by expert and combine in one launch, over virtual ranks, bit for bit.

Every expert scales by another factor and every row encodes (rank, token), so that a row that goes
to the wrong expert, slot or rank changes bits. The oracle is plain torch on the CPU.
Alone: pytest -m gpu tests/gpu/test_mega_transport.py
"""

import functools

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.megakernel import protocol
from moe_ep.megakernel.fused_transport import FusedTransport
from moe_ep.megakernel.interpreter import make_plan
from moe_ep.megakernel.ping_pong import PingPong
from moe_ep.megakernel.problem import owned_experts
from moe_ep.reference import combine_terms

pytestmark = pytest.mark.gpu

NUM_EXPERTS, TOP_K, HIDDEN, CAPACITY = 13, 4, 1152, 37
RANKS = [1, 2, 4, 8]


class Stage:
    """A transport of `num_ranks` virtual ranks (one: plain), its tensors and its oracle.

    With a `group` of real ranks: its own rank of them, on its GPU.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        group: EpGroup | None = None,
        top_k: int = TOP_K,
        hidden: int = HIDDEN,
        num_experts: int = NUM_EXPERTS,
        capacity: int = CAPACITY,
        ids_dtype: torch.dtype = torch.int32,
        **options,
    ) -> None:
        if group is None:
            group = EpGroup.single("cuda") if num_ranks == 1 else EpGroup.virtual(num_ranks)
        self.group = group
        # Ranks whose tensors are here.
        self.ranks = list(range(num_ranks)) if group.is_virtual else [group.rank]
        self.num_ranks, self.num_experts, self.capacity = num_ranks, num_experts, capacity
        self.transport = FusedTransport(
            self.group,
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens_per_rank=capacity,
            ids_are_int64=ids_dtype == torch.int64,
            **options,
        )
        gen = torch.Generator().manual_seed(num_ranks)
        slots = (num_ranks, capacity, top_k)
        self.x = torch.randn(num_ranks, capacity, hidden, generator=gen).bfloat16()
        self.scale = torch.rand(num_experts, generator=gen) + 0.5
        self.weights = torch.rand(slots, generator=gen)
        x = self.x[self.ranks].cuda()
        self.on_gpu = {
            "x": x,
            "topk_ids": torch.full((len(x), capacity, top_k), -1, dtype=ids_dtype, device="cuda"),
            "topk_weights": self.weights[self.ranks].cuda(),
            "num_tokens": torch.zeros(len(x), dtype=torch.int32, device="cuda"),
            "scale": self.scale.cuda(),
            "out": torch.zeros_like(x),
        }

    def set_routing(self, ids: torch.Tensor, num_tokens: list[int]) -> None:
        self.on_gpu["topk_ids"].copy_(ids[self.ranks])
        self.on_gpu["num_tokens"].copy_(torch.tensor(num_tokens)[self.ranks])
        self.on_gpu["out"].fill_(float("nan"))

    def launch(self, **options) -> torch.Tensor:
        self.transport.forward(**self.on_gpu, **options)
        return self.on_gpu["out"]

    def expected(self, ids: torch.Tensor, num_tokens: list[int]) -> list[torch.Tensor]:
        outs = []
        for rank, count in enumerate(num_tokens):
            own = ids[rank, :count].long()
            own = torch.where(own < self.num_experts, own, -1)
            factor = self.scale[own.clamp(min=0)]
            terms = (self.x[rank, :count, None].float() * factor[..., None]).bfloat16()
            outs.append(combine_terms(terms, own, self.weights[rank, :count]))
        return outs

    def check(self, out: torch.Tensor, ids: torch.Tensor, num_tokens: list[int]) -> None:
        all_expected = self.expected(ids, num_tokens)
        for rank, got in zip(self.ranks, out.cpu(), strict=True):
            assert_same_bits(got[: num_tokens[rank]], all_expected[rank], rank)
            assert got[num_tokens[rank] :].isnan().all(), f"rank {rank} wrote past its tokens"

    def run(self, ids: torch.Tensor, num_tokens: list[int], **options) -> None:
        self.set_routing(ids, num_tokens)
        self.check(self.launch(**options), ids, num_tokens)
        self.transport.check()


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, rank: int) -> None:
    differs = got.view(torch.int16) != expected.view(torch.int16)
    if differs.any():
        first = differs.nonzero()[0].tolist()
        raise AssertionError(
            f"rank {rank}: {int(differs.sum())} of {differs.numel()} differ, first at {first}: "
            f"{got[tuple(first)]} instead of {expected[tuple(first)]}"
        )


@functools.cache
def shared_stage(num_ranks: int) -> Stage:
    return Stage(num_ranks)


@pytest.fixture
def fresh_stage():
    """Makes stages with memory of their own, for tests that break it or look at its first steps.

    Stages of one geometry share their memory, also with `shared_stage`; this one has another.
    """
    stages = []

    def make(num_ranks: int, **options) -> Stage:
        stages.append(Stage(num_ranks, capacity=CAPACITY + 1, **options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.transport.destroy()


def random_ids(stage: Stage, seed: int, masked: float = 0.1) -> torch.Tensor:
    """Repeated experts included; a tenth of the slots masked."""
    gen = torch.Generator().manual_seed(seed)
    shape = stage.weights.shape
    ids = torch.randint(0, stage.num_experts, shape, generator=gen)
    ids[torch.rand(shape, generator=gen) < masked] = -1
    return ids


def filled(stage: Stage, expert: int) -> torch.Tensor:
    return torch.full(stage.weights.shape, expert)


def of_one_rank(stage: Stage) -> torch.Tensor:
    experts = owned_experts(stage.num_experts, stage.num_ranks, stage.num_ranks - 1)
    return random_ids(stage, 1, masked=0.0) % len(experts) + experts.start


CASES = {
    "full": lambda s: (random_ids(s, 2), [s.capacity] * s.num_ranks),
    "odd_and_uneven": lambda s: (random_ids(s, 3), [(7 * r + 5) % 36 for r in range(s.num_ranks)]),
    "first_rank_empty": lambda s: (random_ids(s, 4), [0] + [9] * (s.num_ranks - 1)),
    "last_rank_empty": lambda s: (random_ids(s, 5), [9] * (s.num_ranks - 1) + [0]),
    "no_tokens_at_all": lambda s: (random_ids(s, 6), [0] * s.num_ranks),
    "one_token_in_all": lambda s: (random_ids(s, 10), [0] * (s.num_ranks - 1) + [1]),
    "one_token_each": lambda s: (random_ids(s, 7), [1] * s.num_ranks),
    "all_to_one_expert": lambda s: (filled(s, 5), [s.capacity] * s.num_ranks),
    "all_to_one_rank": lambda s: (of_one_rank(s), [s.capacity] * s.num_ranks),
    "few_experts": lambda s: (random_ids(s, 8) // 6 * 6, [20] * s.num_ranks),
    "all_masked": lambda s: (filled(s, -1), [11] * s.num_ranks),
    "mostly_masked": lambda s: (random_ids(s, 9, masked=0.8), [s.capacity] * s.num_ranks),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_bits_equal_plain_torch(num_ranks, case):
    stage = shared_stage(num_ranks)
    stage.run(*CASES[case](stage))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_pool_holds_every_row_where_the_protocol_places_it(num_ranks):
    stage = shared_stage(num_ranks)
    ids, num_tokens = CASES["odd_and_uneven"](stage)
    stage.run(ids, num_tokens)
    pool, meta = (stage.transport.memory.region(n).cpu() for n in ("pool", "src_meta"))
    for rank in range(num_ranks):
        order = [protocol.source_rank(rank, i, num_ranks) for i in range(num_ranks)]
        routed = {r: ids[r, : num_tokens[r]].tolist() for r in order}
        plan = make_plan(routed, owned_experts(NUM_EXPERTS, num_ranks, rank), 32)
        for (source, token, slot), row in plan.row_of.items():
            index = protocol.slot_index(source, token, slot, CAPACITY, TOP_K)
            assert int(meta[rank, row]) & protocol.SLOT_MASK == index
            assert torch.equal(pool[rank, row], stage.x[source, token])


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, dict(hidden=7168, top_k=8, num_experts=256, capacity=128)),
        (1, dict(hidden=7168, top_k=8, num_experts=384, capacity=8)),
        (4, dict(hidden=8, top_k=1, num_experts=4)),
        (2, dict(hidden=2880, top_k=22, num_experts=65)),
        (2, dict(ids_dtype=torch.int64)),
        (1, dict(ids_dtype=torch.int64)),
        (4, dict(is_bounded=False)),
        (2, dict(ctas_per_rank=1)),
        (2, dict(max_tile_width=8)),
        # More ranks than a warp has lanes, three CTAs each.
        (40, dict(hidden=64, top_k=2, num_experts=80, capacity=3)),
    ],
    ids=str,
)
def test_bits_hold_for_other_geometries_and_builds(num_ranks, options):
    stage = Stage(num_ranks, **options)
    for seed in range(3):
        count = stage.capacity if seed == 0 else (11 * seed) % stage.capacity
        stage.run(random_ids(stage, seed), [count] * num_ranks)
    stage.transport.destroy()


def run_500_calls(stage: Stage) -> None:
    """Back to back: everything is on the GPU before the first."""
    calls = []
    for seed in range(500):
        counts = [(seed * (r + 3)) % (CAPACITY + 1) for r in range(stage.num_ranks)]
        ids = random_ids(stage, seed)
        on_gpu = torch.tensor(counts).int()[stage.ranks].cuda()
        calls.append((ids, counts, ids.int()[stage.ranks].cuda(), on_gpu))
    outs = []
    for _, _, ids, num_tokens in calls:
        stage.on_gpu |= {"topk_ids": ids, "num_tokens": num_tokens}
        stage.on_gpu["out"] = torch.full_like(stage.on_gpu["out"], float("nan"))
        outs.append(stage.launch())
    for out, (ids, counts, _, _) in list(zip(outs, calls, strict=True))[::7]:
        stage.check(out, ids, counts)
    stage.transport.check()


def run_10000_calls(stage: Stage) -> None:
    """A hundred calls, a hundred times each in an order that changes: right, the same bits each
    time, in flat memory."""
    calls = []
    for seed in range(100):
        counts = [(seed * (r + 3) + 5 * r) % (stage.capacity + 1) for r in range(stage.num_ranks)]
        ids = random_ids(stage, seed)
        stage.run(ids, counts)
        on_gpu = torch.tensor(counts).int()[stage.ranks].cuda()
        inputs = {"topk_ids": stage.on_gpu["topk_ids"].clone(), "num_tokens": on_gpu}
        calls.append((inputs, stage.on_gpu["out"].clone()))
    out = stage.on_gpu["out"]
    stage.on_gpu |= calls[0][0]  # lets go of the tensors that stood there
    num_differing = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(10_000):
        inputs, expected = calls[(37 * i + i // 100) % 100]
        stage.on_gpu |= inputs
        out.fill_(float("nan"))
        stage.launch()
        num_differing += (out.view(torch.int16) != expected.view(torch.int16)).sum()
    stage.transport.check()
    assert int(num_differing) == 0
    assert torch.cuda.memory_allocated() == before


def replay_every_case(stage: Stage) -> None:
    """By one captured graph."""
    stage.run(*CASES["full"](stage))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage.launch()
    for case in CASES.values():
        ids, num_tokens = case(stage)
        stage.set_routing(ids, num_tokens)
        graph.replay()
        stage.check(stage.on_gpu["out"], ids, num_tokens)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_500_calls_back_to_back_with_changing_tokens_and_routing(num_ranks):
    run_500_calls(shared_stage(num_ranks))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_10000_calls_of_changing_tokens_and_routing_repeat_their_bits_in_flat_memory(num_ranks):
    run_10000_calls(shared_stage(num_ranks))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_captured_graph_follows_routing_changed_between_replays(num_ranks):
    replay_every_case(shared_stage(num_ranks))


@pytest.mark.parametrize("late_rank", [0, 3])
def test_bits_hold_when_a_rank_comes_late(late_rank):
    stage = shared_stage(4)
    stage.run(*CASES["odd_and_uneven"](stage), late_rank=late_rank, late_s=2e-3)


def test_bits_hold_beside_a_busy_stream():
    stage = shared_stage(4)
    busy = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for case in ("full", "odd_and_uneven", "all_to_one_rank"):
        with torch.cuda.stream(busy):
            for _ in range(20):
                a = (a @ a) * 1e-3
        stage.run(*CASES[case](stage))


def test_steps_may_wrap_around(fresh_stage):
    stage = fresh_stage(2)
    last = 2**31 - 3
    for name in ("step", "routed", "arrived", "drained"):
        stage.transport.memory.region(name).fill_(last)
    for seed in range(6):
        stage.run(random_ids(stage, seed), [20, 30])
    assert stage.transport.memory.region("step").flatten().tolist() == [last + 6 - 2**32] * 2


def test_both_banks_hold_what_the_last_two_steps_counted(fresh_stage):
    stage = fresh_stage(2)
    for seed in range(3):
        stage.run(random_ids(stage, seed), [20, 30])
    counters = stage.transport.memory.layout.counters
    banks = stage.transport.memory.region("counters").cpu()
    rows = [int(((random_ids(stage, 2)[r, : (20, 30)[r]]) >= 0).sum()) for r in range(2)]
    used, other = banks[:, 3 & 1], banks[:, 1 - (3 & 1)]
    arrived = used[:, counters.tokens_arrived : counters.fc1_done]
    assert int(arrived.sum()) == sum(rows)
    assert not other.any()


@pytest.mark.parametrize("absent_rank", [0, 1, 3])
def test_a_rank_that_never_comes_is_named_and_the_gpu_is_usable_at_once(fresh_stage, absent_rank):
    stage = fresh_stage(4, timeout_s=0.2)
    ids, num_tokens = CASES["full"](stage)
    stage.run(ids, num_tokens)
    stage.set_routing(ids, num_tokens)
    stage.launch(late_rank=absent_rank, late_s=-1)
    torch.cuda.synchronize()
    with pytest.raises(MoEEpTimeoutError, match=f"phase routed for rank {absent_rank}") as error:
        stage.transport.check()
    assert error.value.ranks == (absent_rank,)
    assert (error.value.phase, error.value.step) == ("routed", 2)
    assert (error.value.expected, error.value.seen) == (2, 1)
    stage.transport.destroy()
    again = fresh_stage(4, timeout_s=0.2)
    again.run(ids, num_tokens)


def test_who_comes_after_the_others_gave_up_sums_nothing_and_is_told(fresh_stage):
    stage = fresh_stage(4, timeout_s=0.2)
    stage.set_routing(*CASES["full"](stage))
    out = stage.launch(late_rank=2, late_s=0.6)
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(MoEEpTimeoutError, match="rank 2 waited in phase drained for rank") as error:
        stage.transport.check()
    assert 2 in error.value.ranks and len(error.value.ranks) > 1
    # Nobody but the late rank said that its terms had come.
    drained = stage.transport.memory.region("drained").cpu()
    assert drained.tolist() == [[0, 0, 1, 0]] * 4


def test_a_refusing_rank_is_named_to_all_and_the_next_call_works(fresh_stage):
    stage = fresh_stage(4)
    ids, num_tokens = CASES["full"](stage)
    stage.set_routing(ids, [5, -3, 5, 5])
    out = stage.launch()
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(MoEEpConfigError, match=r"rank 1 refused its input \(code 2\)"):
        stage.transport.check()
    stage.run(ids, num_tokens)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_an_id_that_is_no_expert_is_masked_and_named_later(fresh_stage, num_ranks, ids_dtype):
    stage = fresh_stage(num_ranks, ids_dtype=ids_dtype)
    ids = random_ids(stage, 1)
    ids[-1, 2, 3] = NUM_EXPERTS
    num_tokens = [5] * num_ranks
    stage.set_routing(ids, num_tokens)
    stage.check(stage.launch(), ids, num_tokens)
    with pytest.raises(MoEEpConfigError, match=rf"topk_ids\[2, 3\] was {NUM_EXPERTS} in an"):
        stage.transport.check()
    stage.run(random_ids(stage, 2), num_tokens)


def test_transports_of_one_geometry_share_a_workspace_in_turn():
    stages = [Stage(2), Stage(2)]
    assert stages[0].transport.memory is stages[1].transport.memory
    for seed in range(4):
        stages[seed % 2].run(random_ids(stages[0], seed), [CAPACITY, 3])
    for stage in stages:
        stage.transport.destroy()


def test_a_flag_goes_to_and_fro_between_two_virtual_ranks():
    ping_pong = PingPong(EpGroup.virtual(2))
    for num_rounds in (1, 500, 500):
        assert 0.1 < ping_pong.round_trip_us(num_rounds) < 1000
    ping_pong.destroy()
    with pytest.raises(MoEEpConfigError, match="between 2 ranks, the group has 4"):
        PingPong(EpGroup.virtual(4))

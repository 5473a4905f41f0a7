"""The fused layer under tp: every rank has a part of all experts, FP32 sums travel.

The bits are those of the split layer's steps (FP32 terms of the grouped GEMMs, sums over the slots,
then over the ranks in torch), the values within the contract of FP64. One H200: pytest -n 4
tests/gpu/test_mega_tp.py. Ranks are virtual, in one launch; some 40 kernels are compiled.
"""

import functools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import joined
from test_mega import (
    CAPACITY,
    MAX_TERM_ERROR,
    ROUTINGS,
    SHAPE,
    Layer,
    assert_same_bits,
    deal,
    part_of,
    tokens,
    with_ids,
)

from moe_ep import MegaConfig, MoEEpLayer
from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.comm.transport import to_slots
from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.grouped import GroupedExperts
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.formats import TILE_FORMATS, prepare
from moe_ep.megakernel.problem import MoEShape
from moe_ep.reference import (
    combine_parts,
    moe_oracle_fp64,
    moe_reference_tp,
    terms_oracle_fp64,
)
from moe_ep.weights import MoEWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

RANKS = [1, 2, 4, 8]


class TpLayer(Layer):
    """The fused layer of `num_ranks` virtual ranks (one: plain), each with a part of I."""

    def __init__(self, num_ranks: int, name: str = "nvfp4", **options) -> None:
        super().__init__(num_ranks, name, parallel="tp", **options)
        self.shards = [self.weights.shard("tp", rank, num_ranks) for rank in range(num_ranks)]
        self.prepared = joined([prepare(shard) for shard in self.shards])

    def expected(self, inputs: MoEInputs) -> torch.Tensor:
        """BF16 [T, H] by the split layer's steps."""
        total = torch.zeros_like(inputs.hidden_states, dtype=torch.float32)
        for experts in self.experts:
            total += part_of_rank(experts, inputs, self.shape)
        return total.bfloat16()

    @functools.cached_property
    def experts(self) -> list[GroupedExperts]:
        return [GroupedExperts(self.shape, shard, None) for shard in self.shards]

    def full_terms(self, inputs: MoEInputs) -> torch.Tensor:
        """FP64 [T, K, H] of the last call: the FP32 terms of all ranks, added."""
        terms = self.mega.memory.region("terms").double().sum(0)
        counts = [part.num_tokens for part in deal(inputs, self.num_ranks)]
        return torch.cat([terms[rank, :count] for rank, count in enumerate(counts)])


def part_of_rank(experts: GroupedExperts, inputs: MoEInputs, shape: MoEShape) -> torch.Tensor:
    """FP32 [T, H]: one rank's sums over the slots."""
    ids = inputs.topk_ids
    plan = DispatchPlan.from_topk_ids(
        ids, num_experts=shape.num_experts, local_experts=range(shape.num_experts)
    )
    rows = plan.counts.tolist()
    slots = plan.src_slot[: sum(rows)].long()
    terms = experts(inputs.hidden_states[slots // shape.top_k], rows, plan.offsets)
    return combine_parts(to_slots(terms, slots, *ids.shape), ids, inputs.topk_weights)


@functools.cache
def shared_layer(num_ranks: int) -> TpLayer:
    return TpLayer(num_ranks)


def on_cpu(inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.cpu() for tensor in vars(inputs).values()))


def assert_correct(layer: TpLayer, inputs: MoEInputs) -> None:
    """Terms within the contract of FP64, the output at most twice as far as plain torch, and the
    bits of the split layer's steps."""
    out, host = layer.run(inputs), on_cpu(inputs)
    assert_same_bits(out, layer.expected(inputs))
    is_used = host.topk_ids >= 0
    exact = terms_oracle_fp64(host, layer.weights.to("cpu"), layer.shape)[is_used]
    terms = layer.full_terms(inputs).cpu()[is_used]
    assert (terms - exact).norm() / exact.norm() < MAX_TERM_ERROR
    exact = moe_oracle_fp64(host, layer.weights.to("cpu"), layer.shape)
    plain = moe_reference_tp(host, [shard.to("cpu") for shard in layer.shards], layer.shape)
    assert (out.cpu().double() - exact).norm() <= 2 * (plain.double() - exact).norm()


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", RANKS)
def test_any_number_of_ranks_is_right(num_ranks):
    assert_correct(shared_layer(num_ranks), tokens(CAPACITY, 1))


@pytest.mark.parametrize("name", TILE_FORMATS)
def test_every_format_is_right(name):
    assert_correct(TpLayer(2, name), tokens(CAPACITY, 2))


@pytest.mark.parametrize(
    "kind, has_bias, num_ranks",
    [("gpt_oss", True, 2), ("situ", True, 1), ("relu2", False, 4), ("relu2", True, 4)],
)
def test_activations_and_biases_are_right(kind, has_bias, num_ranks):
    """FC2's bias is in the sum once."""
    layer = TpLayer(num_ranks, shape=replace(SHAPE, activation=kind), has_bias=has_bias)
    assert_correct(layer, tokens(CAPACITY, 3))


def test_more_slots_than_are_loaded_at_once_are_right():
    shape = MoEShape(num_experts=13, top_k=11, hidden=288, intermediate=320)
    assert_correct(TpLayer(2, shape=shape), tokens(CAPACITY, 4, shape))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_routing_is_right(num_ranks, routing):
    inputs = tokens(CAPACITY, 5)
    inputs = with_ids(inputs, ROUTINGS[routing](inputs.topk_ids))
    layer, expected = shared_layer(num_ranks), shared_layer(num_ranks).expected(inputs)
    # The builds for the capacity and for as few tokens as there are.
    for bound in (None, -(-CAPACITY // num_ranks)):
        assert_same_bits(layer.run(inputs, max_tokens=bound), expected)


# ---- the same bits at one number of ranks --------------------------------------------------------


@pytest.mark.parametrize("counts", [(0, 61), (61, 0), (1, 60), (0, 0), (1, 1)], ids=str)
def test_bits_do_not_depend_on_how_tokens_are_dealt_out(counts):
    inputs = part_of(tokens(CAPACITY, 6), slice(0, sum(counts)))
    parts = [part_of(inputs, slice(0, counts[0])), part_of(inputs, slice(counts[0], sum(counts)))]
    layer = shared_layer(2)
    assert_same_bits(layer.run_parts(parts), layer.expected(inputs))
    layer.mega.check()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(num_ranks):
    layer, inputs = shared_layer(num_ranks), tokens(CAPACITY, 7)
    expected = layer.run(inputs)
    for first, end in ((0, 1), (30, 31), (CAPACITY - 1, CAPACITY), (0, 2), (3, 11), (20, 53)):
        part = part_of(inputs, slice(first, end))
        assert_same_bits(layer.run(part), expected[first:end])


def test_every_build_of_a_capacity_gives_the_same_bits():
    layer, inputs = TpLayer(2, capacity=400), tokens(400, 8)
    assert len(layer.mega.buckets) > 2
    expected = layer.run(inputs)
    assert_same_bits(expected, layer.expected(inputs))
    for bucket in layer.mega.buckets:
        part = part_of(inputs, slice(0, bucket.max_tokens))
        out = layer.run(part, max_tokens=bucket.max_tokens)
        assert_same_bits(out, expected[: bucket.max_tokens])


@pytest.mark.parametrize("late_rank", [0, 3])
def test_bits_hold_when_a_rank_comes_late(late_rank):
    layer, inputs = shared_layer(4), tokens(CAPACITY, 9)
    out = layer.run(inputs, late_rank=late_rank, late_s=2e-3)
    assert_same_bits(out, layer.expected(inputs))


def test_a_graph_follows_other_routing_and_fewer_tokens():
    layer, num_ranks = shared_layer(4), 4
    count = num_ranks * CAPACITY
    static = MoEInputs(
        *(t.clone().unflatten(0, (num_ranks, -1)) for t in vars(tokens(count, 10)).values())
    )
    out = torch.zeros_like(static.hidden_states)
    full = torch.full((num_ranks,), CAPACITY, dtype=torch.int32, device="cuda")
    layer.launch(static, out, num_tokens=full)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(static, out, num_tokens=full)
    for seed, used in ((11, count), (12, 5), (13, 0), (14, count - 1)):
        inputs = tokens(count, seed)
        ids = inputs.topk_ids.clone()
        ids[used:] = -1
        static.hidden_states.view(count, -1).copy_(inputs.hidden_states)
        static.topk_ids.view(count, -1).copy_(ids)
        static.topk_weights.view(count, -1).copy_(inputs.topk_weights)
        for _ in range(10):
            out.fill_(float("nan"))
            graph.replay()
        assert_same_bits(out.view(count, -1), layer.expected(with_ids(inputs, ids)))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_300_calls_back_to_back_with_changing_tokens_and_routing(num_ranks):
    layer, inputs = shared_layer(num_ranks), tokens(CAPACITY, 15)
    expected, outs = layer.run(inputs), []
    for call in range(300):
        part = slice(call % 13, (7 * call) % (CAPACITY + 1))
        outs.append((part, layer.run(part_of(inputs, part))))
    torch.cuda.synchronize()
    layer.mega.check()
    for part, out in outs:
        assert_same_bits(out, expected[part])


# ---- failures, and the layer ---------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named_and_a_refusing_one_too():
    layer, inputs = TpLayer(4, capacity=CAPACITY + 1, timeout_s=0.2), tokens(CAPACITY, 16)
    x = torch.zeros(4, layer.capacity, SHAPE.hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(4, layer.capacity, SHAPE.top_k, dtype=torch.int32, device="cuda")
    out = torch.full_like(x, float("nan"))
    counts = torch.tensor([5, -3, 5, 5], dtype=torch.int32, device="cuda")
    layer.launch(MoEInputs(x, ids, ids.float()), out, num_tokens=counts)
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(MoEEpConfigError, match=r"rank 1 refused its input \(code 2\)"):
        layer.mega.check()
    assert_same_bits(layer.run(inputs), layer.expected(inputs))
    layer.run_parts(deal(inputs, 4), late_rank=3, late_s=-1.0)
    torch.cuda.synchronize()
    with pytest.raises(MoEEpTimeoutError, match="for rank 3") as error:
        layer.mega.check()
    assert error.value.ranks == (3,)
    layer.mega.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_id_that_is_no_expert_is_masked_and_named_later(num_ranks):
    layer, inputs = shared_layer(num_ranks), tokens(CAPACITY, 18)
    ids = inputs.topk_ids.clone()
    ids[2, 3] = SHAPE.num_experts
    bad = with_ids(inputs, ids)
    if num_ranks == 1:
        layer.launch(bad, torch.empty_like(inputs.hidden_states))
    else:
        layer.run_parts(deal(bad, num_ranks))
    torch.cuda.synchronize()
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[2, 3\] was 13"):
        layer.mega.check()
    ids[2, 3] = -1
    inputs = with_ids(inputs, ids)
    assert_same_bits(layer.run(inputs), layer.expected(inputs))


def test_a_layer_of_one_tp_rank_has_the_bits_of_its_fused_kernel():
    fused, inputs = shared_layer(1), tokens(CAPACITY, 17)
    weights: MoEWeights = fused.shards[0]
    layer = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=CAPACITY, backend=MegaConfig())
    assert_same_bits(layer.forward(inputs), fused.expected(inputs))
    layer.destroy()

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
from mega_cases import (
    CAPACITY,
    DEALS,
    MAX_TERM_ERROR,
    RANKS,
    ROUTINGS,
    SHAPE,
    Layer,
    assert_absence_is_named,
    assert_bad_id_is_masked_and_named,
    assert_buckets_agree,
    assert_calls_in_a_row,
    assert_dealt_out,
    assert_graph_follows,
    assert_refusal_is_named,
    assert_same_bits,
    deal,
    part_of,
    tokens,
    with_ids,
)

from moe_ep import MegaConfig, MoEEpLayer
from moe_ep.comm.transport import to_slots
from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.grouped import GroupedExperts
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.tiles import TILE_FORMATS
from moe_ep.reference import (
    combine_parts,
    moe_oracle_fp64,
    moe_reference_tp,
    terms_oracle_fp64,
)
from moe_ep.weights import MoEWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


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


@pytest.mark.parametrize("counts", DEALS, ids=str)
def test_bits_do_not_depend_on_how_tokens_are_dealt_out(counts):
    assert_dealt_out(shared_layer(2), counts, shared_layer(2).expected)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_token_alone_has_the_bits_it_has_in_a_batch(num_ranks):
    layer, inputs = shared_layer(num_ranks), tokens(CAPACITY, 7)
    expected = layer.run(inputs)
    for first, end in ((0, 1), (30, 31), (CAPACITY - 1, CAPACITY), (0, 2), (3, 11), (20, 53)):
        part = part_of(inputs, slice(first, end))
        assert_same_bits(layer.run(part), expected[first:end])


def test_every_build_of_a_capacity_gives_the_same_bits():
    layer, inputs = TpLayer(2, capacity=400), tokens(400, 8)
    assert_same_bits(layer.run(inputs), layer.expected(inputs))
    assert_buckets_agree(layer)


@pytest.mark.parametrize("late_rank", [0, 3])
def test_bits_hold_when_a_rank_comes_late(late_rank):
    layer, inputs = shared_layer(4), tokens(CAPACITY, 9)
    out = layer.run(inputs, late_rank=late_rank, late_s=2e-3)
    assert_same_bits(out, layer.expected(inputs))


def test_a_graph_follows_other_routing_and_fewer_tokens():
    assert_graph_follows(shared_layer(4), shared_layer(4).expected)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_300_calls_back_to_back_with_changing_tokens_and_routing(num_ranks):
    layer = shared_layer(num_ranks)
    assert_calls_in_a_row(layer, 300, layer.expected)


# ---- failures, and the layer ---------------------------------------------------------------------


def test_a_rank_that_never_comes_is_named_and_a_refusing_one_too():
    layer, inputs = TpLayer(4, capacity=CAPACITY + 1, timeout_s=0.2), tokens(CAPACITY, 16)
    assert_refusal_is_named(layer)
    assert_same_bits(layer.run(inputs), layer.expected(inputs))
    assert_absence_is_named(layer, 3, inputs)
    layer.mega.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_id_that_is_no_expert_is_masked_and_named_later(num_ranks):
    layer = shared_layer(num_ranks)
    assert_bad_id_is_masked_and_named(layer, layer.expected)


def test_a_layer_of_one_tp_rank_has_the_bits_of_its_fused_kernel():
    fused, inputs = shared_layer(1), tokens(CAPACITY, 17)
    weights: MoEWeights = fused.shards[0]
    layer = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=CAPACITY, backend=MegaConfig())
    assert_same_bits(layer.forward(inputs), fused.expected(inputs))
    layer.destroy()

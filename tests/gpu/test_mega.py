"""The fused layer: right against FP64, and the same bits however ranks, batches and builds differ.

One H200: pytest -n 8 tests/gpu/test_mega.py. Several ranks are virtual, in one launch. Some 50
kernels are compiled on the way, which several workers share.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from mega_cases import (
    CAPACITY,
    DEALS,
    LONG,
    RANKS,
    ROUTINGS,
    SHAPE,
    Layer,
    assert_absence_is_named,
    assert_bad_id_is_masked_and_named,
    assert_buckets_agree,
    assert_calls_in_a_row,
    assert_correct,
    assert_dealt_out,
    assert_graph_follows,
    assert_refusal_is_named,
    assert_same_bits,
    part_of,
    shared_layer,
    tokens,
    weights_of,
    with_ids,
)

from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.grouped_gemm import GroupedGemm
from moe_ep.megakernel.knobs import KNOB_TABLE
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS
from moe_ep.megakernel.tiles import TILE_FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TILE_FORMATS)
def test_every_format_is_right(name):
    assert_correct(Layer(name=name), tokens(CAPACITY, 1))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", NAMED_ACTIVATIONS)
def test_every_activation_is_right_with_and_without_bias(kind, has_bias):
    shape = replace(SHAPE, activation=kind)
    assert_correct(Layer(shape=shape, has_bias=has_bias), tokens(CAPACITY, 2))


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "all masked"])
def test_every_routing_is_right(routing):
    inputs = tokens(CAPACITY, 3)
    assert_correct(shared_layer(), with_ids(inputs, ROUTINGS[routing](inputs.topk_ids)))


@pytest.mark.parametrize("hidden, intermediate", [(288, 160), (1024, 704), (128, 128)])
def test_shapes_that_need_padding_are_right(hidden, intermediate):
    shape = replace(SHAPE, hidden=hidden, intermediate=intermediate)
    assert_correct(Layer(shape=shape), tokens(CAPACITY, 4, shape))


def test_terms_have_the_bits_of_the_grouped_gemms():
    layer, inputs = shared_layer(), tokens(CAPACITY, 5, masked=0.0)
    layer.run(inputs)
    slots = torch.argsort(inputs.topk_ids.flatten(), stable=True)
    counts = torch.bincount(inputs.topk_ids.flatten(), minlength=SHAPE.num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    gemm = GroupedGemm(
        "nvfp4",
        hidden=SHAPE.hidden,
        intermediate=SHAPE.intermediate,
        activation=SHAPE.activation,
        num_local_experts=SHAPE.num_experts,
    )
    rows = inputs.hidden_states[slots // SHAPE.top_k].contiguous()
    hidden = rows.new_empty(len(rows), SHAPE.intermediate)
    terms = torch.empty_like(rows)
    gemm.fc1(rows, offsets, layer.prepared, hidden)
    gemm.fc2(hidden, offsets, layer.prepared, terms)
    assert_same_bits(layer.terms(CAPACITY).flatten(0, 1)[slots], terms)


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", RANKS[1:])
def test_bits_do_not_depend_on_the_number_of_ranks(num_ranks, routing):
    inputs = tokens(CAPACITY, 6)
    inputs = with_ids(inputs, ROUTINGS[routing](inputs.topk_ids))
    assert_same_bits(shared_layer(num_ranks).run(inputs), shared_layer().run(inputs))


@pytest.mark.parametrize("counts", DEALS, ids=str)
def test_bits_do_not_depend_on_how_tokens_are_dealt_out(counts):
    assert_dealt_out(shared_layer(2), counts, shared_layer().run)


def test_a_token_alone_has_the_bits_it_has_in_a_batch():
    inputs = tokens(CAPACITY, 8)
    expected = shared_layer().run(inputs)
    for token in (0, 1, 30, CAPACITY - 1):
        alone = part_of(inputs, slice(token, token + 1))
        assert_same_bits(shared_layer().run(alone), expected[token : token + 1])


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 33])
def test_any_number_of_tokens_has_the_bits_it_has_in_a_batch(count):
    inputs = tokens(CAPACITY, 8)
    expected = shared_layer().run(inputs)
    part = part_of(inputs, slice(0, count))
    assert_same_bits(shared_layer().run(part), expected[:count])


@pytest.mark.parametrize("max_sms", [None, 16, 7])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "all masked"])
def test_few_tokens_straight_into_the_ring_have_the_bits_they_have_in_a_batch(routing, max_sms):
    """Up to 32 of one rank are, those of a CTA's first item, where its share is at most two; 61
    all go by way of the pool."""
    inputs = tokens(CAPACITY, 9, LONG)
    inputs = with_ids(inputs, ROUTINGS[routing](inputs.topk_ids))
    layer = Layer(shape=LONG, max_sms=max_sms)
    assert_correct(layer, inputs)
    expected = layer.run(inputs)
    for count in (1, 2, 8, 31, 32, 33):
        assert_same_bits(layer.run(part_of(inputs, slice(0, count))), expected[:count])


@pytest.mark.parametrize("row", KNOB_TABLE, ids=lambda row: f"{row.formats[0]}-{row.max_rows}")
def test_every_knob_row_gives_the_same_bits(row):
    name, inputs = row.formats[0], tokens(CAPACITY, 9)
    few = with_ids(inputs, ROUTINGS["few experts"](inputs.topk_ids))
    default, layer = Layer(name=name), Layer(name=name, knobs=row.knobs)
    for case in (inputs, few):
        assert_same_bits(layer.run(case), default.run(case))


@pytest.mark.parametrize("max_sms", [1, 7, 64])
def test_fewer_sms_give_the_same_bits(max_sms):
    inputs = tokens(CAPACITY, 10)
    assert_same_bits(Layer(max_sms=max_sms).run(inputs), shared_layer().run(inputs))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_buckets_of_one_capacity_give_the_same_bits_in_turn(num_ranks):
    """One rank alone takes the bucket of its tokens; several that of their bound."""
    assert_buckets_agree(Layer(num_ranks, capacity=400))


def test_ids_of_64_bits_give_the_same_bits():
    inputs = tokens(CAPACITY, 12)
    wide = MoEInputs(inputs.hidden_states, inputs.topk_ids.long(), inputs.topk_weights)
    assert_same_bits(shared_layer().run(wide), shared_layer().run(inputs))


def test_waits_without_an_end_give_the_same_bits():
    inputs = tokens(CAPACITY, 13)
    for num_ranks in (1, 4):
        layer = Layer(num_ranks, is_bounded=False)
        assert_same_bits(layer.run(inputs), shared_layer().run(inputs))


@pytest.mark.parametrize("late_rank", [0, 3])
def test_bits_hold_when_a_rank_comes_late(late_rank):
    inputs = tokens(CAPACITY, 14)
    out = shared_layer(4).run(inputs, late_rank=late_rank, late_s=2e-3)
    assert_same_bits(out, shared_layer().run(inputs))


def test_bits_hold_beside_a_busy_stream_and_on_another_one():
    inputs = tokens(CAPACITY, 15)
    expected = shared_layer().run(inputs)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            a = (a @ a) * 1e-3
    for stream in (other, torch.cuda.default_stream(), other):
        with torch.cuda.stream(stream):
            out = shared_layer(2).run(inputs)
        stream.synchronize()
        assert_same_bits(out, expected)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_graph_follows_other_routing_and_fewer_tokens(num_ranks):
    layer = shared_layer(num_ranks)
    assert_graph_follows(layer, Layer(capacity=CAPACITY * num_ranks).run)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_500_calls_back_to_back_with_changing_tokens_and_routing(num_ranks):
    assert_calls_in_a_row(shared_layer(num_ranks), 500, shared_layer().run)


def test_layers_of_one_geometry_share_a_workspace_in_turn():
    first, second = Layer(name="nvfp4"), Layer(name="mxfp4")
    assert first.mega.memory is second.mega.memory
    inputs = tokens(CAPACITY, 22)
    expected = [layer.run(inputs) for layer in (first, second)]
    for _ in range(20):
        for layer, wanted in zip((first, second), expected, strict=True):
            assert_same_bits(layer.run(inputs), wanted)


def test_weights_written_in_place_show_in_a_captured_graph():
    layer, inputs = Layer(), tokens(CAPACITY, 23)
    weights, _ = weights_of("nvfp4")
    other = replace(weights, up_scale=weights.up_scale * 2)
    layer.prepared = prepare(weights)
    out = layer.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(inputs, out)
    prepare(other, out=layer.prepared)
    graph.replay()
    layer.prepared = prepare(other)
    assert_same_bits(out, layer.run(inputs))


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent_rank", [0, 3])
def test_a_rank_that_never_comes_is_named_and_the_gpu_is_usable_at_once(absent_rank):
    layer = Layer(4, capacity=CAPACITY + 1, timeout_s=0.2)
    inputs = tokens(CAPACITY, 24)
    layer.run(inputs)
    assert_absence_is_named(layer, absent_rank, inputs)
    layer.mega.destroy()
    assert_same_bits(shared_layer(4).run(inputs), shared_layer().run(inputs))


def test_a_refusing_rank_is_named_to_all_and_the_next_call_works():
    layer, inputs = Layer(4, capacity=CAPACITY + 2), tokens(CAPACITY, 26)
    assert_refusal_is_named(layer)
    assert_same_bits(layer.run(inputs), shared_layer().run(inputs))


def test_an_id_that_is_no_expert_is_masked_and_named_later():
    assert_bad_id_is_masked_and_named(Layer(), shared_layer().run)

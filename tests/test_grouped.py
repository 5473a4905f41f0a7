"""The layer around the grouped GEMM kernel, with plain torch in the kernels' place."""

import gc
import re
import weakref

import pytest
import torch
from layer_cases import Case, gathered, make_inputs, make_weights, with_ids

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from grouped_fakes import FakeStream, use_fakes

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, MoEWeights, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.config import GroupedGemmConfig
from moe_ep.grouped_limits import layer_misfit
from moe_ep.grouped_memory import max_capacity, prepared_bytes, workspace_regions
from moe_ep.launch import spawn
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.problem import WEIGHT_FORMATS
from moe_ep.reference import moe_reference, moe_reference_tp

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=64, intermediate=128)
GROUPED = SplitConfig(kernel=GroupedGemmConfig())
CAPACITY = 64


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch):
    return use_fakes(monkeypatch.setattr)


def make_layer(shape: MoEShape = SHAPE, weights: MoEWeights | None = None) -> MoEEpLayer:
    weights = make_weights(shape) if weights is None else weights
    return MoEEpLayer(shape, weights, max_tokens_per_rank=CAPACITY, backend=GROUPED)


@pytest.fixture
def layer() -> MoEEpLayer:
    return make_layer()


@pytest.fixture
def inputs() -> MoEInputs:
    return make_inputs(SHAPE, 16, seed=4, masked=0.2)


@pytest.fixture
def expected(inputs: MoEInputs) -> torch.Tensor:
    return moe_reference(inputs, make_weights(SHAPE), SHAPE)


def other(**changes: object) -> MoEShape:
    fields = {"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 128} | changes
    return MoEShape(**fields)


CASES = [
    Case("random", (16,)),
    Case("odd counts", (5, 37)),
    Case("rank without tokens", (0, 7)),
    Case("masked slots", (16, 9), ids="masked"),
    Case("every slot masked", (4,), ids="none"),
    Case("all tokens to one expert", (32,), ids="one expert"),
    Case("expert repeated in a token", (11,), ids="one token"),
    Case("ranks that receive nothing", (16,), ids="first half"),
    Case("full capacity", (CAPACITY,)),
    Case("top_k = num_experts", (9,), shape=other(num_experts=5, top_k=5)),
    Case("more ranks than experts", (9, 2), shape=other(num_experts=1, top_k=1)),
    Case("not gated", (16,), shape=other(activation="relu2")),
    Case("tp", (16, 0), parallel="tp", ids="masked"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_is_the_specification_bit_for_bit(case):
    weights = make_weights(case.shape).shard(case.parallel, 0, 1)
    output = make_layer(case.shape, weights)(case.inputs(0))
    assert torch.equal(output, specified(case, num_ranks=1))


def specified(case: Case, num_ranks: int) -> torch.Tensor:
    inputs = gathered([case.inputs(rank) for rank in range(num_ranks)])
    weights = make_weights(case.shape)
    if case.parallel == "ep":
        return moe_reference(inputs, weights, case.shape)
    shards = [weights.shard("tp", rank, num_ranks) for rank in range(num_ranks)]
    return moe_reference_tp(inputs, shards, case.shape)


def forward_cases(rank: int, num_ranks: int) -> list[torch.Tensor]:
    use_fakes()
    outputs = []
    for case in CASES:
        weights = make_weights(case.shape).shard(case.parallel, rank, num_ranks)
        outputs.append(make_layer(case.shape, weights)(case.inputs(rank)))
    return outputs


def test_two_ranks_give_the_specification_bit_for_bit():
    for case, *parts in zip(CASES, *spawn.run(forward_cases, 2), strict=True):
        assert torch.equal(torch.cat(parts), specified(case, num_ranks=2)), case.name


def test_biases_reach_the_kernel(inputs):
    generator = torch.Generator().manual_seed(0)
    dense = make_weights(SHAPE)
    b13 = torch.randn(8, SHAPE.fc1_rows, generator=generator)
    b2 = torch.randn(8, SHAPE.hidden, generator=generator).bfloat16()
    weights = MoEWeights.from_dense(dense.w13, dense.w2, b13=b13, b2=b2)
    assert torch.equal(make_layer(SHAPE, weights)(inputs), moe_reference(inputs, weights, SHAPE))


def test_out_is_written_where_it_lies(layer, inputs, expected):
    out = torch.zeros(20, SHAPE.hidden, dtype=torch.bfloat16)
    assert layer(inputs, out=out[2:18]).data_ptr() == out[2:].data_ptr()
    assert layer._backend._combine.last_out.data_ptr() == out[2:].data_ptr()
    assert torch.equal(out[2:18], expected)
    assert not out[:2].any() and not out[18:].any()


def test_out_may_be_the_input(layer, inputs, expected):
    layer(inputs, out=inputs.hidden_states)
    assert torch.equal(inputs.hidden_states, expected)


def test_any_strides_and_alignment_of_inputs_and_out(layer, inputs, expected):
    x, ids, weights = vars(inputs).values()
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    strided_ids = torch.cat([ids, ids], dim=1)[:, : SHAPE.top_k]
    strided_weights = weights.repeat_interleave(2, dim=1)[:, ::2]
    wide = torch.zeros(16, 2 * SHAPE.hidden, dtype=torch.bfloat16)
    for given in (shifted, x.t().contiguous().t()):
        out = wide.zero_()[:, ::2]
        assert layer(MoEInputs(given, strided_ids, strided_weights), out=out) is out
        assert torch.equal(out, expected)
        assert not wide[:, 1::2].any()
    misaligned = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x)
    assert torch.equal(layer(inputs, out=misaligned), expected)


def test_int64_ids_give_the_bits_of_int32_ids(layer, inputs, expected):
    assert torch.equal(layer(with_ids(inputs, inputs.topk_ids.long())), expected)


def test_max_tokens_bounds_one_call(layer, inputs, expected):
    assert torch.equal(layer(inputs, max_tokens=16), expected)
    with pytest.raises(MoEEpConfigError, match="16 tokens; allowed: at most 15"):
        layer(inputs, max_tokens=15)


def test_a_bad_id_masks_its_slot_and_is_raised_at_the_next_call(layer, inputs, expected):
    ids = inputs.topk_ids.clone()
    ids[3, 1] = 8
    masked = torch.where(ids == 8, -1, ids)
    wanted = moe_reference(with_ids(inputs, masked), make_weights(SHAPE), SHAPE)
    assert torch.equal(layer(with_ids(inputs, ids)), wanted)
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[3, 1\].*below num_experts 8"):
        layer(inputs)
    assert torch.equal(layer(inputs), expected)


def test_a_bad_id_is_raised_by_check_once(layer, inputs):
    layer(with_ids(inputs, 8))
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[0, 0\]"):
        layer.check()
    layer.check()


def test_a_bad_id_is_kept_while_a_graph_is_captured(layer, inputs, expected, fakes):
    layer(with_ids(inputs, 8))
    fakes.is_capturing = True
    assert torch.equal(layer(inputs), expected)
    with pytest.raises(MoEEpStateError, match="outside the capture"):
        layer.check()
    fakes.is_capturing = False
    with pytest.raises(MoEEpConfigError, match="topk_ids"):
        layer.check()


def test_a_capture_before_warmup_says_so_and_leaves_the_layer_usable(
    layer, inputs, expected, fakes
):
    fakes.is_capturing = True
    with pytest.raises(MoEEpStateError, match="warm up first"):
        layer(inputs)
    fakes.is_capturing = False
    layer.warmup()
    fakes.is_capturing = True
    assert torch.equal(layer(inputs), expected)


def test_warmup_compiles_permute_for_both_dtypes_of_ids_and_combine(layer, fakes):
    layer.warmup()
    builds = [
        (build.name, getattr(build.config, "ids_are_int64", None)) for build in fakes.compiled
    ]
    assert builds == [("permute", False), ("permute", True), ("combine", None)]


def test_layers_of_one_geometry_share_a_workspace_and_others_do_not(inputs):
    layers = [make_layer(), make_layer(weights=make_weights(SHAPE, seed=1))]
    first, second = (layer._backend._workspace for layer in layers)
    assert first is second
    assert make_layer(other(hidden=128))._backend._workspace is not first
    expected = [moe_reference(inputs, make_weights(SHAPE, seed=seed), SHAPE) for seed in (0, 1)]
    for _ in range(2):
        for layer, wanted in zip(layers, expected, strict=True):
            assert torch.equal(layer(inputs), wanted)


def test_a_workspace_goes_with_its_last_layer():
    layers = [make_layer(), make_layer()]
    workspace = weakref.ref(layers[0]._backend._workspace)
    layers[0].destroy()
    assert workspace() is not None
    layers[1].destroy()
    gc.collect()
    assert workspace() is None


def test_a_call_on_another_stream_waits_for_the_call_before_it(inputs, fakes):
    layers, streams = [make_layer(), make_layer()], [fakes.stream, FakeStream()]
    layers[0](inputs)
    fakes.stream = streams[1]
    layers[1](inputs)
    layers[1](inputs)
    assert streams[1].waited_for == [streams[0]] and streams[0].waited_for == []


def test_the_weights_given_are_not_kept_alive(inputs, expected):
    weights = make_weights(SHAPE)
    layer = make_layer(weights=weights)
    held = [weakref.ref(tensor) for tensor in weights.tensors.values()]
    del weights
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert torch.equal(layer(inputs), expected)


def test_update_weights_prepares_into_the_same_addresses(layer, inputs):
    prepared = layer._backend._experts.prepared
    addresses = [prepared.w13.data_ptr(), prepared.w2.data_ptr()]
    for seed in (1, 2):
        new = make_weights(SHAPE, seed=seed)
        layer.update_weights(new)
        assert torch.equal(layer(inputs), moe_reference(inputs, new, SHAPE))
    assert layer._backend._experts.prepared is prepared
    assert addresses == [prepared.w13.data_ptr(), prepared.w2.data_ptr()]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda: make_weights(SHAPE).shard("ep", 0, 2), "num_ranks is 2; allowed: 1"),
        (lambda: make_weights(SHAPE).to("meta"), "w13 is on meta; allowed: cpu"),
    ],
)
def test_update_weights_that_do_not_fit_change_nothing(layer, inputs, expected, weights, message):
    with pytest.raises(MoEEpConfigError, match=message):
        layer.update_weights(weights())
    assert torch.equal(layer(inputs), expected)


def test_an_update_that_fails_half_way_leaves_a_layer_that_says_so(layer, inputs, monkeypatch):
    def fail(*_: object) -> None:
        raise MoEEpConfigError("w2[3, 0, 0] is a NaN code")

    monkeypatch.setattr(layer._backend._experts, "update", fail)
    with pytest.raises(MoEEpConfigError, match="NaN code"):
        layer.update_weights(make_weights(SHAPE))
    with pytest.raises(MoEEpStateError, match="NaN code"):
        layer(inputs)


def test_explain_states_the_bytes_held(layer):
    shape_bytes = 8 * (2 * 128 * 128 + 256 * 128) * 2  # [256, 64] and [64, 128], padded
    text = layer.explain()
    assert f"prepared weights {(shape_bytes + 8 * 16) / 1e6:.1f} MB" in text
    assert "shared workspace" in text and "GroupedGemmConfig runs" in text


@pytest.mark.parametrize("what", ["weights", "workspace"])
def test_memory_that_is_not_free_is_an_error_with_the_bytes(monkeypatch, what):
    from moe_ep import grouped, prepared

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    where = {"weights": (prepared, "prepare"), "workspace": (grouped, "shared_workspace")}
    monkeypatch.setattr(*where[what], fail)
    monkeypatch.setattr(where[what][0], "free_bytes", lambda device: 12345)
    regions = workspace_regions(SHAPE, 8, CAPACITY)
    num_bytes = {
        "weights": prepared_bytes(SHAPE, "bf16", 8),
        "workspace": sum(region.num_bytes for region in regions),
    }
    with pytest.raises(MoEEpConfigError, match=f"{num_bytes[what]} bytes.*where 12345 are free"):
        make_layer()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prepared_bytes_are_those_of_the_tensors(name, activation, has_bias):
    shape = other(num_experts=2, hidden=160, intermediate=288, activation=activation)
    weights = make_weights(shape, name)
    if has_bias:
        weights = MoEWeights(
            **vars(weights) | {"b13": torch.ones(2, shape.fc1_rows), "b2": torch.ones(2, 160)}
        )
    counted = prepared_bytes(shape, name, 2, has_bias13=has_bias, has_bias2=has_bias)
    assert counted == prepare(weights).num_bytes


@pytest.mark.parametrize(("top_k", "hidden"), [(8, 7168), (16, 16), (1, 7168)])
def test_capacity_ends_where_slots_or_vectors_have_no_number(top_k, hidden):
    shape = other(num_experts=16, top_k=top_k, hidden=hidden)
    most = max_capacity(shape)
    # Slots, and 16-byte vectors of the output, in int32.
    assert most * max(top_k, hidden // 8) < 2**31 <= (most + 4096) * max(top_k, hidden // 8)
    workspace_regions(shape, 16, most)
    message = f"max_tokens_per_rank is {most + 1}.*most {most}"
    with pytest.raises(MoEEpConfigError, match=message):
        workspace_regions(shape, 16, most + 1)
    options = {"parallel": "ep", "num_ranks": 1}
    asked = (shape, "bf16", GroupedGemmConfig())
    assert layer_misfit(*asked, max_tokens_per_rank=most, **options) is None
    assert re.search(message, layer_misfit(*asked, max_tokens_per_rank=most + 1, **options))

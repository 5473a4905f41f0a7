"""Field cases of kind numerics: each gave wrong numbers, often silently.

Values are held to the FP64 oracle where a format rounds, and to the bit where nothing may change.
"""

import math
from dataclasses import replace

import pytest
import torch
from field_ranks import MAX_ERROR, S0, OneRank, assert_near, moved, on, weights_of
from layer_cases import gathered, make_inputs, make_weights, with_ids
from oracles import relative_error

from moe_ep import MoEInputs, MoEShape, MoEWeights, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError, MoEEpUnavailableError
from moe_ep.config import GroupedGemmConfig, MegaConfig, MegaKernelConfig, TorchGemmConfig
from moe_ep.megakernel.knobs import KNOB_TABLE
from moe_ep.megakernel.problem import WEIGHT_FORMATS
from moe_ep.reference import moe_oracle_fp64

TWO = ("cpu2", "split2", "mega2", "split@2", "mega@2")


def run(ranks, weights: MoEWeights, parts: list[MoEInputs], shape: MoEShape = S0) -> torch.Tensor:
    """Output of all ranks' tokens by a layer of its own."""
    layer = ranks.layer(shape, weights)
    output = torch.cat(layer(parts))
    layer.destroy()
    return output


def error_of(ranks, weights, parts, shape: MoEShape = S0, *, of: MoEWeights | None = None) -> float:
    """Relative to the FP64 oracle of the same weights, or of other ones."""
    exact = moe_oracle_fp64(gathered(parts), of or weights, shape)
    return relative_error(run(ranks, weights, parts, shape), exact)


def scaled(weights: MoEWeights, name: str, values: dict[int, float]) -> MoEWeights:
    """Another global scale for some experts."""
    scale = getattr(weights, name).clone()
    for expert, value in values.items():
        scale[expert] = value
    return replace(weights, **{name: scale})


A25_SHAPE = MoEShape(num_experts=16, top_k=4, hidden=256, intermediate=128)


@on("cpu2", "cpu4", "cpu8", "mega2", "mega4", "mega8", "split@2", "mega@2", "mega@4", "mega@8")
def test_A25_one_batch_has_the_bits_of_one_rank_on_any_number_of_ranks(ranks):
    batch = make_inputs(A25_SHAPE, 64, seed=0)
    rows = torch.arange(64).tensor_split(ranks.num_ranks)
    parts = [MoEInputs(*(tensor[part] for tensor in vars(batch).values())) for part in rows]
    weights = ranks.weights(A25_SHAPE)
    (alone,) = OneRank(ranks.kind, 1).layer(A25_SHAPE, weights, 64)([batch])
    ranks.assert_right([alone], [batch], weights, A25_SHAPE)
    assert torch.equal(torch.cat(ranks.layer(A25_SHAPE, weights, 64)(parts)), alone)


@on(*TWO)
def test_A32_gate_and_up_keep_scales_of_their_own(ranks):
    nvfp4 = weights_of(S0, "nvfp4")
    uneven = scaled(nvfp4, "gate_scale", {2: 1.0, 5: 0.1})
    uneven = scaled(uneven, "up_scale", {2: 0.1, 5: 1.0})
    to_both = torch.tensor([[2, 5]] * 16, dtype=torch.int32)
    parts = [with_ids(part, to_both) for part in ranks.parts(S0, 16)]
    assert error_of(ranks, uneven, parts) < MAX_ERROR
    gate_for_both = replace(uneven, up_scale=uneven.gate_scale)
    assert error_of(ranks, uneven, parts, of=gate_for_both) > 0.5


@on(*TWO)
def test_A34_a_denormal_scale_spoils_nobody(ranks):
    nvfp4, parts = weights_of(S0, "nvfp4"), ranks.parts(S0, 16)
    clean = run(ranks, nvfp4, parts)
    dead = scaled(nvfp4, "gate_scale", {3: 1e-40})
    tiny = run(ranks, dead, parts)
    is_routed = (gathered(parts).topk_ids == 3).any(dim=1)
    assert is_routed.any() and not is_routed.all()
    assert torch.equal(tiny[~is_routed], clean[~is_routed])
    assert not torch.equal(tiny[is_routed], clean[is_routed])
    assert_near(tiny, moe_oracle_fp64(gathered(parts), dead, S0))


def test_A34_an_infinite_scale_is_refused_by_name():
    with pytest.raises(MoEEpConfigError, match=r"down_scale\[4\] of expert 4 is inf"):
        scaled(weights_of(S0, "nvfp4"), "down_scale", {4: math.inf})


@on(*TWO)
def test_A37_gate_rows_come_first(ranks):
    dense, parts = weights_of(S0, "bf16"), ranks.parts(S0, 16)
    w13 = dense.w13.clone()
    w13[:, : S0.intermediate] = 0.5 / 16
    ordered, flipped = (
        MoEWeights.from_dense(w, dense.w2) for w in (w13, w13.roll(S0.intermediate, dims=1))
    )
    assert error_of(ranks, ordered, parts) < MAX_ERROR
    assert error_of(ranks, flipped, parts, of=ordered) > 0.2


@on("cpu2", "split2", "mega2")
def test_A39_every_block_of_scale_factors_reaches_its_own_block(ranks):
    generator = torch.Generator().manual_seed(4)
    for hidden in (256, 2048):
        shape = replace(S0, hidden=hidden, num_experts=4)
        for name in ("mxfp8", "fp8_block"):
            weights = make_weights(shape, name)
            changed = {}
            for key in ("w13_sf", "w2_sf"):
                sf = getattr(weights, key)
                if name == "mxfp8":
                    offset = torch.randint(-2, 3, sf.shape, generator=generator)
                    changed[key] = (sf.int() + offset).to(torch.uint8)
                else:
                    changed[key] = sf * (0.5 + torch.rand(sf.shape, generator=generator))
            different = replace(weights, **changed)
            parts = ranks.parts(shape, 4)
            assert error_of(ranks, different, parts, shape) < MAX_ERROR
            assert error_of(ranks, different, parts, shape, of=weights) > 0.1


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_A39_scale_factors_in_column_major_order_are_refused_by_name(name):
    weights = make_weights(replace(S0, hidden=1024, intermediate=1024), name)
    turned = weights.w13_sf.mT.contiguous().mT
    with pytest.raises(MoEEpConfigError, match="w13_sf.*stride"):
        replace(weights, w13_sf=turned)


@on(*TWO)
def test_A40_block_scales_need_not_be_powers_of_two(ranks):
    blocks, parts = weights_of(S0, "fp8_block"), ranks.parts(S0, 16)
    generator = torch.Generator().manual_seed(4)
    odd = {
        name: 0.01 * (0.3 + torch.rand(getattr(blocks, name).shape, generator=generator))
        for name in ("w13_sf", "w2_sf")
    }
    assert error_of(ranks, replace(blocks, **odd), parts) < MAX_ERROR


@on("cpu1", "split1", "mega1")
def test_A41_a_backend_named_and_the_same_one_by_auto_have_the_same_bits(ranks, monkeypatch):
    from moe_ep import mega_limits

    named = {
        "cpu": SplitConfig(),
        "split": SplitConfig(kernel=GroupedGemmConfig()),
        "mega": MegaConfig(),
    }[ranks.kind]
    if ranks.kind == "split":  # where mega cannot run
        monkeypatch.setattr(mega_limits, "PENDING", "not now")
    inputs = make_inputs(S0, 16, seed=0)
    inputs = MoEInputs(*(tensor.to(ranks.device) for tensor in vars(inputs).values()))
    weights = weights_of(S0, "fp8_block")
    outputs = []
    for backend in (named, "auto"):
        layer = ranks.module(S0, weights, backend=backend)
        assert layer.backend == named
        outputs.append(layer(inputs))
        layer.destroy()
    assert torch.equal(*outputs)
    ranks.assert_right([outputs[0].cpu()], [make_inputs(S0, 16, seed=0)], weights)


@on("cpu2", "split2", "mega2")
def test_A42_activations_have_no_scale_and_their_magnitude_is_right(ranks):
    parts = [
        replace(part, hidden_states=part.hidden_states / part.hidden_states.abs().max())
        for part in ranks.parts(S0, 16)
    ]
    assert error_of(ranks, weights_of(S0, "mxfp8"), parts) < MAX_ERROR


@on("cpu1", "split1", "mega1")
def test_A42_an_activation_scale_is_an_error_by_name(ranks):
    weights = weights_of(S0, "nvfp4")
    with pytest.raises(TypeError, match="input_scale"):
        replace(weights, input_scale=torch.ones(8))
    with pytest.raises(TypeError, match="activation_scale"):
        ranks.module(S0, weights, activation_scale=2688.0)
    if ranks.kind == "cpu":
        with pytest.raises(MoEEpConfigError, match="activations='bf16' only, got 'fp8'"):
            TorchGemmConfig(activations="fp8")
        return
    fp8 = {
        "split": SplitConfig(kernel=GroupedGemmConfig(activations="fp8")),
        "mega": MegaConfig(megakernel=MegaKernelConfig(activations="fp8")),
    }[ranks.kind]
    with pytest.raises(MoEEpUnavailableError, match="activations='fp8'.*allowed: 'bf16'"):
        ranks.module(S0, weights, backend=fp8)


@on("cpu1", "split1", "mega1")
def test_A43_routing_weights_are_fp32_or_refused(ranks):
    layer = ranks.module(S0, ranks.weights())
    inputs = make_inputs(S0, 16, seed=0)
    ranks.assert_right(ranks.layer(S0, ranks.weights())([inputs]), [inputs], ranks.weights())
    inputs = MoEInputs(*(tensor.to(ranks.device) for tensor in vars(inputs).values()))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(MoEEpConfigError, match=f"topk_weights has dtype {dtype}.*float32"):
            layer(replace(inputs, topk_weights=inputs.topk_weights.to(dtype)))


@on(*TWO)
def test_A44_small_parts_survive_a_large_one_in_any_slot(ranks):
    dense = weights_of(S0, "bf16")
    one_expert = MoEWeights.from_dense(
        *(getattr(dense, name)[:1].expand(8, -1, -1).clone() for name in ("w13", "w2"))
    )
    all_slots = replace(S0, top_k=8)
    heavy = torch.full((16, 8), 0.5)
    heavy[range(16), [token % 8 for token in range(16)]] = 256.0
    ids = torch.arange(8, dtype=torch.int32).expand(16, 8)
    first = torch.eye(8)[0].expand(16, 8)
    parts = ranks.parts(all_slots, 16)
    weighted, alone = (
        [replace(part, topk_ids=ids, topk_weights=w) for part in parts] for w in (heavy, first)
    )
    y = run(ranks, one_expert, alone, all_slots)
    assert_near(y, moe_oracle_fp64(gathered(alone), one_expert, all_slots))
    assert relative_error(run(ranks, one_expert, weighted, all_slots), 259.5 * y.double()) < 0.004


A45_SHAPE = MoEShape(num_experts=64, top_k=8, hidden=1024, intermediate=256)


@on("split2", "mega2", "mega4", "split@2", "mega@2", "mega@4")
def test_A45_no_row_differs_in_a_thousand_calls_at_full_capacity(ranks):
    weights, parts = ranks.weights(A45_SHAPE), ranks.parts(A45_SHAPE, 256)
    layer = ranks.layer(A45_SHAPE, weights, 256)
    call = layer.bind(parts)
    call.launch()
    first = call.outputs()
    ranks.assert_right(first, parts, weights, A45_SHAPE)
    expected = call.out.clone()
    differs = torch.zeros((), dtype=torch.bool, device=expected.device)
    for _ in range(1000):
        call.launch()
        differs |= (call.out.view(torch.int16) != expected.view(torch.int16)).any()
    layer.check()
    assert not differs


@on(*TWO)
def test_A46_a_hundred_calls_give_the_same_bits(ranks):
    layer, parts = ranks.layer(S0, ranks.weights()), ranks.parts(S0, 16)
    first = layer(parts)
    ranks.assert_right(first, parts, ranks.weights())
    for _ in range(100):
        assert all(map(torch.equal, layer(parts), first))


@on(*TWO)
def test_A47_nan_and_inf_rows_stay_their_own(ranks):
    layer = ranks.layer(S0, ranks.weights())
    parts = [with_ids(part, 2) for part in ranks.parts(S0, 16)]
    clean = layer(parts)
    ranks.assert_right(clean, parts, ranks.weights())
    spoiled = []
    for part in parts:
        x = part.hidden_states.clone()
        x[3], x[9] = math.nan, math.inf
        spoiled.append(replace(part, hidden_states=x))
    others = [token for token in range(16) if token not in (3, 9)]
    for output, wanted in zip(layer(spoiled), clean, strict=True):
        assert torch.equal(output[others], wanted[others])
        assert (~output.isfinite()).any(dim=1).nonzero().flatten().tolist() == [3, 9]


def poison_allocator(num_bytes: int = 1 << 28) -> None:
    """Whatever is allocated next without clearing holds 0x7F: NaN in FP8, a large BF16."""
    if torch.cuda.is_available():
        torch.full((num_bytes,), 0x7F, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()


def poison_data(layer) -> None:
    """The regions that hold values; counters and flags have their own clearing."""
    if hasattr(layer, "mega"):
        regions = [layer.mega.memory.region(n) for n in ("x_stage", "pool", "hidden", "terms")]
    elif isinstance(layer.module.backend, MegaConfig):
        memory = layer.module._backend._mega.memory
        regions = [memory.region(name) for name in ("pool", "hidden", "terms")]
    else:
        regions = [layer.module._backend._workspace[name] for name in ("pool", "hidden")]
    for region in regions:
        region.view(torch.uint8).fill_(0x7F)


@on("split2", "mega2")
def test_A48_what_lies_behind_the_tokens_is_not_read(ranks):
    parts = ranks.parts(S0, 3)
    clean = ranks.layer(S0, ranks.weights())(parts)
    ranks.assert_right(clean, parts, ranks.weights())
    poison_allocator()
    # A capacity of its own, so that the workspace is allocated anew.
    layer = ranks.layer(S0, ranks.weights(), 31)
    poison_data(layer)
    assert all(map(torch.equal, layer(parts), clean))
    poison_data(layer)
    assert all(map(torch.equal, layer(parts), clean))


def with_counts(counts: list[int], seed: int, num_experts: int = 8) -> MoEInputs:
    """Top-1 tokens of which expert e gets counts[e]."""
    shape = replace(S0, num_experts=num_experts, top_k=1)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return with_ids(make_inputs(shape, len(ids), seed), ids[order][:, None])


@on("split2", "mega2")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_block"])
def test_A49_padding_of_a_tile_is_not_read(ranks, name):
    """All tokens are rank 0's."""
    counts = [1, 31, 32, 33, 127, 128, 129, 0]
    inputs = with_counts(counts, seed=0)
    shape = replace(S0, top_k=1)
    weights = weights_of(shape, name)
    poison_allocator()
    layer = ranks.layer(shape, weights, sum(counts))
    poison_data(layer)
    nothing = make_inputs(shape, 0, seed=0)
    outputs = layer([inputs, nothing])
    ranks.assert_right(outputs, [inputs, nothing], weights, shape)
    for expert, count in enumerate(counts[:-1]):  # each count by itself as well
        rows = (inputs.topk_ids[:, 0] == expert).nonzero()[:, 0]
        alone = MoEInputs(*(tensor[rows] for tensor in vars(inputs).values()))
        assert alone.num_tokens == count
        assert torch.equal(layer([alone, nothing])[0], outputs[0][rows])


@on(*TWO)
def test_A50_experts_without_tokens_are_not_read(ranks):
    layer, weights = ranks.layer(S0, ranks.weights()), ranks.weights()
    busy = torch.arange(32, dtype=torch.int32).view(16, 2) % 8
    parts = ranks.parts(S0, 16)
    layer([with_ids(part, busy) for part in parts])
    to_two = torch.tensor([[0, 1]] * 16, dtype=torch.int32)
    few = [with_ids(part, to_two) for part in parts]
    ranks.assert_right(layer(few), few, weights)


@on("cpu2", "split2", "mega2")
def test_A51_small_capacities_are_right_when_full(ranks):
    for capacity in (8, 16, 32, 63, 64, 65):
        layer = ranks.layer(S0, ranks.weights(), capacity)
        parts = ranks.parts(S0, capacity)
        ranks.assert_right(layer(parts), parts, ranks.weights())
        layer.destroy()


@on("cpu1", "split1", "mega2")
def test_A52_the_capacity_does_not_change_the_output(ranks):
    whole = ranks.parts(S0, 8)
    expected = None
    for capacity in (1024, 1, 2, 8, 16, 31, 32, 33, 64, 128, 255, 256, 257):
        parts = [MoEInputs(*(tensor[:capacity] for tensor in vars(p).values())) for p in whole]
        layer = ranks.layer(S0, ranks.weights(), capacity)
        outputs = layer(parts)
        if expected is None:
            ranks.assert_right(outputs, parts, ranks.weights())
            expected = outputs
        for output, first in zip(outputs, expected, strict=True):
            assert torch.equal(output, first[:capacity])
        layer.destroy()


@on("split1", "mega1")
def test_A54_more_elements_than_32_bits_can_number(ranks):
    shape = MoEShape(num_experts=8, top_k=8, hidden=7168, intermediate=128)
    weights = weights_of(shape, "nvfp4")
    num_tokens, rows = 40_000, [0, 19_999, 37_449, 39_999]
    assert num_tokens * shape.top_k * shape.hidden > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    x = torch.randn(num_tokens, shape.hidden, **options, dtype=torch.bfloat16)
    ids = torch.rand(num_tokens, 8, **options).argsort(dim=1).int()
    inputs = MoEInputs(x, ids, torch.rand(num_tokens, 8, **options))
    layer = ranks.module(shape, weights, num_tokens)
    output = layer(inputs)
    layer.check()
    few = MoEInputs(*(tensor[rows].cpu() for tensor in vars(inputs).values()))
    assert_near(output[rows].cpu(), moe_oracle_fp64(few, weights, shape))
    assert output.isfinite().all()
    layer.destroy()


@on("cpu1", "split1", "mega1")
def test_A55_strided_inputs_are_read_as_they_are(ranks):
    layer, device = ranks.module(S0, ranks.weights()), ranks.device
    wide = torch.randn(16, 2 * S0.hidden).bfloat16().to(device)
    wide_ids = torch.randint(8, (16, 5), dtype=torch.int32).to(device)
    wide_weights = torch.rand(16, 4).to(device)
    views = MoEInputs(wide[:, : S0.hidden], wide_ids[:, :2], wide_weights[:, ::2])
    copies = MoEInputs(*(tensor.contiguous() for tensor in vars(views).values()))
    expected = layer(copies)
    ranks.assert_right([expected.cpu()], [moved(copies, "cpu")], ranks.weights())
    assert torch.equal(layer(views), expected)
    turned = replace(views, hidden_states=wide[:, : S0.hidden].T.contiguous().T)
    assert torch.equal(layer(turned), expected)


@on(*TWO)
def test_A58_the_clamp_holds(ranks):
    """Every gate is 20, every up -20; the limit is 10."""
    clamped = replace(S0, activation="deepseek_v4")
    dense = weights_of(S0, "bf16")
    w13 = torch.full_like(dense.w13, 20 / S0.hidden)
    w13[:, S0.intermediate :] *= -1
    extreme = MoEWeights.from_dense(w13, dense.w2)
    parts = [
        replace(part, hidden_states=torch.ones_like(part.hidden_states))
        for part in ranks.parts(S0, 16)
    ]
    exact = moe_oracle_fp64(gathered(parts), extreme, clamped)
    formats = ("bf16",) if ranks.kind == "cpu" else tuple(WEIGHT_FORMATS)
    for name in formats:
        weights = extreme if name == "bf16" else extreme.quantize(name)
        assert error_of(ranks, weights, parts, clamped) < MAX_ERROR
    assert relative_error(run(ranks, extreme, parts, S0), exact) > 0.5


@on("mega2")
def test_A60_every_build_of_the_table_is_right(ranks):
    weights = weights_of(S0, "nvfp4")
    first = {}
    for row in [row for row in KNOB_TABLE if "nvfp4" in row.formats]:
        layer = ranks.layer(S0, weights, 896, knobs=row.knobs)
        for count in (1, 64, 896):
            parts = ranks.parts(S0, count)
            outputs = layer(parts)
            if count not in first:
                ranks.assert_right(outputs, parts, weights)
                first[count] = outputs
            assert all(map(torch.equal, outputs, first[count]))
        layer.destroy()


@on("cpu2", "split2", "mega2")
def test_A62_groups_of_any_number_of_rows(ranks):
    counts = [1, 31, 33, 44, 0, 64]
    shape = replace(S0, num_experts=6, top_k=1)
    weights = weights_of(shape, "mxfp8")
    layer = ranks.layer(shape, weights, 128)
    for numbers in (counts, [32, 32, 32, 64, 0, 64]):
        inputs = with_counts(numbers, seed=1, num_experts=6)
        halves = [tensor.tensor_split(2) for tensor in vars(inputs).values()]
        parts = [MoEInputs(*part) for part in zip(*halves, strict=True)]
        ranks.assert_right(layer(parts), parts, weights, shape)


@on("split1", "mega1")
def test_A69_another_stream_is_followed_and_inputs_are_only_read(ranks):
    layer = ranks.module(S0, ranks.weights())
    layer.warmup()
    held = make_inputs(S0, 16, seed=0)
    inputs = MoEInputs(*(tensor.cuda() for tensor in vars(held).values()))
    expected = layer(inputs)
    ranks.assert_right([expected.cpu()], [held], ranks.weights())
    forward, side = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (forward, side):
        stream.wait_stream(torch.cuda.current_stream())
    outputs, sums = [], []
    for _ in range(20):
        with torch.cuda.stream(forward):
            outputs.append(layer(inputs))
        with torch.cuda.stream(side):
            sums.append(inputs.hidden_states.float().sum())
    torch.cuda.synchronize()
    for output, total in zip(outputs, sums, strict=True):
        assert torch.equal(output, expected)
        assert torch.equal(total, sums[0])
    for name, tensor in vars(inputs).items():
        assert torch.equal(tensor.cpu(), getattr(held, name)), name

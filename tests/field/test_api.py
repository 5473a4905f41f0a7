"""Field cases of kind API: wrong values that were taken, or refused in words that told nothing."""

import re
from dataclasses import replace

import pytest
import torch
from field_ranks import S0, on, weights_of
from layer_cases import make_inputs, make_weights

from moe_ep import MegaConfig, MoEInputs, MoEShape, MoEWeights, supports
from moe_ep.comm.errors import MoEEpConfigError, MoEEpUnavailableError
from moe_ep.megakernel.problem import WEIGHT_FORMATS, weight_format

ONE = ("cpu1", "split1", "mega1")


def on_device(ranks, inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.to(ranks.device) for tensor in vars(inputs).values()))


@on(*ONE)
def test_A15_ids_of_32_and_64_bits_are_equal_and_others_are_refused(ranks):
    layer, inputs = ranks.module(S0, ranks.weights()), make_inputs(S0, 16, seed=0)
    inputs = on_device(ranks, inputs)
    expected = layer(inputs)
    ranks.assert_right([expected.cpu()], [make_inputs(S0, 16, seed=0)], ranks.weights())
    assert torch.equal(layer(replace(inputs, topk_ids=inputs.topk_ids.long())), expected)
    for dtype in (torch.int16, torch.uint8, torch.float32):
        with pytest.raises(MoEEpConfigError, match=f"topk_ids.*{dtype}.*int32 or torch.int64"):
            layer(replace(inputs, topk_ids=inputs.topk_ids.to(dtype)))
    assert torch.equal(layer(inputs), expected)


@on("cpu2", "split@2", "mega@2")
def test_A16_ranks_may_give_ids_of_different_widths(ranks):
    layer, parts = ranks.layer(S0, ranks.weights()), ranks.parts(S0, 16)
    expected = layer(parts)
    ranks.assert_right(expected, parts, ranks.weights())
    mixed = [parts[0], replace(parts[1], topk_ids=parts[1].topk_ids.long())]
    assert all(map(torch.equal, layer(mixed), expected))


@on(*ONE)
def test_A19_weights_of_all_experts_where_a_part_is_wanted_and_the_reverse(ranks):
    weights = ranks.weights()
    with pytest.raises(MoEEpConfigError, match=r"w13 must have shape \(4, .*got \(8, "):
        replace(weights, expert_ids=(0, 1, 2, 3), num_ranks=2)
    part = weights.shard("ep", 0, 2)
    with pytest.raises(MoEEpConfigError, match=r"w13 must have shape \(8, .*got \(4, "):
        replace(part, expert_ids=tuple(range(8)), num_ranks=1)
    with pytest.raises(MoEEpConfigError, match="rank 0 of 2, the group has rank 0 of 1"):
        ranks.module(S0, part)
    with pytest.raises(MoEEpConfigError, match="num_experts of the weights is 8, the shape has 4"):
        ranks.module(replace(S0, num_experts=4), weights)


@on("cpu1", "split1", "mega2")
def test_A22_as_many_slots_as_experts_and_no_more(ranks):
    shape = replace(S0, top_k=8)
    parts, weights = ranks.parts(shape, 16), ranks.weights(shape)
    ranks.assert_right(ranks.layer(shape, weights)(parts), parts, weights, shape)
    with pytest.raises(MoEEpConfigError, match="top_k 9 is above num_experts 8"):
        replace(S0, top_k=9)
    with pytest.raises(MoEEpConfigError, match="top_k must be at least 1, got 0"):
        replace(S0, top_k=0)


@on(*ONE)
def test_A23_the_stated_limit_of_slots_is_the_limit(ranks):
    shape = MoEShape(num_experts=40, top_k=33, hidden=256, intermediate=128)
    limit = 40
    if ranks.kind != "cpu":
        with pytest.raises(MoEEpUnavailableError) as error:
            ranks.module(shape, ranks.weights(shape))
        limit = int(re.search(r"top_k .*at most (\d+)", str(error.value))[1])
        assert limit == 32
    shape = replace(shape, top_k=limit)
    inputs, weights = make_inputs(shape, 9, seed=0), ranks.weights(shape)
    ranks.assert_right(ranks.layer(shape, weights)([inputs]), [inputs], weights, shape)


# Where hidden is large: what takes minutes elsewhere is left out.
A56_FORMATS = {"cpu": ("bf16",), "split": WEIGHT_FORMATS, "mega": ("nvfp4", "mxfp8")}


@on("cpu1", "split1", "mega2")
def test_A56_every_size_is_right_or_refused_by_its_name_value_and_multiple(ranks):
    for hidden, intermediate in ((2880, 2880), (2816, 176), (256, 192), (320, 64)):
        formats = A56_FORMATS[ranks.kind] if hidden > 1000 else WEIGHT_FORMATS
        for name in formats:
            shape = MoEShape(num_experts=2, top_k=1, hidden=hidden, intermediate=intermediate)
            multiple = weight_format(name).k_multiple
            if intermediate % multiple:  # these hiddens divide in every format
                refusal = (
                    f"down matrix.*{intermediate} columns; {name} takes multiples of {multiple}"
                )
                with pytest.raises(MoEEpConfigError, match=refusal):
                    make_weights(shape, name)
                continue
            weights = make_weights(shape, name)
            parts = ranks.parts(shape, 4)
            ranks.assert_right(ranks.layer(shape, weights)(parts), parts, weights, shape)


@on("mega1")
def test_A57_wide_layers_are_right_or_refused_with_the_bytes(ranks):
    shape = MoEShape(num_experts=8, top_k=2, hidden=8192, intermediate=256)
    weights, inputs = weights_of(shape, "nvfp4"), make_inputs(shape, 1024, seed=0)
    layer = ranks.layer(shape, weights, 1024)
    outputs = layer([inputs])
    few = slice(0, 1024, 100)
    some = MoEInputs(*(tensor[few] for tensor in vars(inputs).values()))
    ranks.assert_right([outputs[0][few]], [some], weights, shape)
    layer.destroy()
    wider = replace(shape, hidden=16384)
    support = supports(wider, "nvfp4", MegaConfig(), "cuda")
    if not support.ok:
        assert re.search(r"16384.*allowed|bytes of shared memory; allowed", support.reason)
        return
    weights, inputs = weights_of(wider, "nvfp4"), make_inputs(wider, 8, seed=0)
    ranks.assert_right(ranks.layer(wider, weights)([inputs]), [inputs], weights, wider)


@on(*ONE)
def test_A59_weights_without_a_gate_and_unknown_activations(ranks):
    e, h, i = S0.num_experts, S0.hidden, S0.intermediate
    w13, w2 = torch.zeros(e, i, h).bfloat16(), torch.zeros(e, h, i).bfloat16()
    with pytest.raises(MoEEpConfigError, match=rf"w13 .*{2 * i}, {h}\), got .*{i}, {h}\)"):
        MoEWeights.from_dense(w13, w2)
    plain = MoEWeights.from_dense(w13, w2, is_gated=False)
    with pytest.raises(MoEEpConfigError, match="is_gated of the weights is False"):
        ranks.module(S0, plain)
    with pytest.raises(MoEEpConfigError, match="activation 'gelu_new' is not known; allowed: swi"):
        replace(S0, activation="gelu_new")

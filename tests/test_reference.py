"""The specification against FP64, against integers that FP32 holds exactly, and against NumPy.

The bounds are the numeric contract's: a GEMM rounded to BF16 0.0018, a whole term 0.0026 (relative
L2 error against FP64).
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import relative_error

from moe_ep import MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import WEIGHT_FORMATS, Activation
from moe_ep.reference import (
    activate,
    combine_parts,
    combine_terms,
    expert_terms,
    fc1_sums,
    fc2_sums,
    grouped_expert_terms,
    moe_oracle_fp64,
    moe_reference,
    moe_reference_tp,
    terms_oracle_fp64,
)

FORMATS = tuple(WEIGHT_FORMATS)
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 5, 3, 256, 384
ACTIVATIONS = ("swiglu", "gpt_oss", "deepseek_v4", "geglu_tanh", "reglu", "relu2", "situ")


def make_weights(is_gated: bool = True, has_bias: bool = True) -> MoEWeights:
    torch.manual_seed(0)
    rows = (2 if is_gated else 1) * INTERMEDIATE
    size = 0.5 + torch.rand(2, NUM_EXPERTS, 1, 1)
    w13 = size[0] * torch.randn(NUM_EXPERTS, rows, HIDDEN) / HIDDEN**0.5
    w2 = size[1] * torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    return MoEWeights.from_dense(
        w13.bfloat16(),
        w2.bfloat16(),
        b13=torch.randn(NUM_EXPERTS, rows) if has_bias else None,
        b2=torch.randn(NUM_EXPERTS, HIDDEN).bfloat16() if has_bias else None,
        is_gated=is_gated,
    )


def make_inputs(num_tokens: int = 37) -> MoEInputs:
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)])
    ids[3] = 2  # one expert three times
    ids[5, 1], ids[6] = -1, -7
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    return MoEInputs(x, ids, torch.rand(num_tokens, TOP_K))


def make_shape(activation: str = "swiglu") -> MoEShape:
    return MoEShape(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        activation=activation,
    )


# Activations


@pytest.mark.parametrize(
    ("activation", "gate", "up", "want"),
    [
        (Activation("swiglu"), math.log(3), 2.0, 1.5 * math.log(3)),
        (Activation("swiglu", alpha=2.0, beta=1.0), math.log(3) / 2, 2.0, 9 / 8 * math.log(3)),
        (Activation("swiglu", limit=10.0), 20.0, -20.0, -100 / (1 + math.exp(-10))),
        (Activation("swiglu", limit=10.0), -20.0, 20.0, -200 / (1 + math.exp(20))),
        (Activation.from_name("gpt_oss"), 9.0, 9.0, 56 / (1 + math.exp(-7 * 1.702))),
        (Activation.from_name("gpt_oss"), 1.0, -9.0, -6 / (1 + math.exp(-1.702))),
        (Activation("geglu_tanh"), 1.0, 3.0, 3 * 0.8411919906082768),
        (Activation("reglu"), 1.5, -2.0, -3.0),
        (Activation("reglu"), -1.5, -2.0, 0.0),
        (Activation("situ", alpha=2.0, beta=0.0), 2.0, 3.0, 6 * math.tanh(1) / (1 + math.exp(-2))),
        (Activation("situ"), 4.0, 25.0, 100 * math.tanh(1) ** 2 / (1 + math.exp(-4))),
    ],
    ids=lambda value: value.kind if isinstance(value, Activation) else None,
)
def test_activation_values(activation, gate, up, want):
    got = activate(torch.tensor([[gate, up]]), activation)
    assert got.item() == pytest.approx(want, rel=1e-6)


def test_relu2_takes_up_rows_alone():
    got = activate(torch.tensor([[-2.0, 3.0, 0.5]]), Activation("relu2"))
    assert got.tolist() == [[0.0, 9.0, 0.25]]


def test_situ_becomes_swiglu_as_its_caps_grow():
    fc1 = torch.randn(20, 64)
    wide = activate(fc1, Activation("situ", alpha=1e4, beta=1e4))
    assert relative_error(wide, activate(fc1, Activation("swiglu"))) < 1e-6


@pytest.mark.parametrize("name", ["alpha", "beta", "limit"])
@pytest.mark.parametrize("value", ["a", math.nan, math.inf, True, [1.0]])
def test_activation_parameters_are_finite_numbers(name, value):
    with pytest.raises(MoEEpConfigError, match=f"{name} is .*; allowed: a finite number"):
        Activation("swiglu", **{name: value})


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu2"])
@pytest.mark.parametrize("column", [0, 1], ids=["gate", "up"])
def test_nan_passes_every_clamp(name, column):
    fc1 = torch.ones(1, 2)
    fc1[0, column] = math.nan
    assert activate(fc1, Activation.from_name(name)).isnan().all()


@pytest.mark.parametrize("name", ["swiglu", "situ", "geglu_tanh"])
def test_a_very_negative_gate_gives_zero(name):
    got = activate(torch.tensor([[-3e38, 2.0], [-1e4, 2.0]]), Activation.from_name(name))
    assert (got == 0).all()


# Sums


@pytest.mark.parametrize("format_name", FORMATS)
def test_sums_are_fp32_sums_of_exact_products(format_name):
    weights = make_weights().quantize(format_name)
    x = make_inputs().hidden_states
    hidden = torch.randn(37, INTERMEDIATE).bfloat16()
    for expert in range(NUM_EXPERTS):
        w13 = weights.dequantize_expert("w13", expert, torch.float64)
        w2 = weights.dequantize_expert("w2", expert, torch.float64)
        want = x.double() @ w13.T + weights.b13[expert].double()
        assert relative_error(fc1_sums(x, weights, expert), want) < 4e-7
        want = hidden.double() @ w2.T + weights.b2[expert].double()
        assert relative_error(fc2_sums(hidden, weights, expert), want) < 4e-7


def test_nvfp4_global_scales_multiply_the_sum_gate_and_up_each_by_its_own():
    q = make_weights(has_bias=False).quantize("nvfp4")
    scales = {"gate_scale": 1 / 3, "up_scale": 0.1, "down_scale": 7e-4}
    q = replace(q, **{name: torch.full((NUM_EXPERTS,), value) for name, value in scales.items()})
    unit = replace(q, **{name: torch.ones(NUM_EXPERTS) for name in scales})
    x = make_inputs().hidden_states
    gate, up = (fc1_sums(x, unit, 2).numpy()[:, half] for half in np.split(np.arange(768), 2))
    got = fc1_sums(x, q, 2).numpy()
    assert np.array_equal(got[:, :384], gate * np.float32(1 / 3))
    assert np.array_equal(got[:, 384:], up * np.float32(0.1))
    hidden = torch.randn(37, INTERMEDIATE).bfloat16()
    want = fc2_sums(hidden, unit, 2).numpy() * np.float32(7e-4)
    assert np.array_equal(fc2_sums(hidden, q, 2).numpy(), want)


def test_fp8_block_adds_scaled_partial_sums_in_ascending_columns():
    # Integer codes and tokens: partial sums are exact, only the scaled additions round.
    torch.manual_seed(0)
    q13 = torch.randint(-8, 9, (1, 768, 512)).to(torch.float8_e4m3fn)
    sf13 = torch.rand(1, 6, 4) + 0.1
    q2 = torch.ones(1, 512, 384).to(torch.float8_e4m3fn)
    weights = MoEWeights.fp8_block(q13, sf13, q2, torch.ones(1, 4, 3))
    x = torch.randint(-16, 17, (9, 512)).bfloat16()
    want = np.zeros((9, 768), dtype=np.float32)
    for block in range(4):
        columns = slice(128 * block, 128 * (block + 1))
        partial = x[:, columns].float().numpy() @ q13[0, :, columns].float().numpy().T
        want = want + np.repeat(sf13[0, :, block].numpy(), 128) * partial
    assert np.array_equal(fc1_sums(x, weights, 0).numpy(), want)


# Terms and the layer


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_terms_and_layer_are_within_the_contract(format_name, name):
    weights = make_weights(is_gated=name != "relu2").quantize(format_name)
    inputs, shape = make_inputs(), make_shape(name)
    want = terms_oracle_fp64(inputs, weights, shape)
    for expert in range(NUM_EXPERTS):
        tokens, slots = (inputs.topk_ids == expert).nonzero(as_tuple=True)
        got = expert_terms(inputs.hidden_states[tokens], weights, expert, shape.activation)
        assert relative_error(got, want[tokens, slots]) < 0.0026
    got = moe_reference(inputs, weights, shape)
    assert relative_error(got, moe_oracle_fp64(inputs, weights, shape)) < 0.0035


def test_hidden_activation_is_rounded_to_bf16_once():
    weights = make_weights(has_bias=False)
    x, shape = make_inputs().hidden_states, make_shape()
    hidden = activate(fc1_sums(x, weights, 1), shape.activation).bfloat16()
    want = fc2_sums(hidden, weights, 1).bfloat16()
    assert torch.equal(expert_terms(x, weights, 1, shape.activation), want)


def test_grouped_terms_are_each_experts_terms_in_order():
    weights, activation = make_weights(), Activation("swiglu")
    x = torch.randn(40, HIDDEN).bfloat16()
    counts = [7, 0, 1, 32, 0]
    parts = [expert_terms(p, weights, e, activation) for e, p in enumerate(x.split(counts))]
    assert torch.equal(grouped_expert_terms(x, counts, weights, activation), torch.cat(parts))


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_token_alone_has_the_bits_it_has_in_the_batch(format_name):
    weights = make_weights().quantize(format_name)
    inputs, shape = make_inputs(), make_shape()
    batch = moe_reference(inputs, weights, shape)
    for token in (0, 3, 5, 6, 36):
        one = slice(token, token + 1)
        alone = MoEInputs(inputs.hidden_states[one], inputs.topk_ids[one], inputs.topk_weights[one])
        assert torch.equal(moe_reference(alone, weights, shape), batch[one])


def test_a_nan_token_leaves_the_others_their_bits():
    weights, shape, inputs = make_weights(), make_shape(), make_inputs()
    inputs.topk_ids[:] = 2
    clean = moe_reference(inputs, weights, shape)
    inputs.hidden_states[3] = math.nan
    inputs.hidden_states[9] = math.inf
    got = moe_reference(inputs, weights, shape)
    others = [token for token in range(37) if token not in (3, 9)]
    assert torch.equal(got[others], clean[others])
    assert not torch.isfinite(got[[3, 9]]).any()


def test_no_tokens_and_no_routes():
    weights, shape = make_weights(), make_shape()
    empty = MoEInputs(
        torch.empty(0, HIDDEN, dtype=torch.bfloat16),
        torch.empty(0, TOP_K, dtype=torch.int64),
        torch.empty(0, TOP_K),
    )
    assert moe_reference(empty, weights, shape).shape == (0, HIDDEN)
    inputs = make_inputs()
    inputs.topk_ids[:] = -1
    assert (moe_reference(inputs, weights, shape) == 0).all()


def test_an_id_above_the_experts_is_refused():
    inputs = make_inputs()
    inputs.topk_ids[2, 1] = NUM_EXPERTS
    with pytest.raises(MoEEpConfigError, match="topk_ids holds 5; allowed: negative"):
        moe_reference(inputs, make_weights(), make_shape())


# Combine


def test_combine_multiplies_then_adds_in_slot_order_each_rounded():
    torch.manual_seed(0)
    terms, topk_weights = torch.randn(64, 8, 512).bfloat16(), torch.rand(64, 8)
    want = np.zeros((64, 512), dtype=np.float32)
    fused = np.zeros((64, 512), dtype=np.float32)
    for slot in range(8):
        term, weight = terms[:, slot].float().numpy(), topk_weights[:, slot, None].numpy()
        want = want + term * weight
        fused = (fused + term.astype(np.float64) * weight).astype(np.float32)
    got = combine_parts(terms, torch.zeros(64, 8, dtype=torch.int64), topk_weights).numpy()
    assert np.array_equal(got, want)
    assert not np.array_equal(want, fused)  # the data tells them apart


def test_combine_keeps_fp32_routing_weights_and_fp32_sums():
    # 8 equal terms, one heavy weight: a BF16 sum would stay at 256.
    terms = torch.ones(1, 8, 4).bfloat16()
    ids = torch.arange(8)[None]
    topk_weights = torch.tensor([[256.0] + [0.5] * 7])
    assert (combine_parts(terms, ids, topk_weights) == 259.5).all()
    assert (combine_terms(terms, ids, topk_weights.flip(1)) == 260).all()  # nearest BF16
    fine = torch.full((1, 8), 1 / 3)
    assert combine_parts(terms, ids, fine)[0, 0].item() == pytest.approx(8 / 3, rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_masked_slot_is_skipped_whatever_it_holds(poison):
    torch.manual_seed(0)
    terms, topk_weights = torch.randn(6, 3, 8).bfloat16(), torch.rand(6, 3)
    ids = torch.tensor([[0, -1, 2]] * 6)
    want = combine_parts(terms[:, ::2], ids[:, ::2], topk_weights[:, ::2])
    terms[:, 1] = poison
    topk_weights[:, 1] = poison
    assert torch.equal(combine_parts(terms, ids, topk_weights), want)


def test_an_unmasked_nan_reaches_its_token():
    terms = torch.ones(2, 2, 8).bfloat16()
    terms[1, 0, 3] = math.nan
    got = combine_terms(terms, torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))
    assert got.isnan().nonzero().tolist() == [[1, 3]]


# tp


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("format_name", FORMATS)
def test_tp_is_within_the_contract_and_adds_every_bias_once(format_name, num_ranks):
    full = make_weights().quantize(format_name)
    shards = [full.shard("tp", rank, num_ranks) for rank in range(num_ranks)]
    inputs, shape = make_inputs(), make_shape()
    got = moe_reference_tp(inputs, shards, shape)
    assert relative_error(got, moe_oracle_fp64(inputs, full, shape)) < 0.0026


def test_tp_parts_are_fp32_and_added_in_rank_order():
    full, inputs, shape = make_weights(), make_inputs(), make_shape()
    shards = [full.shard("tp", rank, 3) for rank in range(3)]
    total = np.zeros((37, HIDDEN), dtype=np.float32)
    for shard in shards:
        terms = torch.zeros(37, TOP_K, HIDDEN)
        for expert in range(NUM_EXPERTS):
            tokens, slots = (inputs.topk_ids == expert).nonzero(as_tuple=True)
            x = inputs.hidden_states[tokens]
            terms[tokens, slots] = expert_terms(x, shard, expert, shape.activation)
        total = total + combine_parts(terms, inputs.topk_ids, inputs.topk_weights).numpy()
    got = moe_reference_tp(inputs, shards, shape)
    assert torch.equal(got, torch.from_numpy(total).bfloat16())

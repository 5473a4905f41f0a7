"""Field cases of kind numerics on two ranks over gloo: each gave wrong numbers, often silently.

Values are held to the FP64 oracle where a format rounds, and to the bit where nothing may change.
"""

import math
from dataclasses import replace

import pytest
import torch
from layer_cases import make_inputs, make_weights, with_ids

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.launch import spawn
from moe_ep.reference import moe_oracle_fp64

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=256, intermediate=128)
CLAMPED = replace(SHAPE, activation="deepseek_v4")
# A term 0.0026 and the output's own rounding 0.0017, in squares.
MAX_ERROR = 0.0032


class Ranks:
    """This rank's layers over one set of weights or another, and what they give."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def layer(self, weights: MoEWeights, shape: MoEShape = SHAPE) -> MoEEpLayer:
        part = weights.shard("ep", self.rank, self.num_ranks)
        return MoEEpLayer(shape, part, max_tokens_per_rank=32)

    def forward(
        self, inputs: MoEInputs, weights: MoEWeights, shape: MoEShape = SHAPE
    ) -> torch.Tensor:
        layer = self.layer(weights, shape)
        output = layer(inputs)
        layer.destroy()
        return output

    def error(self, inputs: MoEInputs, weights: MoEWeights, shape: MoEShape = SHAPE) -> float:
        """Relative to the FP64 oracle."""
        want = moe_oracle_fp64(inputs, weights, shape)
        return relative(self.forward(inputs, weights, shape), want)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def scaled(weights: MoEWeights, name: str, values: dict[int, float]) -> MoEWeights:
    """Another global scale for some experts."""
    scale = getattr(weights, name).clone()
    for expert, value in values.items():
        scale[expert] = value
    return replace(weights, **{name: scale})


def worker(rank: int, num_ranks: int) -> dict[str, object]:
    ranks, seen = Ranks(rank, num_ranks), {}
    inputs = make_inputs(SHAPE, 16, seed=rank)
    nvfp4 = make_weights(SHAPE, "nvfp4")

    uneven = scaled(nvfp4, "gate_scale", {2: 1.0, 5: 0.1})
    uneven = scaled(uneven, "up_scale", {2: 0.1, 5: 1.0})
    to_both = with_ids(inputs, torch.tensor([[2, 5]] * 16, dtype=torch.int32))
    seen["a32"] = ranks.error(to_both, uneven)
    gate_for_both = replace(uneven, up_scale=uneven.gate_scale)
    seen["a32 gate's alone"] = relative(
        ranks.forward(to_both, uneven), moe_oracle_fp64(to_both, gate_for_both, SHAPE)
    )

    clean = ranks.forward(inputs, nvfp4)
    tiny = ranks.forward(inputs, scaled(nvfp4, "gate_scale", {3: 1e-40}))
    is_routed = (inputs.topk_ids == 3).any(dim=1)
    seen["a34"] = torch.equal(tiny[~is_routed], clean[~is_routed]) and tiny.isfinite().all().item()

    dense = make_weights(SHAPE)
    w13 = dense.w13.clone()
    w13[:, : SHAPE.intermediate] = 0.5 / 16
    ordered, flipped = (
        MoEWeights.from_dense(w, dense.w2) for w in (w13, w13.roll(SHAPE.intermediate, dims=1))
    )
    seen["a37"] = ranks.error(inputs, ordered)
    seen["a37 other order"] = relative(
        ranks.forward(inputs, flipped), moe_oracle_fp64(inputs, ordered, SHAPE)
    )

    blocks = make_weights(SHAPE, "fp8_block")
    generator = torch.Generator().manual_seed(4)
    odd_scales = {
        name: 0.01 * (0.3 + torch.rand(getattr(blocks, name).shape, generator=generator))
        for name in ("w13_sf", "w2_sf")
    }
    seen["a40"] = ranks.error(inputs, replace(blocks, **odd_scales))

    one_expert = MoEWeights.from_dense(
        dense.w13[:1].expand(8, -1, -1).clone(), dense.w2[:1].expand(8, -1, -1).clone()
    )
    all_slots = replace(SHAPE, top_k=8)
    heavy = torch.full((16, 8), 0.5)
    heavy[range(16), [token % 8 for token in range(16)]] = 256.0
    ids = torch.arange(8, dtype=torch.int32).expand(16, 8)
    weighted = MoEInputs(inputs.hidden_states, ids, heavy)
    alone = MoEInputs(inputs.hidden_states, ids, torch.eye(8)[0].expand(16, 8))
    y = ranks.forward(alone, one_expert, all_slots).double()
    seen["a44"] = relative(ranks.forward(weighted, one_expert, all_slots), 259.5 * y)

    layer = ranks.layer(dense)
    first = layer(inputs)
    seen["a46"] = all(torch.equal(layer(inputs), first) for _ in range(100))

    to_expert_2 = with_ids(inputs, 2)
    unspoiled = layer(to_expert_2)
    x = inputs.hidden_states.clone()
    x[3], x[9] = math.nan, math.inf
    spoiled = layer(replace(to_expert_2, hidden_states=x))
    others = [token for token in range(16) if token not in (3, 9)]
    seen["a47"] = torch.equal(spoiled[others], unspoiled[others])
    seen["a47 bad rows"] = (~spoiled.isfinite()).any(dim=1).nonzero().flatten().tolist()

    layer(with_ids(inputs, torch.arange(32, dtype=torch.int32).view(16, 2) % 8))
    to_two = with_ids(inputs, torch.tensor([[0, 1]] * 16, dtype=torch.int32))
    seen["a50"] = relative(layer(to_two), moe_oracle_fp64(to_two, dense, SHAPE))

    wide = torch.randn(16, 2 * SHAPE.hidden).bfloat16()
    wide_ids = torch.randint(8, (16, 5), dtype=torch.int32)
    wide_weights = torch.rand(16, 4)
    views = MoEInputs(wide[:, : SHAPE.hidden], wide_ids[:, :2], wide_weights[:, ::2])
    copies = MoEInputs(*(getattr(views, name).contiguous() for name in vars(views)))
    seen["a55"] = torch.equal(layer(views), layer(copies))
    transposed = wide[:, : SHAPE.hidden].T.contiguous().T
    seen["a55 transposed"] = torch.equal(
        layer(replace(views, hidden_states=transposed)), layer(copies)
    )

    # Every gate is 20, every up -20.
    w13 = torch.full_like(dense.w13, 20 / SHAPE.hidden)
    w13[:, SHAPE.intermediate :] *= -1
    extreme = MoEWeights.from_dense(w13, dense.w2)
    ones = replace(inputs, hidden_states=torch.ones_like(inputs.hidden_states))
    seen["a58"] = ranks.error(ones, extreme, CLAMPED)
    seen["a58 without limit"] = relative(
        ranks.forward(ones, extreme), moe_oracle_fp64(ones, extreme, CLAMPED)
    )
    return seen


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return spawn.run(worker, 2)


def test_a32_gate_and_up_keep_scales_of_their_own(two_ranks):
    assert all(rank["a32"] < MAX_ERROR for rank in two_ranks)
    assert all(rank["a32 gate's alone"] > 0.5 for rank in two_ranks)


def test_a34_a_denormal_scale_spoils_nobody(two_ranks):
    assert all(rank["a34"] for rank in two_ranks)


def test_a34_an_infinite_scale_is_refused_by_name():
    with pytest.raises(MoEEpConfigError, match=r"down_scale\[4\] of expert 4 is inf"):
        scaled(make_weights(SHAPE, "nvfp4"), "down_scale", {4: math.inf})


def test_a37_gate_rows_come_first(two_ranks):
    assert all(rank["a37"] < MAX_ERROR for rank in two_ranks)
    assert all(rank["a37 other order"] > 0.2 for rank in two_ranks)


def test_a40_block_scales_need_not_be_powers_of_two(two_ranks):
    assert all(rank["a40"] < MAX_ERROR for rank in two_ranks)


def test_a44_small_parts_survive_a_large_one_in_any_slot(two_ranks):
    assert all(rank["a44"] < 0.004 for rank in two_ranks)


def test_a46_a_hundred_calls_give_the_same_bits(two_ranks):
    assert all(rank["a46"] for rank in two_ranks)


def test_a47_nan_and_inf_rows_stay_their_own(two_ranks):
    assert all(rank["a47"] for rank in two_ranks)
    assert [rank["a47 bad rows"] for rank in two_ranks] == [[3, 9], [3, 9]]


def test_a50_experts_without_tokens_are_not_read(two_ranks):
    assert all(rank["a50"] < MAX_ERROR for rank in two_ranks)


def test_a55_strided_inputs_are_read_as_they_are(two_ranks):
    assert all(rank["a55"] and rank["a55 transposed"] for rank in two_ranks)


def test_a58_the_clamp_holds(two_ranks):
    assert all(rank["a58"] < MAX_ERROR for rank in two_ranks)
    assert all(rank["a58 without limit"] > 0.5 for rank in two_ranks)

"""The layer's values: against the specification and the FP64 oracle, on 1, 2 and 4 ranks."""

import pytest
import torch
from layer_cases import Case, gathered, make_weights

from moe_ep import MoEEpLayer, MoEShape
from moe_ep.launch import spawn
from moe_ep.reference import moe_oracle_fp64, moe_reference, moe_reference_tp

FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")


def small(**changes: object) -> MoEShape:
    fields = {"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 128} | changes
    return MoEShape(**fields)


CASES = [
    Case("random", (16,)),
    Case("odd counts", (5, 37, 1, 16)),
    Case("rank without tokens", (0, 7, 16, 0)),
    Case("no rank has tokens", (0,)),
    Case("masked slots", (16, 9), ids="masked"),
    Case("every slot masked", (4,), ids="none"),
    Case("all tokens to one expert", (32,), ids="one expert"),
    Case("expert repeated in a token", (11,), ids="one token"),
    Case("ranks that receive nothing", (16,), ids="first half"),
    Case("top_k = 1", (16,), shape=small(top_k=1)),
    Case("top_k = num_experts", (9,), shape=small(num_experts=5, top_k=5)),
    Case("one expert", (9,), shape=small(num_experts=1, top_k=1)),
    Case("more ranks than experts", (9, 2), shape=small(num_experts=3, top_k=3)),
    Case("experts do not divide", (16,), shape=small(num_experts=10, top_k=4)),
    Case("odd hidden", (5, 8), shape=small(hidden=35, intermediate=7)),
    Case("not gated", (16,), shape=small(activation="relu2")),
    Case("gpt-oss activation", (16,), shape=small(activation="gpt_oss")),
    *(Case(f"format {name}", (16, 3), weights_format=name, ids="masked") for name in FORMATS[1:]),
    *(
        Case(f"tp {name}", (16, 0, 5), weights_format=name, parallel="tp", ids="masked")
        for name in ("bf16", "nvfp4", "mxfp8")
    ),
    Case("tp odd hidden", (5, 2), parallel="tp", shape=small(hidden=35, intermediate=12)),
]


def forward_cases(rank: int, num_ranks: int) -> list[torch.Tensor]:
    outputs = []
    for case in CASES:
        weights = make_weights(case.shape, case.weights_format)
        weights = weights.shard(case.parallel, rank, num_ranks)
        layer = MoEEpLayer(case.shape, weights, max_tokens_per_rank=64)
        outputs.append(layer(case.inputs(rank)))
        layer.destroy()
    return outputs


@pytest.fixture(scope="module", params=[1, 2, 4])
def outputs(request: pytest.FixtureRequest) -> list[list[torch.Tensor]]:
    """Each rank's output of every case."""
    if request.param == 1:
        return [forward_cases(0, 1)]
    return spawn.run(forward_cases, request.param)


@pytest.mark.parametrize("idx", range(len(CASES)), ids=[case.name for case in CASES])
def test_output_is_the_specification_bit_for_bit(outputs, idx):
    case, num_ranks = CASES[idx], len(outputs)
    inputs = gathered([case.inputs(rank) for rank in range(num_ranks)])
    weights = make_weights(case.shape, case.weights_format)
    if case.parallel == "ep":
        expected = moe_reference(inputs, weights, case.shape)
    else:
        shards = [weights.shard("tp", rank, num_ranks) for rank in range(num_ranks)]
        expected = moe_reference_tp(inputs, shards, case.shape)
    assert torch.equal(torch.cat([rank[idx] for rank in outputs]), expected)


@pytest.mark.parametrize("idx", range(len(CASES)), ids=[case.name for case in CASES])
def test_output_is_near_the_fp64_oracle(outputs, idx):
    case = CASES[idx]
    inputs = gathered([case.inputs(rank) for rank in range(len(outputs))])
    exact = moe_oracle_fp64(inputs, make_weights(case.shape, case.weights_format), case.shape)
    error = torch.cat([rank[idx] for rank in outputs]).double() - exact
    # A term is within 0.0026 (contract rule 6), the output's own rounding within 0.0017.
    assert error.norm() <= (0.0026 + 0.0017) * exact.norm()

"""The layer in plain torch on GPUs: one GPU without a process group, two over NCCL."""

import pytest
import torch
from layer_cases import Case, gathered, make_weights

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.launch import spawn
from moe_ep.reference import moe_oracle_fp64

FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")
SHAPE = MoEShape(num_experts=8, top_k=2, hidden=512, intermediate=256)
CASES = [
    *(Case(name, (64, 37), ids="masked", weights_format=name, shape=SHAPE) for name in FORMATS),
    Case("rank without tokens", (0, 16), shape=SHAPE),
    Case("all tokens to one expert", (32,), ids="one expert", shape=SHAPE),
    Case("tp", (16, 5), parallel="tp", shape=SHAPE),
]


def on_gpu(inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))


def make_layer(case: Case, rank: int, num_ranks: int, group: EpGroup | None) -> MoEEpLayer:
    weights = make_weights(case.shape, case.weights_format)
    weights = weights.shard(case.parallel, rank, num_ranks).to("cuda")
    return MoEEpLayer(
        case.shape, weights, max_tokens_per_rank=128, backend=SplitConfig(), group=group
    )


def forward_cases(rank: int, num_ranks: int) -> dict:
    """Each case on this rank; then a bad id on the last rank, and a good call after it."""
    seen = {}
    for case in CASES:
        layer = make_layer(case, rank, num_ranks, None)
        seen[case.name] = layer(on_gpu(case.inputs(rank))).cpu()
    inputs = on_gpu(CASES[0].inputs(rank))
    bad = MoEInputs(inputs.hidden_states, inputs.topk_ids + 8, inputs.topk_weights)
    layer = make_layer(CASES[0], rank, num_ranks, None)
    with pytest.raises(MoEEpConfigError, match="topk_ids holds"):
        layer(bad if rank == num_ranks - 1 else inputs)
    seen["after a refusal"] = layer(inputs).cpu()
    return seen


def check_against_the_oracle(outputs: list[dict]) -> None:
    for case in CASES:
        inputs = gathered([case.inputs(rank) for rank in range(len(outputs))])
        exact = moe_oracle_fp64(inputs, make_weights(case.shape, case.weights_format), case.shape)
        error = torch.cat([rank[case.name] for rank in outputs]).double() - exact
        assert error.norm() <= (0.0026 + 0.0017) * exact.norm(), case.name
    for rank in outputs:
        assert torch.equal(rank["after a refusal"], rank[CASES[0].name])


@pytest.mark.gpu
def test_one_gpu_is_near_the_fp64_oracle():
    check_against_the_oracle([forward_cases(0, 1)])


@pytest.mark.gpus(2)
def test_two_gpus_are_near_the_fp64_oracle_and_have_the_bits_of_one():
    outputs = spawn.run(forward_cases, 2, device="cuda")
    check_against_the_oracle(outputs)
    for case in CASES:
        if case.parallel == "ep":
            alone = make_layer(case, 0, 1, EpGroup.single("cuda"))
            inputs = gathered([case.inputs(rank) for rank in range(2)])
            expected = alone(on_gpu(inputs)).cpu()
            assert torch.equal(torch.cat([rank[case.name] for rank in outputs]), expected)

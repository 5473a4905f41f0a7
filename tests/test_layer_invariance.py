"""A token's bits depend on the token, its routing and the weights: not on ranks, batch or order.

An unpadded matmul changes about one BF16 output in 24 000 for a token alone, so every comparison
has at least a million outputs: 512 tokens x 2048.
"""

from functools import cache

import pytest
import torch
from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, MoEWeights
from moe_ep.launch import spawn

FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")
SHAPE = MoEShape(num_experts=8, top_k=2, hidden=2048, intermediate=128)
NUM_TOKENS = 512
# Tokens of each rank, by number of ranks.
SPLITS = {1: (512,), 2: (301, 211), 4: (1, 200, 0, 311)}


@cache
def all_tokens() -> MoEInputs:
    return make_inputs(SHAPE, NUM_TOKENS, seed=1, masked=0.1)


def tokens(rows: slice | torch.Tensor) -> MoEInputs:
    inputs = all_tokens()
    return MoEInputs(inputs.hidden_states[rows], inputs.topk_ids[rows], inputs.topk_weights[rows])


@cache
def full_weights(weights_format: str) -> MoEWeights:
    return make_weights(SHAPE, weights_format)


def make_layer(weights_format: str, rank: int = 0, num_ranks: int = 1) -> MoEEpLayer:
    weights = full_weights(weights_format).shard("ep", rank, num_ranks)
    return MoEEpLayer(SHAPE, weights, max_tokens_per_rank=NUM_TOKENS)


def forward_all_formats(rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    first = sum(SPLITS[num_ranks][:rank])
    mine = slice(first, first + SPLITS[num_ranks][rank])
    return {name: make_layer(name, rank, num_ranks)(tokens(mine)) for name in FORMATS}


@cache
def on_one_rank() -> dict[str, torch.Tensor]:
    return forward_all_formats(0, 1)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bits_do_not_depend_on_the_number_of_ranks(num_ranks):
    outputs = spawn.run(forward_all_formats, num_ranks)
    for name in FORMATS:
        output = torch.cat([rank[name] for rank in outputs])
        assert output.numel() >= 1_000_000
        assert torch.equal(output, on_one_rank()[name]), name


@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_the_batch(name):
    layer = make_layer(name)
    sizes = [*range(1, 32), 16]  # 512 tokens in batches of 1, 2, 3, ...
    bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
    batches = [slice(*pair) for pair in zip(bounds[:-1], bounds[1:], strict=True)]
    output = torch.cat([layer(tokens(batch)) for batch in batches])
    assert torch.equal(output, on_one_rank()[name])


def test_bits_of_a_token_alone_are_those_in_a_batch():
    layer = make_layer("bf16")
    alone = torch.cat([layer(tokens(slice(i, i + 1))) for i in range(NUM_TOKENS)])
    assert torch.equal(alone, on_one_rank()["bf16"])


def test_bits_do_not_depend_on_the_order_of_the_tokens():
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(2))
    output = make_layer("bf16")(tokens(order))
    assert torch.equal(output, on_one_rank()["bf16"][order])


def test_bits_do_not_depend_on_the_number_of_threads():
    num_threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(make_layer("bf16")(tokens(slice(None))))
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(*outputs)

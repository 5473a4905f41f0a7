"""The fused layer under tp over real ranks, a GPU each: the bits of the split layer.

Two H200: pytest tests/gpu/test_mega_tp_ranks.py. FC2's bias makes the ranks' kernels differ.
"""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import make_inputs
from test_grouped_gemm import random_weights

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEShape, SplitConfig
from moe_ep.config import GroupedGemmConfig
from moe_ep.launch import spawn

SHAPE = MoEShape(num_experts=13, top_k=4, hidden=512, intermediate=256)
CAPACITY = 60  # two builds
UNEVEN = [(0, CAPACITY), (CAPACITY, 0), (0, 0), (1, 0), (13, 57), (CAPACITY, CAPACITY)]


def run_rank(rank: int, num_ranks: int) -> int:
    """Number of calls that had the split layer's bits."""
    num_calls = 0
    for has_bias in (False, True):
        weights = random_weights(
            "nvfp4", SHAPE.hidden, SHAPE.intermediate, SHAPE.num_experts, has_bias=has_bias
        ).shard("tp", rank, num_ranks)
        fused, split = (
            MoEEpLayer(
                SHAPE, weights, max_tokens_per_rank=CAPACITY, backend=backend, timeout_s=20.0
            )
            for backend in (MegaConfig(), SplitConfig(kernel=GroupedGemmConfig()))
        )
        for seed, counts in enumerate(UNEVEN):
            inputs = make_inputs(SHAPE, counts[rank], 10 * seed + rank, masked=0.1)
            inputs = MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))
            expected = split.forward(inputs)
            for bound in (None, max(counts)):
                assert torch.equal(fused.forward(inputs, max_tokens=bound), expected), counts
                num_calls += 1
        fused.check()
        fused.destroy()
        split.destroy()
    return num_calls


@pytest.mark.gpus(2)
@pytest.mark.timeout(300)
def test_two_gpus_have_the_bits_of_the_split_layer():
    num_calls = spawn.run(run_rank, 2, timeout_s=280.0, device="cuda")
    assert num_calls == [4 * len(UNEVEN)] * 2

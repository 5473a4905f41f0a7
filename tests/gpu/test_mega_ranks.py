"""The fused layer over real ranks, a GPU each, through NVSHMEM: the bits of one rank.

Two H200: pytest tests/gpu/test_mega_ranks.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from mega_cases import CAPACITY, ROUTINGS, SHAPE, Layer, deal, tokens, weights_of, with_ids

from moe_ep.comm.group import EpGroup
from moe_ep.inputs import MoEInputs
from moe_ep.launch import spawn
from moe_ep.megakernel.formats import PreparedWeights
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.problem import owned_experts

pytestmark = pytest.mark.timeout(300)

NUM_CALLS = 200


def cases() -> list[MoEInputs]:
    """Every routing, then many calls back to back with other tokens."""
    inputs = tokens(CAPACITY, 30)
    routed = [with_ids(inputs, change(inputs.topk_ids)) for change in ROUTINGS.values()]
    return routed + [tokens(call % (CAPACITY + 1), 31 + call % 5) for call in range(NUM_CALLS)]


def part_of_weights(prepared: PreparedWeights, experts: range) -> PreparedWeights:
    part = slice(experts.start, experts.stop)
    names = ("w13", "w2", "w13_alpha", "w2_alpha")
    return replace(prepared, **{name: getattr(prepared, name)[part].clone() for name in names})


def run_rank(rank: int, num_ranks: int) -> list[torch.Tensor]:
    """This rank's outputs of all cases."""
    device = torch.device("cuda", rank)
    group = EpGroup.from_process_group(dist.group.WORLD, device)
    _, prepared = weights_of("nvfp4")
    weights = part_of_weights(prepared, owned_experts(SHAPE.num_experts, num_ranks, rank))
    mega = MegaMoE(group, SHAPE, "nvfp4", max_tokens_per_rank=CAPACITY, timeout_s=10.0)
    mega.warmup()
    dist.barrier()
    outs = []
    for inputs in cases():
        part = deal(inputs, num_ranks)[rank]
        out = torch.full_like(part.hidden_states, float("nan"))
        mega.forward(part.hidden_states, part.topk_ids, part.topk_weights, weights, out)
        outs.append(out)
    torch.cuda.synchronize()
    mega.check()
    dist.barrier()
    mega.destroy()
    return [out.cpu() for out in outs]


@pytest.mark.gpus(2)
def test_two_gpus_give_the_bits_of_one():
    ranks = spawn.run(run_rank, 2, timeout_s=240.0, device="cuda")
    alone = Layer()
    for inputs, *parts in zip(cases(), *ranks, strict=True):
        assert torch.equal(torch.cat(parts), alone.run(inputs).cpu())

"""NCCL-EP moves rows as the plain transport does: same rows at the owners, same terms back."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("nccl.ep", reason="needs nccl-extensions")

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.nccl_ep import NcclEpTransport
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import Outgoing
from moe_ep.launch import spawn

HIDDEN, TOP_K, NUM_EXPERTS, CAPACITY = 512, 4, 8, 16
TOKENS = [(16, 7), (0, 5), (1, 1), (3, 0), (9, 16)]


def outgoing(rank: int, call: int) -> Outgoing:
    """Rows that encode (call, rank, token); a third of the slots masked."""
    num_tokens = TOKENS[call][rank]
    gen = torch.Generator().manual_seed(10 * call + rank)
    ids = torch.randint(-4, NUM_EXPERTS, (num_tokens, TOP_K), generator=gen)
    x = torch.randn(num_tokens, HIDDEN, generator=gen).bfloat16()
    return Outgoing(
        x_TH=x.cuda(), topk_ids_TK=ids.cuda(), topk_weights_TK=torch.ones(ids.shape), bound=CAPACITY
    )


def move(rank: int, num_ranks: int, mode: str) -> list[torch.Tensor]:
    """Of each call the terms that came back: token * (1 + expert / 64)."""
    group = EpGroup.from_process_group(dist.group.WORLD, f"cuda:{rank}")
    control = TorchTransport(
        group,
        Liveness(group, 1, 20.0),
        layer_id=1,
        hidden=HIDDEN,
        top_k=TOP_K,
        owner_E=torch.arange(NUM_EXPERTS, device=group.device) * num_ranks // NUM_EXPERTS,
        timeout_s=20.0,
    )
    transport = NcclEpTransport(
        group,
        control,
        mode=mode,
        hidden=HIDDEN,
        top_k=TOP_K,
        num_experts=NUM_EXPERTS,
        max_tokens_per_rank=CAPACITY,
        timeout_s=20.0,
    )
    outs = []
    for call in range(len(TOKENS)):
        received = transport.dispatch(outgoing(rank, call))
        factor = 1 + received.topk_ids_NK / 64
        terms = (received.x_NH.float() * factor).bfloat16()
        outs.append(transport.combine(terms, received).cpu())
    with pytest.raises(MoEEpConfigError, match="rank 1: too many"):
        transport.dispatch(None if rank == 1 else outgoing(rank, 0), "too many")
    received = transport.dispatch(outgoing(rank, 0))
    outs.append(transport.combine(received.x_NH, received).cpu())
    transport.destroy()
    return outs


@pytest.mark.gpus(2)
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_terms_come_back_to_their_slots(mode):
    for rank, outs in enumerate(spawn.run(move, 2, mode, device="cuda")):
        for call in range(len(TOKENS)):
            sent = outgoing(rank, call)
            ids = sent.topk_ids_TK.cpu()
            factor = 1 + ids[..., None] / 64
            expected = (sent.x_TH.cpu()[:, None].float() * factor).bfloat16()
            assert torch.equal(outs[call][ids >= 0], expected[ids >= 0])
        first = outgoing(rank, 0)
        used = first.topk_ids_TK.cpu() >= 0
        x = first.x_TH.cpu()[:, None].expand(-1, TOP_K, -1)
        assert torch.equal(outs[-1][used], x[used])

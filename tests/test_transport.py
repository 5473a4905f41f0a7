"""TorchTransport and groups: every row arrives where it belongs, counted exactly, over gloo."""

import pytest
import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTransportError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import LocalTransport, Outgoing
from moe_ep.launch import spawn

NUM_RANKS, TOP_K, NUM_EXPERTS = 3, 4, 5
OWNER_E = torch.tensor([0, 0, 1, 1, 2])
TOKENS = (5, 0, 9)  # of each rank
HIDDEN = 7  # odd: ids and weights behind the row still start on 4 bytes


def outgoing(rank: int) -> Outgoing:
    """Token t of rank r is a row of 32 r + t, exact in BF16 and different for every token."""
    num_tokens = TOKENS[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, NUM_EXPERTS, (num_tokens, TOP_K), generator=generator)
    ids[ids < 0] = -(2**40)  # masked, and zero in its low 32 bits
    code_T1 = (32 * rank + torch.arange(num_tokens))[:, None].float()
    return Outgoing(
        x_TH=(code_T1 + torch.zeros(HIDDEN)).bfloat16(),
        topk_ids_TK=ids,
        topk_weights_TK=torch.rand(num_tokens, TOP_K, generator=generator),
        bound=9,
    )


def make_transport(group: EpGroup, layer_id: int, owner_E: torch.Tensor | None) -> TorchTransport:
    return TorchTransport(
        group,
        Liveness(group, layer_id, timeout_s=20.0),
        layer_id=layer_id,
        hidden=HIDDEN,
        top_k=TOP_K,
        owner_E=owner_E,
        timeout_s=20.0,
    )


def move(rank: int, num_ranks: int) -> dict:
    """Both modes: what arrived, and what came back of rows that encode where they were made."""
    # Torch 2.13 has this method, 2.11 has not: what passes here runs on both.
    if hasattr(dist.ProcessGroup, "all_to_all_single"):
        del dist.ProcessGroup.all_to_all_single
    group = EpGroup.default("cpu")
    seen = {}
    ep = make_transport(group, 1, OWNER_E)
    received = ep.dispatch(outgoing(rank))
    seen["ep received"] = received.x_NH.clone(), received.topk_ids_NK.clone()
    # The term of (source token, slot) made here: token code + slot / 8 + rank here / 64, in FP32.
    is_here = (received.topk_ids_NK >= 0) & (OWNER_E[received.topk_ids_NK.clamp(min=0)] == rank)
    token_idx, slot_idx = is_here.nonzero(as_tuple=True)
    terms = received.x_NH[token_idx].float() + slot_idx[:, None] / 8 + rank / 64
    seen["ep back"] = ep.combine(terms, received)

    tp = make_transport(group, 2, None)
    received = tp.dispatch(outgoing(rank))
    seen["tp received"] = received.x_NH.clone(), received.topk_weights_NK.clone()
    seen["tp back"] = tp.combine(received.x_NH.float() + rank / 64, received)

    ep.agree_on_call(9)
    with pytest.raises(MoEEpConfigError) as error:
        ep.agree_on_call(None if rank == 1 else 9, "no tokens" if rank == 1 else None)
    seen["refused"] = str(error.value)

    # One rank calls another transport than the others.
    with pytest.raises(MoEEpTransportError) as error:
        (ep if rank else tp).dispatch(outgoing(rank))
    seen["mixed up"] = str(error.value)
    ep.destroy()
    ep.destroy()

    subset = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(MoEEpConfigError, match="belongs to"):
            EpGroup.from_process_group(subset, "cpu")
    else:
        part = EpGroup.from_process_group(subset, "cpu")
        seen["names"] = part.rank, part.rank_name(1)
        seen["records"] = [exchange_records(part, "topic", {"rank": rank}, 20.0) for _ in range(2)]
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict]:
    return spawn.run(move, NUM_RANKS)


def test_a_token_arrives_once_at_each_owner_of_its_experts(seen):
    for rank in range(NUM_RANKS):
        x_NH, ids_NK = seen[rank]["ep received"]
        expected = [
            (source, token)
            for source in range(NUM_RANKS)
            for token, ids in enumerate(outgoing(source).topk_ids_TK.tolist())
            if any(expert >= 0 and OWNER_E[expert] == rank for expert in ids)
        ]
        assert x_NH[:, 0].tolist() == [32 * source + token for source, token in expected]
        assert (x_NH == x_NH[:, :1]).all()
        sent = [outgoing(source).topk_ids_TK[token].clamp(min=-1) for source, token in expected]
        assert torch.equal(ids_NK.long(), torch.stack(sent))


def test_terms_come_back_to_their_token_and_slot(seen):
    for rank in range(NUM_RANKS):
        sent, terms_TKH = outgoing(rank), seen[rank]["ep back"]
        assert terms_TKH.shape == (TOKENS[rank], TOP_K, HIDDEN)
        for token, ids in enumerate(sent.topk_ids_TK.tolist()):
            for slot, expert in enumerate(ids):
                if expert >= 0:
                    code = 32 * rank + token + slot / 8 + OWNER_E[expert].item() / 64
                    assert (terms_TKH[token, slot] == code).all()


def test_ranks_agree_on_a_call_without_moving_tokens(seen):
    assert [rank["refused"] for rank in seen] == ["rank 1: no tokens"] * NUM_RANKS


def test_under_tp_every_token_and_its_weights_reach_every_rank(seen):
    everything = [outgoing(rank) for rank in range(NUM_RANKS)]
    for rank in range(NUM_RANKS):
        x_NH, weights_NK = seen[rank]["tp received"]
        assert torch.equal(x_NH, torch.cat([sent.x_TH for sent in everything]))
        assert torch.equal(weights_NK, torch.cat([sent.topk_weights_TK for sent in everything]))


def test_under_tp_one_part_of_each_rank_comes_back_in_rank_order(seen):
    for rank in range(NUM_RANKS):
        parts_RTH = seen[rank]["tp back"]
        x_TH = outgoing(rank).x_TH.float()
        expected = torch.stack([x_TH + other / 64 for other in range(NUM_RANKS)])
        assert torch.equal(parts_RTH, expected)


def test_ranks_in_different_calls_all_raise_and_say_where_each_is(seen):
    for rank in range(NUM_RANKS):
        assert "rank 0: layer 2 step 1, rank 1: layer 1 step 3" in seen[rank]["mixed up"]


def test_a_subset_of_the_job_is_a_group_that_names_both_ranks(seen):
    assert seen[0]["names"] == (0, "rank 1 (global rank 2)")
    assert seen[2]["names"][0] == 1
    records = [{"rank": 0}, {"rank": 2}]
    assert seen[0]["records"] == seen[2]["records"] == [(1, records), (2, records)]


def test_one_rank_copies_nothing():
    transport = LocalTransport("ep")
    sent = outgoing(2)
    received = transport.dispatch(sent)
    assert received.x_NH is sent.x_TH
    all_used = Outgoing(
        x_TH=sent.x_TH,
        topk_ids_TK=sent.topk_ids_TK.clamp(min=0),
        topk_weights_TK=sent.topk_weights_TK,
        bound=9,
    )
    rows = torch.rand(9 * TOP_K, HIDDEN)
    terms_TKH = transport.combine(rows, transport.dispatch(all_used))
    assert terms_TKH.data_ptr() == rows.data_ptr()
    assert terms_TKH.shape == (9, TOP_K, HIDDEN)


def test_a_process_of_torchrun_without_a_process_group_is_not_taken_for_one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MoEEpConfigError, match="init_process_group"):
        EpGroup.default("cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert EpGroup.default("cpu").num_ranks == 1

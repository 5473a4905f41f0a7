"""Field cases of kind routing: tokens that went to the wrong expert, twice, or nowhere."""

import dataclasses

import pytest
import torch
from field_ranks import S0, TOP_1, OneRank, Ranks, Virtual, on
from layer_cases import gathered, make_inputs, with_ids

from moe_ep import MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.dispatch_plan import DispatchPlan

TWO = ("cpu2", "split2", "mega2", "split@2", "mega@2")
FOUR = ("cpu4", "split4", "mega4", "split@4", "mega@4")


def check(
    ranks: Ranks,
    shape: MoEShape,
    parts: list[MoEInputs],
    weights: MoEWeights | None = None,
    capacity: int = 32,
) -> list[torch.Tensor]:
    """One call of a layer of its own; its outputs are right."""
    weights = weights or ranks.weights(shape)
    layer = ranks.layer(shape, weights, capacity)
    outputs = layer(parts)
    ranks.assert_right(outputs, parts, weights, shape)
    layer.destroy()
    return outputs


@on(*TWO)
def test_A13_padding_rows_that_name_one_expert_in_every_slot_count_each_slot(ranks):
    shape = dataclasses.replace(S0, num_experts=128, top_k=8)
    for count in (256, 257):
        parts = ranks.parts(shape, count)
        for part in parts:
            part.topk_ids[-10:] = 0
        check(ranks, shape, parts, capacity=257)


@on(*TWO)
def test_A14_masked_rows_are_zero_and_masked_slots_are_skipped(ranks):
    layer = ranks.layer(S0, ranks.weights())
    parts = ranks.parts(S0, 8)
    for part in parts:
        part.topk_ids[2] = torch.tensor([4, 1])
    whole = layer(parts)
    for part in parts:
        part.topk_ids[5:] = -1
        part.topk_ids[2, 1] = -1
    outputs = layer(parts)
    ranks.assert_right(outputs, parts, ranks.weights())
    for output, unmasked in zip(outputs, whole, strict=True):
        assert not output[5:].any()
        others = [0, 1, 3, 4]
        assert torch.equal(output[others], unmasked[others])
        assert not torch.equal(output[2], unmasked[2])


@on(*TWO)
def test_A17_an_expert_that_nobody_picks_leaves_no_trace(ranks):
    shape = dataclasses.replace(S0, num_experts=16)
    weights = ranks.weights(shape)
    loud = dict(weights.tensors)
    name = "w2" if weights.down_scale is None else "down_scale"
    loud[name] = loud[name].clone()
    loud[name][0] *= 100
    parts = ranks.parts(shape, 16)
    parts = [with_ids(part, part.topk_ids % 15 + 1) for part in parts]
    outputs = check(ranks, shape, parts, dataclasses.replace(weights, **loud))
    assert all(map(torch.equal, outputs, check(ranks, shape, parts, weights)))


@on(*TWO)
def test_A18_experts_of_one_rank_alone(ranks):
    for first in (4, 0):
        parts = [with_ids(part, part.topk_ids % 4 + first) for part in ranks.parts(S0, 16)]
        outputs = check(ranks, S0, parts)
        assert all(output.any(dim=1).all() for output in outputs)


@on("cpu4", "split4", "mega4", "split@4", "mega@4")
def test_A20_ten_experts_over_four_ranks(ranks):
    shape = dataclasses.replace(S0, num_experts=10)
    check(ranks, shape, ranks.parts(shape, 16))


@on(*TWO)
def test_A20_seven_experts_over_two_ranks(ranks):
    shape = dataclasses.replace(S0, num_experts=7)
    check(ranks, shape, ranks.parts(shape, 16))


@on("split2", "mega2", "split@2", "mega@2")
def test_A21_hidden_1024_and_22_slots(ranks):
    shape = MoEShape(num_experts=64, top_k=22, hidden=1024, intermediate=256)
    check(ranks, shape, ranks.parts(shape, 16))


@on("cpu1", "split1", "mega1")
def test_A24_one_rank_returns_a_row_for_each_token(ranks):
    (output,) = check(ranks, S0, ranks.parts(S0, 16))
    assert output.shape == (16, 256)


@on(*TWO, *FOUR)
def test_A26_all_tokens_of_all_ranks_to_the_last_expert(ranks):
    parts = [with_ids(part, TOP_1.num_experts - 1) for part in ranks.parts(TOP_1, 32)]
    check(ranks, TOP_1, parts)


@on("cpu1", "split2", "mega2", "mega4")
def test_A27_the_counts_of_every_expert_are_those_of_the_ids(ranks):
    """As each kernel holds them after its call: of the plan, of the permutation, of the pool."""
    parts = [make_inputs(S0, 16, seed=rank, masked=0.25) for rank in range(ranks.num_ranks)]
    ids = gathered(parts).topk_ids.flatten()
    expected = torch.bincount(ids[ids >= 0], minlength=8)
    if ranks.kind == "cpu":
        plan = DispatchPlan.from_topk_ids(ids.view(-1, 2), num_experts=8, local_experts=range(8))
        assert torch.equal(plan.counts.long(), expected)
        return
    layer = ranks.layer(S0, ranks.weights())
    layer(parts)
    if isinstance(ranks, Virtual):
        counts = counts_of_pool(layer.mega, parts)
    else:
        counts = layer.module._backend._workspace["counts"].cpu().long()
    assert torch.equal(counts, expected)


def counts_of_pool(mega, parts: list[MoEInputs]) -> torch.Tensor:
    """Rows of each expert, by which slot each row of the ranks' pools says that it holds."""
    from moe_ep.megakernel.protocol import SLOT_MASK

    ids = torch.full((len(parts), 32, 2), -1)
    for rank, part in enumerate(parts):
        ids[rank, : part.num_tokens] = part.topk_ids
    step = int(mega.memory.region("step")[0])
    meta = mega.memory.region("src_meta").cpu().flatten()
    slots = meta[meta >> 32 == step] & SLOT_MASK
    assert len(slots.unique()) == len(slots), "two pool rows hold one slot"
    held = ids.flatten()[slots]
    assert (held >= 0).all(), "a pool row holds a masked slot"
    return torch.bincount(held, minlength=8)


@on(*FOUR)
def test_A30_a_shared_expert_is_the_models_and_no_layer_adds_it(ranks):
    """The layer has no shared expert to add once a rank: what a model adds to the output itself is
    the same for every number of ranks."""
    parts = ranks.parts(S0, 8)
    outputs = check(ranks, S0, parts)
    alone = OneRank(ranks.kind, 1)
    (together,) = alone.layer(S0, alone.weights())([gathered(parts)])
    assert torch.equal(torch.cat(outputs), together)


@on("split2", "mega1")
def test_A65_a_replay_follows_the_routing_that_then_stands_in_its_tensors(ranks):
    layer = ranks.module(S0, ranks.weights())
    layer.warmup()
    first, second = (
        MoEInputs(*(tensor.cuda() for tensor in vars(make_inputs(S0, 16, seed)).values()))
        for seed in (1, 2)
    )
    static = MoEInputs(*(tensor.clone() for tensor in vars(first).values()))
    out = torch.empty_like(static.hidden_states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(static, out=out)
    for inputs in (second, first, second):
        for name, tensor in vars(inputs).items():
            getattr(static, name).copy_(tensor)
        graph.replay()
        assert torch.equal(out, layer(inputs))
    ranks.assert_right([out.cpu()], [make_inputs(S0, 16, 2)], ranks.weights())


@on("mega2")
def test_A65_a_replay_of_several_ranks_follows_their_routing_too(ranks):
    layer = ranks.layer(S0, ranks.weights())
    parts = ranks.parts(S0, 16)
    call = layer.bind(parts)
    call.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.launch()
    other = ranks.parts(S0, 16, seed=50)
    call.refill(other)
    graph.replay()
    layer.check()
    ranks.assert_right(call.outputs(), other, ranks.weights())


# ---- ranks that disagree -------------------------------------------------------------------------


@on("cpu2", "split@2", "mega@2")
def test_A31_ranks_that_disagree_on_the_capacity_all_raise_with_both_values(ranks):
    capacity = 32 if ranks.rank == 0 else 64
    with pytest.raises(MoEEpConfigError, match="max_tokens_per_rank.*64.*32"):
        ranks.module(S0, ranks.weights(), capacity)
    parts = ranks.parts(S0, 16)
    ranks.assert_right(ranks.layer(S0, ranks.weights())(parts), parts, ranks.weights())

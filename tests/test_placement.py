"""Placement: maps of slots, which copy a token takes, and experts that move between ranks.

The oracle of every output is the specification on the logical experts of one process.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from checkpoint_files import SHAPE as CHECKPOINT_SHAPE
from checkpoint_files import make, save
from layer_cases import make_inputs, make_weights

import moe_ep
from moe_ep import MoEEpLayer, MoEShape
from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.launch import spawn
from moe_ep.placement import ExpertMap, PhysicalIds, place
from moe_ep.rebalance import Moves
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=64, intermediate=64)
COPIES = ExpertMap(8, (0, 1, 2, 3, 4, 5, 6, 7, 0, 5))
SWAPPED = ExpertMap(8, (1, 0, 2, 3, 4, 5, 6, 7))
OTHER = ExpertMap(8, (*SWAPPED.physical_to_logical, 0, 5))
REVERSED = ExpertMap(8, (7, 6, 5, 4, 3, 2, 1, 0, 1, 1))
SPREAD = ExpertMap(8, (0, 2, 4, 6, 1, 3, 5, 7, 2, 2))


def test_a_map_reads_both_ways():
    assert COPIES.logical_to_physical == ((0, 8), (1,), (2,), (3,), (4,), (5, 9), (6,), (7,))
    assert COPIES.logical_of((8, 9, 3)) == (0, 5, 3)
    assert ExpertMap.identity(3).physical_to_logical == (0, 1, 2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0, 1, 2, 3, 4, 5, 6), "no slot holds expert 7"),
        ((0, 1, 2, 3, 4, 5, 6, 8), "slot 7 holds expert 8; allowed: 0 to 7"),
        ((0, 1, 2, 3, 4, 5, 6, 7, -1), "slot 8 holds expert -1"),
        ((), "no slot holds expert 0, 1, 2"),
    ],
)
def test_a_map_without_an_expert_or_with_an_unknown_one_is_refused(slots, message):
    with pytest.raises(MoEEpConfigError, match=message):
        ExpertMap(8, slots)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_token_t_of_rank_r_takes_copy_t_plus_r_modulo_their_number(dtype, rank):
    expert_map = ExpertMap(3, (0, 1, 2, 1, 1))
    ids = torch.tensor([[0, 1], [1, 1], [1, 2], [2, 1], [1, 0]], dtype=dtype)
    slots = PhysicalIds(expert_map, rank, torch.device("cpu"))(ids)
    copies = expert_map.logical_to_physical
    wanted = [
        [copies[e][(token + rank) % len(copies[e])] for e in row]
        for token, row in enumerate(ids.tolist())
    ]
    assert slots.tolist() == wanted
    assert slots.dtype == dtype


def test_masked_slots_stay_masked_and_ids_that_are_no_experts_become_no_slots():
    ids = torch.tensor([[-1, 8], [-(2**40), 2**40], [9, 7]])
    slots = PhysicalIds(COPIES, 0, torch.device("cpu"))(ids)
    assert (slots[ids < 0] < 0).all()
    assert (slots[ids >= 8] >= COPIES.num_physical).all()
    assert slots[2, 1] == 7


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("new", [COPIES, REVERSED, SPREAD])
def test_moves_bring_every_slot_its_expert_and_nothing_else(num_ranks, new):
    held = [
        [COPIES.physical_to_logical[s] for s in slots]
        for slots in torch.arange(10).tensor_split(num_ranks)
    ]
    moves = [Moves.between(COPIES, new, rank, num_ranks) for rank in range(num_ranks)]
    after = [list(part) for part in held]
    num_moved = 0
    for rank, mine in enumerate(moves):
        for source, positions in enumerate(mine.receives):
            sent = moves[source].sends[rank]
            assert len(sent) == len(positions)
            for position, source_position in zip(positions, sent, strict=True):
                after[rank][position] = held[source][source_position]
                num_moved += 1
    assert sum(after, []) == list(new.physical_to_logical)
    changed = zip(COPIES.physical_to_logical, new.physical_to_logical, strict=True)
    assert num_moved == sum(a != b for a, b in changed)


def test_a_layer_with_copies_computes_what_one_without_does():
    weights = make_weights(SHAPE, "nvfp4")
    layer = MoEEpLayer(SHAPE, place(weights, COPIES), max_tokens_per_rank=32, expert_map=COPIES)
    inputs = make_inputs(SHAPE, 32, seed=1, masked=0.2)
    assert torch.equal(layer(inputs), moe_reference(inputs, weights, SHAPE))


@pytest.mark.parametrize("bad_id", [8, 9, 100])
def test_an_id_between_experts_and_slots_is_still_no_expert(bad_id):
    layer = MoEEpLayer(
        SHAPE, place(make_weights(SHAPE), COPIES), max_tokens_per_rank=4, expert_map=COPIES
    )
    inputs = make_inputs(SHAPE, 4, seed=1)
    inputs.topk_ids[2, 1] = bad_id
    with pytest.raises(MoEEpConfigError, match=f"topk_ids holds {bad_id}; allowed: 0 to 7"):
        layer(inputs)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda w: (w, COPIES), "num_experts of the weights is 8, the shape has 10"),
        (lambda w: (place(w, COPIES), None), "num_experts of the weights is 10, the shape has 8"),
        (lambda w: (w, ExpertMap.identity(7)), "places 7 experts, shape has 8"),
        (lambda w: (w, (0, 1)), "expert_map must be an ExpertMap, got tuple"),
        (lambda w: (w.shard("tp", 0, 1), ExpertMap.identity(8)), "expert_map needs parallel 'ep'"),
        (lambda w: (place(w, OTHER), COPIES), "hold expert 1 in slot 0, expert_map puts 0 there"),
        (lambda w: (place(w, SWAPPED), None), "hold expert 1 in slot 0, expert_map puts 0 there"),
        (lambda w: (w, SWAPPED), "hold expert 0 in slot 0, expert_map puts 1 there"),
    ],
)
def test_weights_that_do_not_fit_the_map_are_refused(build, message):
    weights, expert_map = build(make_weights(SHAPE))
    with pytest.raises(MoEEpConfigError, match=message):
        MoEEpLayer(SHAPE, weights, max_tokens_per_rank=4, expert_map=expert_map)


def test_rebalance_needs_a_map_and_as_many_slots():
    weights = make_weights(SHAPE)
    plain = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=4)
    with pytest.raises(MoEEpConfigError, match="needs a layer built with expert_map"):
        plain.rebalance(COPIES)
    placed = MoEEpLayer(SHAPE, place(weights, COPIES), max_tokens_per_rank=4, expert_map=COPIES)
    with pytest.raises(MoEEpConfigError, match="8 experts on 8 slots; allowed: 8 on 10, as built"):
        placed.rebalance(ExpertMap.identity(8))
    with pytest.raises(MoEEpConfigError, match="must be an ExpertMap, got list"):
        placed.rebalance([0, 1])
    inputs = make_inputs(SHAPE, 4, seed=1)
    assert torch.equal(placed(inputs), moe_reference(inputs, weights, SHAPE))


@pytest.mark.parametrize("rank", [0, 1])
def test_load_fills_the_slots_of_the_rank(tmp_path, rank):
    save(tmp_path, make("modelopt_nvfp4").tensors)
    options = {"shape": CHECKPOINT_SHAPE, "format": "modelopt_nvfp4"}
    full = moe_ep.load(tmp_path, 3, **options)
    part = moe_ep.load(tmp_path, 3, **options, rank=rank, num_ranks=2, expert_map=COPIES)
    wanted = place(full, COPIES).shard("ep", rank, 2)
    assert part.expert_ids == wanted.expert_ids == tuple(range(5 * rank, 5 * rank + 5))
    for name, tensor in wanted.tensors.items():
        assert torch.equal(getattr(part, name).view(torch.uint8), tensor.view(torch.uint8))


def moved_layer(rank: int, num_ranks: int) -> dict[str, object]:
    """Outputs before and after each move, and what a move refuses, for every weight format."""
    seen: dict[str, object] = {}
    inputs = make_inputs(SHAPE, 9 + rank, seed=rank, masked=0.1)
    for name in ("bf16", "nvfp4", "fp8_block", "mxfp4"):
        weights = make_weights(SHAPE, name)
        part = place(weights, COPIES).shard("ep", rank, num_ranks)
        addresses = {key: tensor.data_ptr() for key, tensor in part.tensors.items()}
        layer = MoEEpLayer(SHAPE, part, max_tokens_per_rank=16, expert_map=COPIES)
        wanted = moe_reference(inputs, weights, SHAPE)
        outputs = [layer(inputs)]
        for new in (REVERSED, SPREAD, COPIES):
            layer.rebalance(new)
            outputs.append(layer(inputs))
            there = place(weights, new).shard("ep", rank, num_ranks)
            seen[f"{name} weights"] = all(
                torch.equal(part.tensors[key].view(torch.uint8), tensor.view(torch.uint8))
                for key, tensor in there.tensors.items()
            )
        seen[name] = all(torch.equal(output, wanted) for output in outputs)
        seen[f"{name} addresses"] = addresses == {k: t.data_ptr() for k, t in part.tensors.items()}
    for key, expert_map in (
        ("another map", (REVERSED, SPREAD)[rank % 2]),
        ("a bad map", ExpertMap.identity(8) if rank == 1 else SPREAD),
    ):
        with pytest.raises(MoEEpConfigError) as refused:
            layer.rebalance(expert_map)
        seen[key] = str(refused.value)
    seen["works after"] = torch.equal(layer(inputs), wanted)
    layer.destroy()
    return seen


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rebalance_keeps_the_bits_and_refuses_together(num_ranks):
    for rank, seen in enumerate(spawn.run(moved_layer, num_ranks, timeout_s=240)):
        another, bad = seen.pop("another map"), seen.pop("a bad map")
        assert all(seen.values()), (rank, seen)
        assert "rank 1: expert_map is ExpertMap" in another
        assert "8 experts on 8 slots; allowed: 8 on 10" in bad
        assert ("rank 1: " in bad) == (rank != 1)


def absent_rank(rank: int, num_ranks: int) -> tuple[str, bool]:
    """Rank 1 comes to the move when rank 0 has given up; both try again."""
    part = place(make_weights(SHAPE), COPIES).shard("ep", rank, num_ranks)
    layer = MoEEpLayer(SHAPE, part, max_tokens_per_rank=16, expert_map=COPIES, timeout_s=3.0)
    inputs = make_inputs(SHAPE, 9, seed=rank)
    before, message = layer(inputs), ""
    if rank == 0:
        with pytest.raises(MoEEpTimeoutError) as given_up:
            layer.rebalance(SPREAD)
        message = str(given_up.value)
    dist.barrier()
    layer.rebalance(SPREAD)
    return message, torch.equal(layer(inputs), before)


def test_a_rank_that_does_not_come_to_a_move_is_named_and_may_come_later():
    (message, is_same), (_, is_same_on_1) = spawn.run(absent_rank, 2, timeout_s=240)
    assert "rebalance: rank 1 did not come within timeout_s=3" in message
    assert is_same and is_same_on_1


def test_identity_has_no_copies_and_can_be_moved():
    weights = make_weights(SHAPE)
    layer = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=8, expert_map=ExpertMap.identity(8))
    inputs = make_inputs(SHAPE, 8, seed=3)
    before = layer(inputs)
    layer.rebalance(ExpertMap(8, (3, 1, 2, 0, 7, 6, 5, 4)))
    assert torch.equal(layer(inputs), before)
    scaled = dataclasses.replace(make_weights(SHAPE), w2=2 * make_weights(SHAPE).w2)
    w2 = {f"{e}.down_proj.weight": scaled.w2[e] for e in range(8)}
    layer.update_weights(w2, format="hf")  # names are those of the experts, wherever they are
    assert torch.equal(layer(inputs), moe_reference(inputs, scaled, SHAPE))


def test_new_weights_of_another_map_are_refused_and_nothing_is_written():
    weights = make_weights(SHAPE)
    layer = MoEEpLayer(SHAPE, place(weights, COPIES), max_tokens_per_rank=4, expert_map=COPIES)
    inputs = make_inputs(SHAPE, 4, seed=1)
    before = layer(inputs)
    with pytest.raises(MoEEpConfigError, match="hold expert 1 in slot 0, expert_map puts 0 there"):
        layer.update_weights(place(weights, OTHER))
    assert torch.equal(layer(inputs), before)

"""The split path over NCCL-EP: every layout, on CPUs, with a fake of the library."""

from contextlib import nullcontext
from unittest import mock

import nccl_ep_fake
import pytest
import torch

from moe_ep import MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.nccl_ep import NcclEpTransport, expert_of_row, one_row_per_expert, rows_of_slots
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.config import NCCL_EP_LAYOUTS, NcclEpConfig
from moe_ep.launch import spawn
from moe_ep.reference import moe_reference
from moe_ep.split import TorchExperts
from moe_ep.split_nccl_ep import make_nccl_ep_split

SHAPE = MoEShape(num_experts=6, top_k=5, hidden=32, intermediate=16)
CAPACITY = 6
TOKENS = ((6, 3), (0, 5), (1, 0), (4, 6))  # of each rank, call by call
CONFIGS = [
    NcclEpConfig(mode=mode, layout=layout, exact_combine=is_exact)
    for mode, layouts in NCCL_EP_LAYOUTS.items()
    for layout in layouts
    for is_exact in (False, True)
]


def all_weights() -> MoEWeights:
    gen = torch.Generator().manual_seed(7)
    w13 = torch.randn(6, 32, 32, generator=gen) / 6
    w2 = torch.randn(6, 32, 16, generator=gen) / 4
    return MoEWeights.from_dense(w13.bfloat16(), w2.bfloat16())


def inputs_of(rank: int, call: int) -> MoEInputs:
    """Masked slots, experts that a token names twice, weights of either sign."""
    gen = torch.Generator().manual_seed(10 * call + rank)
    num_tokens = TOKENS[call][rank]
    ids = torch.randint(-2, 6, (num_tokens, 5), generator=gen)
    x = torch.randn(num_tokens, 32, generator=gen).bfloat16()
    return MoEInputs(x, ids, torch.randn(num_tokens, 5, generator=gen))


def run_all(rank: int, num_ranks: int) -> list[list[torch.Tensor]]:
    """Outputs of every configuration and call."""
    nccl_ep_fake.install()
    group = EpGroup.default("cpu")
    with (
        mock.patch.object(NcclEpTransport, "_stream", lambda self: 0),
        mock.patch("torch.cuda.device", lambda device: nullcontext()),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("moe_ep.device_backend.DeviceBackend.on_device", lambda self: nullcontext()),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: False),
    ):
        return [run_one(group, number, config) for number, config in enumerate(CONFIGS)]


def run_one(group: EpGroup, layer_id: int, config: NcclEpConfig) -> list[torch.Tensor]:
    weights = all_weights().shard("ep", group.rank, group.num_ranks)
    liveness = Liveness(group, layer_id, 20.0)
    control = TorchTransport(
        group, liveness, layer_id=layer_id, hidden=32, top_k=5, owner_E=None, timeout_s=20.0
    )
    experts = TorchExperts(weights, SHAPE.activation)
    layers = [
        make_nccl_ep_split(
            *(config, experts, SHAPE, weights, group, CAPACITY, control, liveness, 20.0)
        )
        for _ in range(2)  # which share the transport
    ]
    outs = []
    for call in range(len(TOKENS)):
        layer = layers[call % 2]
        layer.require_callable()
        outs.append(layer.forward(inputs_of(group.rank, call), CAPACITY))
    with pytest.raises(MoEEpConfigError, match="rank 1: too many"):
        if group.rank == 1:
            layers[0].refuse("too many")
        layers[0].forward(inputs_of(group.rank, 0), CAPACITY)
    layers[1].destroy()
    bad = inputs_of(group.rank, 0)
    bad.topk_ids[2, 3] = 6
    layers[0].forward(bad, CAPACITY)
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[2, 3\] of an earlier call was not"):
        layers[0].check()
    layers[0].check()
    # Of one rank alone: it does its step, for which the other waits, and raises behind it.
    layers[0].forward(bad if group.rank == 0 else inputs_of(1, 0), CAPACITY)
    layers[0].require_callable()
    found = pytest.raises(MoEEpConfigError, match="of an earlier call was not")
    with found if group.rank == 0 else nullcontext():
        layers[0].forward(inputs_of(group.rank, 0), CAPACITY)
    layers[0].forward(bad if group.rank == 0 else inputs_of(1, 0), CAPACITY)
    layers[0].require_callable()
    with pytest.raises(MoEEpConfigError, match="rank 0: too few"):
        if group.rank == 0:
            layers[0].refuse("too few")
        layers[0].forward(inputs_of(group.rank, 0), CAPACITY)
    outs.append(layers[0].forward(inputs_of(group.rank, 0), CAPACITY))
    layers[0].destroy()
    layers[0].destroy()
    return outs


@pytest.fixture(scope="module")
def outputs() -> list[list[list[torch.Tensor]]]:
    return spawn.run(run_all, 2)


@pytest.mark.parametrize("config_idx", range(len(CONFIGS)), ids=map(str, CONFIGS))
def test_every_layout_gives_the_specified_layer(outputs, config_idx):
    for rank in range(2):
        calls = [*range(len(TOKENS)), 0]
        for call, out in zip(calls, outputs[rank][config_idx], strict=True):
            inputs = inputs_of(rank, call)
            expected = moe_reference(inputs, all_weights(), SHAPE)
            if CONFIGS[config_idx].exact_combine:
                assert torch.equal(out, expected)
            else:
                # Up to three roundings to BF16 where the specification has one.
                error = (out.double() - expected.double()).norm()
                assert error <= 0.006 * expected.double().norm()


def test_slots_of_one_expert_become_one_with_their_weights_sum():
    ids = torch.tensor([[3, 1, 3, -1, 3], [9, 2, 2, 9, -5]])
    weights = torch.tensor([[1.0, 2, 4, 8, 16], [1, 2, 4, 8, 16]])
    ids_TK, weights_TK = one_row_per_expert(ids.int(), weights, num_experts=6)
    assert ids_TK.dtype == torch.int64
    assert ids_TK.tolist() == [[3, 1, -1, -1, -1], [-1, 2, -1, -1, -1]]
    assert weights_TK[0, :2].tolist() == [21, 2] and weights_TK[1, 1] == 6


def test_each_slot_becomes_a_token():
    x = torch.arange(6.0).view(2, 3)
    rows, ids = rows_of_slots(x, torch.tensor([[0, -7], [9, 2]]), num_experts=6)
    assert torch.equal(rows, x[[0, 0, 1, 1]])
    assert ids.tolist() == [[0], [-1], [-1], [2]]


def test_expert_of_a_row_follows_the_counts():
    row = torch.arange(9)
    counts = torch.tensor([2, 0, 3], dtype=torch.int32)
    assert expert_of_row(row, counts, 3).tolist() == [0, 0, -1, -1, -1, -1, 2, 2, 2]
    assert expert_of_row(row, counts, None).tolist() == [0, 0, 2, 2, 2, -1, -1, -1, -1]


@pytest.mark.parametrize(("mode", "layout"), [("ll", "flat"), ("ht", "rank_major"), ("x", None)])
def test_a_layout_of_the_other_mode_is_refused(mode, layout):
    with pytest.raises(MoEEpConfigError, match="allowed: "):
        NcclEpConfig(mode=mode, layout=layout)


def test_the_layout_left_open_is_that_which_moves_a_token_once():
    assert NcclEpConfig() == NcclEpConfig(mode="ll", layout="rank_major")
    assert NcclEpConfig(mode="ht") == NcclEpConfig(mode="ht", layout="flat")

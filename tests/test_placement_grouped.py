"""Placement and refit where a kernel holds prepared weights; plain torch in the kernels' place."""

import pytest
import torch
from layer_cases import make_inputs, make_weights

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from grouped_fakes import use_fakes

from moe_ep import MoEEpLayer, MoEShape, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.config import GroupedGemmConfig
from moe_ep.placement import ExpertMap, place
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=64, intermediate=128)
COPIES = ExpertMap(8, (0, 1, 2, 3, 4, 5, 6, 7, 0, 5))


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> MoEEpLayer:
    use_fakes(monkeypatch.setattr)
    return MoEEpLayer(
        SHAPE,
        place(make_weights(SHAPE), COPIES),
        max_tokens_per_rank=16,
        backend=SplitConfig(kernel=GroupedGemmConfig()),
        expert_map=COPIES,
    )


def test_rebalance_and_refit_of_prepared_weights_keep_addresses_and_bits(layer):
    held = layer._backend.held
    addresses = held.w13.data_ptr(), held.w2.data_ptr()
    inputs = make_inputs(SHAPE, 16, seed=4, masked=0.2)
    old, new = make_weights(SHAPE), make_weights(SHAPE, seed=1)
    assert torch.equal(layer(inputs), moe_reference(inputs, old, SHAPE))
    layer.rebalance(ExpertMap(8, (7, 6, 5, 4, 3, 2, 1, 0, 1, 1)))
    assert torch.equal(layer(inputs), moe_reference(inputs, old, SHAPE))
    i = SHAPE.intermediate
    named = {f"{e}.gate_proj.weight": new.w13[e, :i] for e in range(8)}
    named |= {f"{e}.up_proj.weight": new.w13[e, i:] for e in range(8)}
    named |= {f"{e}.down_proj.weight": new.w2[e] for e in range(8)}
    layer.update_weights(named, format="hf")
    assert torch.equal(layer(inputs), moe_reference(inputs, new, SHAPE))
    assert addresses == (held.w13.data_ptr(), held.w2.data_ptr())


@pytest.mark.parametrize("bad_id", [8, 9, 10])
def test_an_id_that_is_no_expert_is_found_by_the_kernel_though_a_slot_has_that_number(
    layer, bad_id
):
    inputs = make_inputs(SHAPE, 4, seed=1)
    inputs.topk_ids[2, 1] = bad_id
    layer(inputs)
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[2, 1\] of an earlier call"):
        layer.check()

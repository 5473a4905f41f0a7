"""Single experts come back from what a layer holds as they went in, canonical or prepared."""

import dataclasses

import pytest
import torch
from layer_cases import make_weights

from moe_ep import MoEShape, MoEWeights
from moe_ep.held_weights import read_experts, some_experts, write_experts
from moe_ep.megakernel.formats import PreparedWeights, prepare

FORMATS = ["bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block"]
SHAPE = MoEShape(num_experts=4, top_k=2, hidden=192, intermediate=160)
NOT_GATED = dataclasses.replace(SHAPE, activation="relu2")


def with_biases(weights: MoEWeights) -> MoEWeights:
    e = weights.num_local_experts
    b13, b2 = torch.randn(e, weights.fc1_rows).bfloat16(), torch.randn(e, weights.hidden)
    return dataclasses.replace(weights, b13=b13, b2=b2)


def bytes_of(prepared: PreparedWeights) -> list[torch.Tensor]:
    fields = [getattr(prepared, field.name) for field in dataclasses.fields(prepared)]
    return [field for field in fields if isinstance(field, torch.Tensor)]


@pytest.mark.parametrize("shape", [SHAPE, NOT_GATED], ids=["gated", "not gated"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_experts_read_back_with_their_values(name, shape, is_prepared):
    weights = with_biases(make_weights(shape, name))
    held = prepare(weights) if is_prepared else weights
    form = weights.to("meta")
    read = some_experts(form, [2, 0], read_experts(held, form, [2, 0]))
    assert read.expert_ids == (2, 0)
    for tensor in ("w13", "w2"):
        for position, expert in enumerate((2, 0)):
            wanted = weights.dequantize_expert(tensor, expert, torch.float64)
            assert torch.equal(read.dequantize_expert(tensor, position, torch.float64), wanted)
    assert torch.equal(read.b13, weights.b13[[2, 0]])
    assert torch.equal(read.b2, weights.b2[[2, 0]])
    assert read.w13.untyped_storage().data_ptr() != weights.w13.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", FORMATS)
def test_experts_written_to_prepared_weights_are_as_prepared_together(name):
    old, new = (with_biases(make_weights(SHAPE, name, seed=seed)) for seed in (0, 1))
    held = prepare(old)
    addresses = [tensor.data_ptr() for tensor in bytes_of(held)]
    form = new.to("meta")
    write_experts(held, form, read_experts(new, form, [3, 1]), [3, 1])
    mixed = {
        field: torch.stack([(old, new)[idx in (1, 3)].tensors[field][idx] for idx in range(4)])
        for field in old.tensors
    }
    wanted = prepare(dataclasses.replace(old, **mixed))
    assert all(map(torch.equal, bytes_of(held), bytes_of(wanted)))
    assert addresses == [tensor.data_ptr() for tensor in bytes_of(held)]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_no_expert_is_a_set_of_experts(is_prepared):
    weights = make_weights(SHAPE, "nvfp4")
    held = prepare(weights) if is_prepared else weights
    form = weights.to("meta")
    none = read_experts(held, form, [])
    assert {name: len(tensor) for name, tensor in none.items()} == dict.fromkeys(form.tensors, 0)
    write_experts(held, form, none, [])

"""Field cases of kind memory on the CPU."""

import gc

import pytest
import torch
from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import weight_format
from moe_ep.reference import moe_reference

SHAPE = MoEShape(num_experts=8, top_k=2, hidden=256, intermediate=128)


def tensor_bytes() -> int:
    """Bytes of all tensor storage that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # isinstance would ask lazy objects for their class.
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block"])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
def test_a77_the_originals_are_not_kept_alive(name, rank, num_ranks):
    before = tensor_bytes()
    weights = make_weights(SHAPE, name).shard("ep", rank, num_ranks)
    layer = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=32) if num_ranks == 1 else None
    if layer is not None:
        layer.warmup()
    num_experts = SHAPE.num_experts // num_ranks
    rows, cols = SHAPE.fc1_rows, SHAPE.hidden
    fmt = weight_format(name)
    packed = fmt.num_bytes(rows, cols) + fmt.num_bytes(SHAPE.hidden, SHAPE.intermediate)
    assert tensor_bytes() - before <= 1.1 * num_experts * packed
    assert weights.num_bytes <= 1.1 * num_experts * packed


def test_a70_eight_layers_hold_their_weights_and_nothing_that_grows():
    before = tensor_bytes()
    layers = [MoEEpLayer(SHAPE, make_weights(SHAPE), max_tokens_per_rank=32) for _ in range(8)]
    inputs = make_inputs(SHAPE, 16, seed=0)
    held = []
    for _ in range(10):
        for layer in layers:
            layer(inputs)
        held.append(tensor_bytes() - before)
    assert held[-1] == held[1]
    weights = make_weights(SHAPE)
    assert held[-1] <= 1.1 * 8 * weights.num_bytes


def test_a71_layers_of_other_sizes_and_formats_interleave():
    wide = MoEShape(num_experts=4, top_k=3, hidden=512, intermediate=256)
    built = [
        (shape, name, MoEEpLayer(shape, make_weights(shape, name), max_tokens_per_rank=capacity))
        for shape, name, capacity in (
            (SHAPE, "nvfp4", 16),
            (wide, "nvfp4", 64),
            (SHAPE, "bf16", 16),
        )
    ]
    for idx in (0, 1, 2, 1, 0, 2, 2, 1, 0):
        shape, name, layer = built[idx]
        inputs = make_inputs(shape, layer.max_tokens_per_rank, seed=idx)
        expected = moe_reference(inputs, make_weights(shape, name), shape)
        assert torch.equal(layer(inputs), expected)


def test_a72_failed_calls_and_rebuilt_layers_leak_nothing():
    inputs = make_inputs(SHAPE, 16, seed=0)
    wrong = make_inputs(MoEShape(num_experts=8, top_k=3, hidden=256, intermediate=128), 16, seed=0)
    held = []
    for _ in range(5):
        layer = MoEEpLayer(SHAPE, make_weights(SHAPE), max_tokens_per_rank=32)
        with pytest.raises(MoEEpConfigError, match="topk_ids has shape"):
            layer(wrong)
        assert torch.equal(layer(inputs), moe_reference(inputs, make_weights(SHAPE), SHAPE))
        layer.destroy()
        held.append(tensor_bytes())
    assert held[-1] == held[1]


def test_a76_one_token_above_the_capacity_is_an_error_with_both_numbers():
    layer = MoEEpLayer(SHAPE, make_weights(SHAPE), max_tokens_per_rank=32)
    with pytest.raises(MoEEpConfigError, match="33 tokens; allowed: at most 32"):
        layer(make_inputs(SHAPE, 33, seed=0))
    inputs = make_inputs(SHAPE, 32, seed=0)
    assert torch.equal(layer(inputs), moe_reference(inputs, make_weights(SHAPE), SHAPE))


def test_a77_a_view_of_a_large_checkpoint_tensor_does_not_keep_it_alive_after_shard():
    before = tensor_bytes()
    checkpoint = torch.randn(64, 3 * SHAPE.intermediate, SHAPE.hidden).bfloat16()
    w13 = checkpoint[:8, : SHAPE.fc1_rows]
    w2 = checkpoint[8:16, : SHAPE.intermediate].mT.contiguous()
    weights = MoEWeights.from_dense(w13, w2).shard("ep", 1, 2)
    del checkpoint, w13, w2
    assert tensor_bytes() - before <= 1.1 * weights.num_bytes

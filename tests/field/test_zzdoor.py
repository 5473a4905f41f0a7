"""Fuzz of the door: whatever is given, an error of our own family or the right value.

What a valid call is stands here a second time, in the words of the README: a layer that refuses too
much fails as well as one that takes too much.
"""

import math
from dataclasses import replace

import pytest
import torch
from field_ranks import MAX_ROW_ERROR, S0, on
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import make_inputs, make_weights

from moe_ep import MoEInputs, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError, MoEEpError
from moe_ep.reference import moe_oracle_fp64, moe_reference

PLACES = ("cpu1", "split1", "mega1")
CAPACITY = 32
SMALL = replace(S0, hidden=64, intermediate=32)  # a CPU's
OPTIONS = {"deadline": None, "derandomize": False, "database": None}


def fuzz(num_examples: int, check) -> None:
    """`check(data)` for as many examples."""
    settings(max_examples=num_examples, **OPTIONS)(given(st.data())(check))()


def mostly(right, *wrong) -> st.SearchStrategy:
    """The first, now and then one of the others."""
    choices = st.sampled_from(wrong)
    return st.integers(0, 23).flatmap(lambda n: choices if n == 7 else st.just(right))


# ---- calls ---------------------------------------------------------------------------------------

STRIDES = (
    "contiguous",
    "transposed",
    "part of wider rows",
    "every second",
    "not aligned",
    "one row",
)


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in other memory; "one row" stands for all of them."""
    if tensor.ndim != 2 or not tensor.numel():
        return tensor
    rows, cols = tensor.shape
    match how:
        case "transposed":
            return tensor.T.contiguous().T
        case "part of wider rows":
            return torch.cat([tensor, tensor], dim=1)[:, :cols]
        case "every second":
            return torch.stack([tensor, tensor], dim=2).view(rows, 2 * cols)[:, ::2]
        case "not aligned":
            return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(rows, cols)
        case "one row":
            return tensor[:1].expand(rows, cols)
    return tensor


def draw_tensor(draw, right: torch.Tensor, device: str, dtypes: tuple) -> tuple[object, bool]:
    """The tensor or something else in its place; whether it may be taken."""
    shape = draw(mostly("right", "one column less", "three axes", "flat"))
    dtype = draw(mostly(right.dtype, *dtypes))
    where = draw(mostly(device, "meta", *(["cpu"] if device != "cpu" else [])))
    instead = draw(mostly("tensor", None, "list", "sparse"))
    tensor = right.to(dtype) if where != "meta" else right.to(dtype).to("meta")
    match shape:
        case "one column less":
            tensor = tensor[:, :-1]
        case "three axes":
            tensor = tensor[None]
        case "flat":
            tensor = tensor.flatten()
    tensor = strided(tensor.to(where), draw(st.sampled_from(STRIDES)))
    if instead in (None, "list"):
        return None if instead is None else [[0.0]], False
    if instead == "sparse" and where != "meta" and tensor.ndim == 2:
        return tensor.to_sparse(), False
    return tensor, (shape, dtype, where) == ("right", right.dtype, device)


def draw_values(draw, shape) -> MoEInputs:
    """Tokens with NaN, Inf and zeros; masked, extreme and rarely bad ids; weights of any size."""
    inputs = make_inputs(shape, draw(st.integers(0, 6)), seed=draw(st.integers(0, 3)))
    x, ids, weights = (tensor.clone() for tensor in vars(inputs).values())
    if draw(st.booleans()):
        ids = ids.long()
    for row in range(len(x)):
        special = draw(mostly(None, math.nan, math.inf, 0.0, 1e4, 1e-38))
        if special is not None:
            x[row, draw(st.integers(0, shape.hidden - 1))] = special
        for slot in range(shape.top_k):
            least = torch.iinfo(ids.dtype).min
            ids[row, slot] = draw(mostly(int(ids[row, slot]), -1, -7, least, shape.num_experts - 1))
            weights[row, slot] = draw(
                mostly(float(weights[row, slot]), 0.0, 256.0, 1e-40, math.nan)
            )
    if len(x) and draw(st.integers(0, 7)) == 0:
        most = torch.iinfo(ids.dtype).max
        ids[-1, -1] = draw(st.sampled_from((shape.num_experts, shape.num_experts + 1, most)))
    return MoEInputs(x, ids, weights)


def draw_call(draw, layer, shape) -> tuple[object, dict, bool]:
    """What goes in, and whether the rules of a call allow it. Bad ids are judged by the values."""
    device, values = layer.group.device.type, draw_values(draw, shape)
    x, x_fits = draw_tensor(draw, values.hidden_states, device, (torch.float16, torch.float32))
    ids, ids_fit = draw_tensor(
        draw, values.topk_ids, device, (torch.int16, torch.float32, torch.bool)
    )
    weights, weights_fit = draw_tensor(
        draw, values.topk_weights, device, (torch.bfloat16, torch.float64)
    )
    is_valid = x_fits and ids_fit and weights_fit
    options = {}
    if draw(st.integers(0, 3)) == 0:
        bound = draw(st.sampled_from((0, 3, CAPACITY, CAPACITY + 1, -1, True, 4.0, "8")))
        options["max_tokens"] = bound
        is_valid &= type(bound) is int and values.num_tokens <= bound <= CAPACITY
    if draw(st.integers(0, 2)) == 0:
        out = torch.zeros_like(values.hidden_states)
        if draw(st.booleans()) and x_fits:  # over its own input
            out_fits, options["out"] = True, x
            out_fits = x.stride(0) > 0 or len(x) < 2
        else:
            options["out"], out_fits = draw_tensor(draw, out, device, (torch.float32,))
            if out_fits:
                out_fits = options["out"].stride(0) > 0 or len(out) < 2
        is_valid &= out_fits
    return MoEInputs(x, ids, weights), options, is_valid


def assert_right(output: torch.Tensor, inputs: MoEInputs, weights: MoEWeights, shape, kind: str):
    if kind == "cpu":
        expected = moe_reference(inputs, weights, shape)
        assert torch.equal(output.isnan(), expected.isnan())
        assert torch.equal(output.nan_to_num(7.0), expected.nan_to_num(7.0))
        return
    exact = moe_oracle_fp64(inputs, weights, shape)
    is_finite = exact.isfinite().all(dim=1)
    assert not output[~is_finite].isfinite().all(dim=1).any()
    difference = (output.double() - exact)[is_finite].norm(dim=1)
    assert (difference <= MAX_ROW_ERROR * exact[is_finite].norm(dim=1) + 1e-30).all()


@on(*PLACES)
def test_any_call_is_right_or_refused(ranks):
    shape = SMALL if ranks.kind == "cpu" else S0
    weights = ranks.weights(shape)
    layer = ranks.module(shape, weights, CAPACITY)
    good = make_inputs(shape, 5, seed=9)
    good = MoEInputs(*(tensor.to(ranks.device) for tensor in vars(good).values()))
    expected = layer(good)
    seen = {True: 0, False: 0}

    def check(data) -> None:
        inputs, options, is_valid = draw_call(data.draw, layer, shape)
        if is_valid:
            held = MoEInputs(*(tensor.cpu().clone() for tensor in vars(inputs).values()))
            is_valid = not (held.topk_ids >= shape.num_experts).any()
        seen[is_valid] += 1
        if is_valid:
            output = layer(inputs, **options)
            layer.check()
            assert_right(output.cpu(), held, weights, shape, ranks.kind)
            return
        with pytest.raises(MoEEpConfigError, match="allowed|must be|requires"):
            layer(inputs, **options)
            layer.check()  # where a kernel finds the bad id
        assert torch.equal(layer(good), expected)

    fuzz(1500 if ranks.kind == "cpu" else 300, check)
    assert min(seen.values()) > 20, seen


# ---- weights -------------------------------------------------------------------------------------


def spoil(draw, tensor: torch.Tensor) -> object:
    """One property of a weight tensor changed."""
    match draw(st.sampled_from(("dtype", "shape", "strides", "device", "value", "instead"))):
        case "dtype":
            return tensor.to(draw(st.sampled_from((torch.float16, torch.float64, torch.int32))))
        case "shape":
            return draw(
                st.sampled_from((tensor[:-1], tensor[..., :-1], tensor[None], tensor.flatten()))
            )
        case "strides":
            if tensor.ndim < 2:
                return tensor.repeat_interleave(2)[::2]
            return tensor.mT.contiguous().mT
        case "device":
            return tensor.to("meta")
        case "instead":
            return draw(st.sampled_from((None, 1.0, [1.0])))
    changed = tensor.clone()
    flat = changed.view(-1)
    idx = draw(st.integers(0, len(flat) - 1))
    if changed.is_floating_point() and changed.element_size() > 1:
        values = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-40, 1e30)
        flat[idx] = draw(st.sampled_from(values))
    else:
        flat.view(torch.uint8)[idx] = draw(st.integers(0, 255))
    return changed


@on(*PLACES)
def test_any_weights_are_right_or_refused(ranks):
    shape = SMALL if ranks.kind == "cpu" else S0
    formats = (
        ("bf16", "nvfp4", "mxfp4", "mxfp8")
        if ranks.kind == "cpu"
        else ("bf16", "nvfp4", "fp8_block")
    )
    held = {name: make_weights(shape, name) for name in formats}
    inputs = make_inputs(shape, 5, seed=9)
    moved = MoEInputs(*(tensor.to(ranks.device) for tensor in vars(inputs).values()))
    seen = {"right": 0, "refused": 0}

    def check(data) -> None:
        weights = held[data.draw(st.sampled_from(formats))]
        name = data.draw(st.sampled_from(sorted(weights.tensors)))
        try:
            spoiled = replace(weights, **{name: spoil(data.draw, weights.tensors[name])})
            layer = ranks.module(shape, spoiled, CAPACITY)
        except MoEEpError:
            seen["refused"] += 1
            return
        seen["right"] += 1
        output = layer(moved)
        layer.check()
        layer.destroy()
        assert_right(output.cpu(), inputs, spoiled, shape, ranks.kind)

    fuzz(1500 if ranks.kind == "cpu" else 150, check)
    assert min(seen.values()) > 10, seen

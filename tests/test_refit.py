"""Refit by a checkpoint's names: whole or partial, in place, exact, or nothing at all.

The oracle is the specification on weights loaded from the same checkpoint by `moe_ep.load`.
"""

import dataclasses

import pytest
import torch
from checkpoint_files import FORMATS, FUSED, PER_EXPERT, PREFIX, SHAPE, make, save
from held_memory import held_bytes
from layer_cases import make_inputs

import moe_ep
from moe_ep import MoEEpLayer, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.formats import prepare
from moe_ep.placement import ExpertMap, place
from moe_ep.reference import moe_reference
from moe_ep.refit import stage

INPUTS = make_inputs(SHAPE, 16, seed=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(format, seed) -> full weights as `moe_ep.load` reads them."""
    made: dict[tuple[str, int], MoEWeights] = {}

    def weights(fmt: str, seed: int = 0) -> MoEWeights:
        if (fmt, seed) not in made:
            folder = tmp_path_factory.mktemp(fmt)
            save(folder, make(fmt, seed=seed).tensors)
            made[fmt, seed] = moe_ep.load(folder, 3, shape=SHAPE, format=fmt)
        return copy(made[fmt, seed])

    return weights


def copy(weights: MoEWeights) -> MoEWeights:
    return dataclasses.replace(weights, **{n: t.clone() for n, t in weights.tensors.items()})


def named(fmt: str, seed: int, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in make(fmt, seed=seed).tensors.items()}


def assert_same(weights: MoEWeights, expected: MoEWeights) -> None:
    for name, tensor in expected.tensors.items():
        assert torch.equal(weights.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_whole_layer_in_checkpoint_layout_at_the_same_addresses(loaded, fmt):
    weights = loaded(fmt)
    layer = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=16)
    addresses = [tensor.data_ptr() for tensor in weights.tensors.values()]
    for seed in (1, 2, 3):
        layer.update_weights(named(fmt, seed, f"{PREFIX}."), format=fmt, prefix=f"{PREFIX}.")
        assert_same(weights, loaded(fmt, seed))
        assert torch.equal(layer(INPUTS), moe_reference(INPUTS, loaded(fmt, seed), SHAPE))
    assert addresses == [tensor.data_ptr() for tensor in weights.tensors.values()]


@pytest.mark.parametrize("fmt", PER_EXPERT)
@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
def test_one_matrix_of_one_expert_changes_and_nothing_else(loaded, fmt, proj):
    layer = MoEEpLayer(SHAPE, weights := loaded(fmt), max_tokens_per_rank=16)
    part = {n: t for n, t in named(fmt, 1).items() if n.startswith(f"5.{proj}.")}
    layer.update_weights(part, format=fmt)
    w13, w2 = loaded(fmt).dequantize(torch.float64)
    new_w13, new_w2 = loaded(fmt, 1).dequantize(torch.float64)
    half = {"gate_proj": slice(0, 128), "up_proj": slice(128, 256)}.get(proj)
    if half is None:
        w2[5] = new_w2[5]
    else:
        w13[5, half] = new_w13[5, half]
    held_w13, held_w2 = weights.dequantize(torch.float64)
    assert torch.equal(held_w13, w13)
    assert torch.equal(held_w2, w2)


def test_a_single_scale_may_change(loaded):
    layer = MoEEpLayer(SHAPE, weights := loaded("modelopt_nvfp4"), max_tokens_per_rank=16)
    layer.update_weights({"5.up_proj.weight_scale_2": torch.tensor(0.25)}, format="modelopt_nvfp4")
    expected = loaded("modelopt_nvfp4")
    expected.up_scale[5] = 0.25
    assert_same(weights, expected)


@pytest.mark.parametrize("fmt", FUSED)
def test_one_fused_tensor_changes_and_nothing_else(loaded, fmt):
    layer = MoEEpLayer(SHAPE, weights := loaded(fmt), max_tokens_per_rank=16)
    part = {n: t for n, t in named(fmt, 1).items() if n.startswith("down_proj")}
    layer.update_weights(part, format=fmt)
    new = loaded(fmt, 1).tensors
    changed = {n: new[n] for n in ("w2", "w2_sf", "b2") if n in new}
    assert_same(weights, dataclasses.replace(loaded(fmt), **changed))


BROKEN = {
    "an unknown name": (
        {"5.up_proj.weight_scale_3": torch.tensor(1.0)},
        r"5.up_proj.weight_scale_3 is not known to format 'modelopt_nvfp4' with 8 experts; allowed",
    ),
    "an expert too many": (
        {"8.up_proj.weight_scale_2": torch.tensor(1.0)},
        "8.up_proj.weight_scale_2 is not known",
    ),
    "a name behind a prefix": (
        {"model.layers.3.mlp.experts.5.up_proj.weight_scale_2": torch.tensor(1.0)},
        r"; prefix is '', with 'model.layers.3.mlp.experts.' the name is known",
    ),
    "another layer": ({"model.x.5.up_proj.weight_scale_2": torch.tensor(1.0)}, "not known"),
    "a zero scale": (
        {"5.up_proj.weight_scale_2": torch.tensor(0.0)},
        "5.up_proj.weight_scale_2 of expert 5 is 0; it must be finite and above 0",
    ),
    "a NaN block scale": (
        {"5.up_proj.weight_scale": torch.full((128, 16), 0x7F).byte().view(torch.float8_e4m3fn)},
        r"5.up_proj.weight_scale of expert 5 is nan at \[0, 0\]",
    ),
    "another shape": (
        {"5.up_proj.weight_scale_2": torch.ones(2)},
        r"weight_scale_2 has shape \[2\]; allowed: \[\]",
    ),
    "another dtype": (
        {"5.up_proj.weight": torch.ones(128, 256)},
        "5.up_proj.weight is F32; allowed: U8",
    ),
    "no tensor": ({"5.up_proj.weight_scale_2": 1.0}, "must be a tensor, got 1.0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_pass_writes_nothing(loaded, case):
    named_tensors, message = BROKEN[case]
    layer = MoEEpLayer(SHAPE, weights := loaded("modelopt_nvfp4"), max_tokens_per_rank=16)
    good = {n: t for n, t in named("modelopt_nvfp4", 1).items() if n.startswith("0.")}
    with pytest.raises(MoEEpConfigError, match=message):
        layer.update_weights(good | named_tensors, format="modelopt_nvfp4")
    assert_same(weights, loaded("modelopt_nvfp4"))
    layer.update_weights(good, format="modelopt_nvfp4")  # and the layer goes on


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        (None, "format is missing"),
        ("deepseek_fp8", "format 'deepseek_fp8' holds fp8_block weights, the layer nvfp4"),
        ("nvfp4", "format 'nvfp4' is not known"),
    ],
)
def test_the_format_is_named_and_is_the_layer_s(loaded, fmt, message):
    layer = MoEEpLayer(SHAPE, loaded("modelopt_nvfp4"), max_tokens_per_rank=16)
    with pytest.raises(MoEEpConfigError, match=message):
        layer.update_weights(named("modelopt_nvfp4", 1), format=fmt)


def refit(held, form: MoEWeights, fmt: str, named_tensors, experts=None) -> None:
    experts = form.expert_ids if experts is None else experts
    stage(named_tensors, held, form, num_experts=8, experts=experts, format=fmt)()


@pytest.mark.parametrize(
    ("fmt", "parallel"),
    [(fmt, "ep") for fmt in FORMATS] + [(fmt, "tp") for fmt in FORMATS if fmt != "deepseek_fp8"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_part_of_whole_tensors(loaded, fmt, parallel, rank):
    held = loaded(fmt).shard(parallel, rank, 2)
    refit(held, held.to("meta"), fmt, named(fmt, 1))
    assert_same(held, loaded(fmt, 1).shard(parallel, rank, 2))


@pytest.mark.parametrize("fmt", FORMATS)
def test_prepared_weights_become_what_preparing_the_new_ones_gives(loaded, fmt):
    old = loaded(fmt)
    held, form = prepare(old), old.to("meta")
    addresses = held.w13.data_ptr(), held.w2.data_ptr(), held.w13_alpha.data_ptr()
    refit(held, form, fmt, named(fmt, 1))
    wanted = prepare(loaded(fmt, 1))
    for field in dataclasses.fields(held):
        value, expected = getattr(held, field.name), getattr(wanted, field.name)
        same = torch.equal(value, expected) if torch.is_tensor(value) else value == expected
        assert same, field.name
    assert addresses == (held.w13.data_ptr(), held.w2.data_ptr(), held.w13_alpha.data_ptr())


def test_every_copy_of_an_expert_is_updated(loaded):
    expert_map = ExpertMap(8, (0, 1, 2, 3, 4, 5, 6, 7, 0, 5))
    held = place(loaded("hf"), expert_map)
    layer = MoEEpLayer(SHAPE, held, max_tokens_per_rank=16, expert_map=expert_map)
    layer.update_weights(named("hf", 1), format="hf")
    assert_same(held, place(loaded("hf", 1), expert_map))
    assert torch.equal(layer(INPUTS), moe_reference(INPUTS, loaded("hf", 1), SHAPE))


@pytest.mark.parametrize("fmt", FORMATS)
def test_fifty_updates_leave_no_memory_behind(loaded, fmt):
    layer = MoEEpLayer(SHAPE, loaded(fmt), max_tokens_per_rank=16)
    part = {n: t for n, t in named(fmt, 1).items() if n[0] in "05" or n.startswith("down_proj")}
    layer.update_weights(part, format=fmt)
    before = held_bytes()
    for _ in range(49):
        layer.update_weights(part, format=fmt)
    assert held_bytes() == before


def test_an_update_of_nothing_and_a_format_for_weights_are_refused(loaded):
    layer = MoEEpLayer(SHAPE, loaded("hf"), max_tokens_per_rank=16)
    with pytest.raises(MoEEpConfigError, match="empty mapping"):
        layer.update_weights({}, format="hf")
    for options in ({"format": "hf"}, {"prefix": "model."}):
        with pytest.raises(MoEEpConfigError, match="format and prefix go with named tensors"):
            layer.update_weights(loaded("hf"), **options)

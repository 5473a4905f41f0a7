"""Field cases of checkpoints, scales and placement.

Each is a checkpoint, map or update that gave another runtime silently wrong experts. The oracle is
the values as the formats define them (`checkpoint_files`), in FP64, and the specification.
"""

import dataclasses

import numpy as np
import pytest
import torch
from checkpoint_files import PREFIX, SHAPE, Written, load, make, save
from field_ranks import on
from held_memory import held_bytes
from layer_cases import make_inputs, make_weights, with_ids
from oracles import relative_error, unpack_e2m1

from moe_ep import MoEEpLayer, MoEInputs, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.launch import spawn
from moe_ep.placement import ExpertMap, place
from moe_ep.reference import moe_oracle_fp64, moe_reference

INPUTS = make_inputs(SHAPE, 16, seed=0)


def run(weights: MoEWeights, inputs: MoEInputs = INPUTS) -> torch.Tensor:
    return MoEEpLayer(SHAPE, weights, max_tokens_per_rank=32)(inputs)


def on_two_ranks_with_copies(rank: int, num_ranks: int) -> dict[str, bool]:
    """A28: 8 experts and copies of 0 and 5. A29: experts dealt to the ranks in turn."""
    seen = {}
    weights = make_weights(SHAPE)  # expert e's values are scaled by 1 + e/8
    inputs = make_inputs(SHAPE, 16, seed=rank)
    only_copied = with_ids(inputs, torch.where(inputs.topk_ids % 2 == 0, 0, 5))
    for name, slots in (
        ("a28", (0, 1, 2, 3, 4, 5, 6, 7, 0, 5)),
        ("a29", (0, 2, 4, 6, 1, 3, 5, 7)),
    ):
        expert_map = ExpertMap(8, slots)
        part = place(weights, expert_map).shard("ep", rank, num_ranks)
        layer = MoEEpLayer(SHAPE, part, max_tokens_per_rank=32, expert_map=expert_map)
        for key, given in (("random", inputs), ("only the copied", only_copied)):
            seen[f"{name} {key}"] = torch.equal(layer(given), moe_reference(given, weights, SHAPE))
        layer.destroy()
    return seen


def test_a28_a29_placed_experts_and_their_copies_compute_as_if_in_order():
    for seen in spawn.run(on_two_ranks_with_copies, 2, timeout_s=240):
        assert all(seen.values()), seen


def test_a28_half_of_the_tokens_go_to_each_copy():
    from moe_ep.placement import PhysicalIds

    expert_map = ExpertMap(8, (0, 1, 2, 3, 4, 5, 6, 7, 0, 5))
    ids = torch.tensor([[0, 5]]).expand(16, 2)
    slots = PhysicalIds(expert_map, 0, torch.device("cpu"))(ids)
    assert torch.bincount(slots.flatten()).tolist() == [8, 0, 0, 0, 0, 8, 0, 0, 8, 8]


def test_a28_a_missing_copy_is_an_error_at_load(tmp_path):
    with pytest.raises(MoEEpConfigError, match="no slot holds expert 5"):
        ExpertMap(8, (0, 1, 2, 3, 4, 6, 7, 0))
    written = make("hf")
    save(tmp_path, {n: t for n, t in written.tensors.items() if not n.startswith("5.")})
    expert_map = ExpertMap(8, (0, 1, 2, 3, 4, 5, 6, 7, 0, 5))
    with pytest.raises(MoEEpConfigError, match=r"5.gate_proj.weight \(expert 5\)"):
        load(tmp_path, "hf", expert_map=expert_map)


def test_a29_weights_in_another_order_without_a_map_are_refused():
    weights = make_weights(SHAPE)
    dealt = dataclasses.replace(weights, expert_ids=(0, 2, 4, 6, 1, 3, 5, 7))
    with pytest.raises(MoEEpConfigError, match="in this order"):
        run(dealt)


def with_global_scales(scales: dict[tuple[int, str], float]) -> Written:
    """A ModelOpt checkpoint whose scale_2 are 1, except those given; values follow."""
    written = make("modelopt_nvfp4")
    for matrix, proj in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        for expert in range(8):
            name = f"{expert}.{proj}"
            scale = torch.tensor(scales.get((expert, matrix), 2**-12))
            sf = written.tensors[f"{name}.weight_scale"].double().numpy()
            q = unpack_e2m1(written.tensors[f"{name}.weight"].numpy()).astype(np.float64)
            written.values[matrix][expert] = q * np.repeat(sf, 16, axis=1) * float(scale)
            written.tensors[f"{name}.weight_scale_2"] = scale
    return written


def test_a32_gate_and_up_each_keep_their_own_global_scale(tmp_path):
    small, large = 0.1 * 2**-12, 2**-12
    scales = {(2, "gate"): large, (2, "up"): small, (5, "gate"): small, (5, "up"): large}
    written = with_global_scales(scales)
    weights = load(save(tmp_path, written.tensors), "modelopt_nvfp4")
    w13, w2 = written.dense()
    held_w13, held_w2 = weights.dequantize(torch.float64)
    assert torch.equal(held_w13, w13) and torch.equal(held_w2, w2)
    for expert in (2, 5):
        inputs = with_ids(INPUTS, expert)
        assert relative_error(run(weights, inputs), moe_oracle_fp64(inputs, weights, SHAPE)) < 0.004
        swapped = dataclasses.replace(
            weights, gate_scale=weights.up_scale, up_scale=weights.gate_scale
        )
        assert relative_error(run(swapped, inputs), run(weights, inputs)) > 0.1


@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
def test_a33_a_scale_that_calibration_left_out_is_an_error_naming_tensor_and_expert(tmp_path, proj):
    tensors = make("modelopt_nvfp4").tensors
    del tensors[f"5.{proj}.weight_scale_2"]
    save(tmp_path, tensors)
    message = rf"{PREFIX}.*5.{proj}.weight_scale_2 \(expert 5\): missing"
    for rank in (0, 1):  # also on the rank that does not hold it
        with pytest.raises(MoEEpConfigError, match=message):
            load(tmp_path, "modelopt_nvfp4", rank=rank, num_ranks=2)


def test_a33_activation_scales_are_not_used_and_may_be_missing(tmp_path):
    tensors = make("modelopt_nvfp4").tensors
    whole = load(save(tmp_path / "whole", tensors), "modelopt_nvfp4")
    del tensors["5.down_proj.input_scale"]
    one = load(save(tmp_path / "one", tensors), "modelopt_nvfp4")
    none = {n: t for n, t in tensors.items() if "input_scale" not in n}
    assert torch.equal(run(whole), run(one))
    assert torch.equal(run(whole), run(load(save(tmp_path / "none", none), "modelopt_nvfp4")))


def test_a34_a_denormal_scale_stays_its_own_experts_matter(tmp_path):
    tensors = make("modelopt_nvfp4").tensors
    clean = run(load(save(tmp_path / "clean", tensors), "modelopt_nvfp4"))
    tensors["3.down_proj.weight_scale_2"] = torch.tensor(1e-40)
    weights = load(save(tmp_path / "denormal", tensors), "modelopt_nvfp4")
    assert weights.down_scale[3] == torch.tensor(1e-40)
    output = run(weights)
    is_routed_T = (INPUTS.topk_ids == 3).any(dim=1)
    assert is_routed_T.any() and not is_routed_T.all()
    assert torch.equal(output[~is_routed_T], clean[~is_routed_T])
    assert output.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_a34_an_infinite_scale_of_a_dead_expert_is_refused(tmp_path, value):
    tensors = make("modelopt_nvfp4").tensors
    tensors["4.up_proj.weight_scale_2"] = torch.tensor(value)
    save(tmp_path, tensors)
    with pytest.raises(MoEEpConfigError, match="4.up_proj.weight_scale_2 of expert 4 is"):
        load(tmp_path, "modelopt_nvfp4")


def in_the_other_dialect(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ModelOpt's names and decode scales -> compressed-tensors' and encode scales."""
    renamed = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        match suffix:
            case "weight":
                renamed[f"{stem}.weight_packed"] = tensor
            case "weight_scale_2":
                renamed[f"{stem}.weight_global_scale"] = 1 / tensor.reshape(1)
            case "input_scale":
                renamed[f"{stem}.input_global_scale"] = 1 / tensor.reshape(1)
            case _:
                renamed[name] = tensor
    return renamed


def test_a35_both_dialects_of_nvfp4_give_the_same_bits(tmp_path):
    """Scales that are powers of two, so that their reciprocals are exact."""
    scales = {(e, m): 2.0 ** -(8 + e) for e in range(8) for m in ("gate", "up", "down")}
    tensors = with_global_scales(scales).tensors
    first = load(save(tmp_path / "a", tensors), "modelopt_nvfp4")
    other = in_the_other_dialect(tensors)
    second = load(save(tmp_path / "b", other), "compressed_tensors_nvfp4")
    assert torch.equal(run(first), run(second))
    for folder, fmt in (("a", "compressed_tensors_nvfp4"), ("b", "modelopt_nvfp4")):
        with pytest.raises(MoEEpConfigError, match="the names are nearest to"):
            load(tmp_path / folder, fmt)


@pytest.mark.parametrize("scale", [1 / 3, 0.1, 7e-4])
def test_a36_a_reciprocal_is_at_most_one_ulp_off(tmp_path, scale):
    scales = {(e, m): scale for e in range(8) for m in ("gate", "up", "down")}
    tensors = with_global_scales(scales).tensors
    first = load(save(tmp_path / "a", tensors), "modelopt_nvfp4")
    other = in_the_other_dialect(tensors)
    second = load(save(tmp_path / "b", other), "compressed_tensors_nvfp4")
    for name in ("gate_scale", "up_scale", "down_scale"):
        bits = getattr(first, name).view(torch.int32) - getattr(second, name).view(torch.int32)
        assert bits.abs().max() <= 1
    stated = 1 / other["0.up_proj.weight_global_scale"]
    assert torch.equal(second.up_scale, stated.expand(8))


def test_a37_the_order_of_gate_and_up_is_as_stated(tmp_path):
    """gate is +0.5 everywhere, up random: a swap is seen at once."""
    written = make("hf_fused")
    up = written.tensors["gate_up_proj"][:, SHAPE.intermediate :]
    gate = torch.full_like(up, 0.5)
    down = written.tensors["down_proj"]
    w1_first, w3_first = torch.cat([gate, up], 1), torch.cat([up, gate], 1)
    tensors = {"gate_up_proj": w1_first, "down_proj": down}
    first = load(save(tmp_path / "w1", tensors), "hf_fused")
    assert torch.equal(first.w13, w1_first)
    save(tmp_path / "w3", tensors | {"gate_up_proj": w3_first})
    second = load(tmp_path / "w3", "hf_fused", gate_up_order="up_first")
    assert torch.equal(run(first), run(second))
    swapped = load(tmp_path / "w3", "hf_fused")
    assert relative_error(run(swapped), run(first)) > 0.1


def test_a38_fused_interleaved_and_separate_tensors_load_to_the_same_bits(tmp_path):
    fused = make("hf_fused").tensors
    gate, up = fused["gate_up_proj"].chunk(2, dim=1)
    separate = {f"{e}.gate_proj.weight": gate[e] for e in range(8)}
    separate |= {f"{e}.up_proj.weight": up[e] for e in range(8)}
    separate |= {f"{e}.down_proj.weight": fused["down_proj"][e] for e in range(8)}
    interleaved = fused | {"gate_up_proj": torch.stack([gate, up], dim=2).flatten(1, 2)}
    transposed = {name: tensor.mT for name, tensor in interleaved.items()}
    biases = {"gate_up_proj_bias": torch.zeros(8, 256), "down_proj_bias": torch.zeros(8, 256)}
    transposed |= {name: tensor.bfloat16() for name, tensor in biases.items()}
    weights = [
        load(save(tmp_path / "fused", fused), "hf_fused"),
        load(save(tmp_path / "separate", separate), "hf"),
        load(save(tmp_path / "interleaved", interleaved), "hf_fused", gate_up_order="interleaved"),
        load(save(tmp_path / "transposed", transposed), "gpt_oss"),
    ]
    for other in weights[1:]:
        assert torch.equal(other.w13, weights[0].w13)
        assert torch.equal(other.w2, weights[0].w2)
    assert not torch.equal(load(tmp_path / "interleaved", "hf_fused").w13, weights[0].w13)


def test_a40_fp8_scales_need_not_be_powers_of_two(tmp_path):
    written = make("deepseek_fp8")
    for idx, scale in enumerate((0.3, 0.7, 1.1)):
        name = f"{idx}.up_proj.weight"
        written.tensors[f"{name}_scale_inv"] = torch.full((1, 2), scale)
        exact = float(np.float32(scale))
        written.values["up"][idx] = written.tensors[name].double().numpy() * exact
    weights = load(save(tmp_path, written.tensors), "deepseek_fp8")
    assert torch.equal(weights.dequantize(torch.float64)[0], written.dense()[0])
    inputs = with_ids(INPUTS, INPUTS.topk_ids % 3)
    assert relative_error(run(weights, inputs), moe_oracle_fp64(inputs, weights, SHAPE)) < 0.004


@pytest.mark.parametrize("fmt", ["hf", "modelopt_nvfp4", "deepseek_fp8"])
def test_a68_updates_in_checkpoint_layout_three_times_in_a_row(tmp_path, fmt):
    layer = MoEEpLayer(
        SHAPE, load(save(tmp_path / "0", make(fmt).tensors), fmt), max_tokens_per_rank=32
    )
    held = []
    for seed in (1, 2, 3):
        tensors = make(fmt, seed=seed).tensors
        layer.update_weights(tensors, format=fmt)
        expected = moe_reference(INPUTS, load(save(tmp_path / str(seed), tensors), fmt), SHAPE)
        assert torch.equal(layer(INPUTS), expected)
        del tensors, expected
        held.append(held_bytes())
    assert held[2] == held[0]


# ---- the same on kernels: what was loaded is what runs -------------------------------------------


@on("split1", "mega1")
def test_A28_A29_placed_experts_have_the_bits_of_experts_in_order(ranks):
    weights = make_weights(SHAPE, "nvfp4")
    inputs = on_device(ranks, INPUTS)
    expected = ranks.module(SHAPE, weights)(inputs)
    ranks.assert_right([expected.cpu()], [INPUTS], weights, SHAPE)
    for slots in ((0, 1, 2, 3, 4, 5, 6, 7, 0, 5), (0, 2, 4, 6, 1, 3, 5, 7)):
        expert_map = ExpertMap(8, slots)
        layer = ranks.module(SHAPE, place(weights, expert_map), expert_map=expert_map)
        assert torch.equal(layer(inputs), expected)
        layer.destroy()


@on("split1", "mega1")
def test_A33_A35_A36_A38_dialects_and_fused_tensors_have_the_same_bits(ranks, tmp_path):
    """A35, A36: scales whose reciprocals are exact, and stated ones. A38: one tensor, and two. A33:
    without the scales of activations, which no kernel uses."""
    scales = {(e, m): 2.0 ** -(8 + e) for e in range(8) for m in ("gate", "up", "down")}
    tensors = with_global_scales(scales).tensors
    without = {name: t for name, t in tensors.items() if "input_scale" not in name}
    fused = make("hf_fused").tensors
    gate, up = fused["gate_up_proj"].chunk(2, dim=1)
    separate = {f"{e}.gate_proj.weight": gate[e] for e in range(8)}
    separate |= {f"{e}.up_proj.weight": up[e] for e in range(8)}
    separate |= {f"{e}.down_proj.weight": fused["down_proj"][e] for e in range(8)}
    alike = (
        ((tensors, "modelopt_nvfp4"), (without, "modelopt_nvfp4"),
         (in_the_other_dialect(tensors), "compressed_tensors_nvfp4")),
        ((fused, "hf_fused"), (separate, "hf")),
    )  # fmt: skip
    for number, group in enumerate(alike):
        outputs = []
        for idx, (written, fmt) in enumerate(group):
            weights = load(save(tmp_path / f"{number}{idx}", written), fmt)
            outputs.append(ranks.module(SHAPE, weights)(on_device(ranks, INPUTS)).cpu())
            ranks.assert_right(outputs[-1:], [INPUTS], weights, SHAPE)
        assert all(torch.equal(output, outputs[0]) for output in outputs)


def on_device(ranks, inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.to(ranks.device) for tensor in vars(inputs).values()))

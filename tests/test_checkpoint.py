"""Checkpoints of every format load exactly, lazily, and not at all where something is wrong.

The oracle is `checkpoint_files`: values in FP64 by the formats' definitions, and transformers.
"""

import dataclasses
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    FORMATS,
    FUSED,
    PER_EXPERT,
    PREFIX,
    SHAPE,
    W_NAMES,
    WEIGHTS_FORMATS,
    make,
    save,
)
from safetensors.torch import save_file

import moe_ep
from moe_ep import MoEShape, MoEWeights
from moe_ep.checkpoint import Checkpoint
from moe_ep.comm.errors import MoEEpConfigError

DIVISIBLE = tuple(fmt for fmt in FORMATS if fmt != "deepseek_fp8")  # I is one block of 128
INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
}
GPT_OSS = dataclasses.replace(SHAPE, activation="gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {fmt: save(root / fmt, make(fmt).tensors) for fmt in FORMATS}


def load(path, fmt: str, **options) -> MoEWeights:
    return moe_ep.load(path, 3, shape=options.pop("shape", SHAPE), format=fmt, **options)


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_are_exact(folders, fmt):
    weights = load(folders[fmt], fmt)
    assert weights.weights_format == WEIGHTS_FORMATS[fmt]
    w13, w2 = make(fmt).dense()
    held_w13, held_w2 = weights.dequantize(torch.float64)
    assert torch.equal(held_w13, w13)
    assert torch.equal(held_w2, w2)


@pytest.mark.parametrize("fmt", ["gpt_oss", "gpt_oss_mxfp4"])
def test_biases_are_exact_and_in_the_order_of_the_rows(folders, fmt):
    weights, biases = load(folders[fmt], fmt), make(fmt).biases
    gate, up = weights.b13.double().chunk(2, dim=1)
    assert torch.equal(gate, torch.from_numpy(biases["gate"]))
    assert torch.equal(up, torch.from_numpy(biases["up"]))
    assert torch.equal(weights.b2.double(), torch.from_numpy(biases["down"]))


@pytest.mark.parametrize(
    ("fmt", "parallel", "num_ranks"),
    [(fmt, "ep", num_ranks) for fmt in FORMATS for num_ranks in (2, 3)]
    + [(fmt, "tp", 2) for fmt in DIVISIBLE],
)
def test_a_rank_loads_what_sharding_would_give_it(folders, fmt, parallel, num_ranks):
    full = load(folders[fmt], fmt)
    for rank in range(num_ranks):
        division = {"parallel": parallel, "rank": rank, "num_ranks": num_ranks}
        assert_same(load(folders[fmt], fmt, **division), full.shard(**division))


def test_tp_cuts_fp8_blocks_whole(tmp_path):
    shape = MoEShape(num_experts=2, top_k=1, hidden=192, intermediate=256)
    save(tmp_path, make("deepseek_fp8", shape).tensors)
    full = load(tmp_path, "deepseek_fp8", shape=shape)
    part = load(tmp_path, "deepseek_fp8", shape=shape, parallel="tp", rank=1, num_ranks=2)
    assert_same(part, full.shard("tp", 1, 2))
    with pytest.raises(MoEEpConfigError, match="multiple of 512"):
        load(tmp_path, "deepseek_fp8", shape=shape, parallel="tp", rank=1, num_ranks=4)


@pytest.mark.parametrize(
    ("fmt", "parallel"), [(fmt, "ep") for fmt in FORMATS] + [(fmt, "tp") for fmt in DIVISIBLE]
)
def test_half_of_the_experts_asks_for_half_of_the_bytes(folders, fmt, parallel):
    checkpoint = Checkpoint(folders[fmt])
    weights = load(checkpoint, fmt, parallel=parallel, rank=1, num_ranks=2)
    assert weights.num_bytes <= checkpoint.bytes_read <= 1.02 * weights.num_bytes


@pytest.mark.parametrize("fmt", PER_EXPERT)
def test_w1_w3_w2_are_gate_up_down(tmp_path, folders, fmt):
    save(tmp_path, make(fmt, names=W_NAMES).tensors)
    assert_same(load(tmp_path, fmt), load(folders[fmt], fmt))


@pytest.mark.parametrize("num_shards", [1, 5])
@pytest.mark.parametrize("has_index", [True, False])
def test_shards_with_and_without_index(tmp_path, folders, num_shards, has_index):
    save(tmp_path, make("hf").tensors, num_shards=num_shards, has_index=has_index)
    assert_same(load(tmp_path, "hf"), load(folders["hf"], "hf"))


def test_a_single_file(tmp_path, folders):
    tensors = make("hf").tensors
    save_file({f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "one")
    assert_same(load(tmp_path / "one", "hf"), load(folders["hf"], "hf"))


def test_experts_that_are_not_gated(tmp_path):
    shape = dataclasses.replace(SHAPE, activation="relu2")
    written = make("modelopt_nvfp4")
    save(tmp_path, {n: t for n, t in written.tensors.items() if "gate_proj" not in n})
    w13, w2 = load(tmp_path, "modelopt_nvfp4", shape=shape).dequantize(torch.float64)
    assert torch.equal(w13, written.dense()[0][:, SHAPE.intermediate :])
    assert torch.equal(w2, written.dense()[1])
    with pytest.raises(MoEEpConfigError, match="7.gate_proj.*missing|gate_proj.*missing"):
        load(tmp_path, "modelopt_nvfp4")


def test_a_layer_by_number_or_by_name(tmp_path):
    tensors = make("hf").tensors
    save(tmp_path / "a", tensors, prefix="model.language_model.layers.13.mlp.experts")
    by_number = moe_ep.load(tmp_path / "a", 13, shape=SHAPE, format="hf")
    name = "model.language_model.layers.13.mlp.experts"
    assert_same(moe_ep.load(tmp_path / "a", name, shape=SHAPE, format="hf"), by_number)
    with pytest.raises(MoEEpConfigError, match="layer 3 has no experts .*layers.13.mlp.experts"):
        load(tmp_path / "a", "hf")
    both = {f"model.layers.3.mlp.experts.{n}": t for n, t in tensors.items()}
    both |= {f"mtp.layers.3.mlp.experts.{n}": t.clone() for n, t in tensors.items()}
    save_file(both, tmp_path / "both.safetensors")
    with pytest.raises(MoEEpConfigError, match="model.layers.3.mlp.experts, mtp.layers.3"):
        load(tmp_path / "both.safetensors", "hf")


@pytest.mark.parametrize("fmt", ["hf", "hf_fused", "gpt_oss"])
def test_fp16_is_exact_or_refused_or_rounded_once(tmp_path, folders, fmt):
    written = make(fmt, dtype=torch.float16)
    biases = {n: t.half() for n, t in written.tensors.items() if "bias" in n}
    save(tmp_path / "exact", written.tensors | {n: t.bfloat16() for n, t in biases.items()})
    assert_same(load(tmp_path / "exact", fmt), load(folders[fmt], fmt))
    name = next(name for name in written.tensors if "down_proj" in name and "bias" not in name)
    written.tensors[name].view(-1)[-1] = 1 + 2**-9  # between two BF16 values, nearer to 1
    save(tmp_path / "odd", written.tensors | {n: t.bfloat16() for n, t in biases.items()})
    with pytest.raises(MoEEpConfigError, match=r"down_proj.*of expert \d is 1.00195.*round_fp16"):
        load(tmp_path / "odd", fmt)
    rounded = load(tmp_path / "odd", fmt, round_fp16=True)
    assert 1.0 in rounded.w2[[0, -1]]


def test_scales_may_come_in_their_other_dtypes(tmp_path, folders):
    """BF16 multipliers of FP8 blocks, E8M0 exponents as uint8: the same values."""
    tensors = make("deepseek_fp8").tensors
    narrow = {n: t.bfloat16() if "scale" in n else t for n, t in tensors.items()}
    wide = {n: t.float() if "scale" in n else t for n, t in narrow.items()}
    first = load(save(tmp_path / "narrow", narrow), "deepseek_fp8")
    assert_same(first, load(save(tmp_path / "wide", wide), "deepseek_fp8"))
    exponents = {n: t.view(torch.uint8) for n, t in make("deepseek_mxfp4").tensors.items()}
    second = load(save(tmp_path / "bytes", exponents), "deepseek_mxfp4")
    assert_same(second, load(folders["deepseek_mxfp4"], "deepseek_mxfp4"))


def test_gate_and_up_keep_different_global_scales(folders):
    weights = load(folders["modelopt_nvfp4"], "modelopt_nvfp4")
    tensors = make("modelopt_nvfp4").tensors
    for expert in range(8):
        for scale, proj in ((weights.gate_scale, "gate_proj"), (weights.up_scale, "up_proj")):
            assert scale[expert] == tensors[f"{expert}.{proj}.weight_scale_2"]
    assert not torch.equal(weights.gate_scale, weights.up_scale)


SCALES = [
    (fmt, suffix)
    for fmt, suffixes in {
        "modelopt_nvfp4": ("weight_scale", "weight_scale_2"),
        "compressed_tensors_nvfp4": ("weight_scale", "weight_global_scale"),
        "deepseek_fp8": ("weight_scale_inv",),
        "deepseek_mxfp4": ("scale",),
    }.items()
    for suffix in suffixes
]


@pytest.mark.parametrize(("fmt", "suffix"), SCALES)
@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
def test_a_missing_extra_or_misnamed_scale_names_tensor_and_expert(tmp_path, fmt, suffix, proj):
    tensors = make(fmt).tensors
    name = f"5.{proj}.{suffix}"
    missing = {n: t for n, t in tensors.items() if n != name}
    for number, (broken, message) in enumerate(
        [
            (missing, rf"{name} \(expert 5\): missing"),
            (tensors | {f"{name}_3": tensors[name]}, rf"{name}_3 \(expert 5\): not known"),
            (missing | {f"{name}s": tensors[name]}, rf"{name} .*missing.*{name}s .*not known"),
            (tensors | {f"8.{proj}.{suffix}": tensors[name]}, r"8\..*\(expert 8\): not known"),
        ]
    ):
        folder = save(tmp_path / str(number), broken)
        # A rank that does not hold expert 5 refuses as well.
        with pytest.raises(MoEEpConfigError, match=f"{PREFIX}.*{message}"):
            load(folder, fmt, rank=0, num_ranks=2)


BAD_SCALES = [
    ("modelopt_nvfp4", "weight_scale_2", [0.0, -1.0, float("inf"), float("nan")]),
    ("compressed_tensors_nvfp4", "weight_global_scale", [0.0, -1.0, float("inf"), 1e-45]),
    ("deepseek_fp8", "weight_scale_inv", [0.0, -1.0, float("inf"), float("nan")]),
    ("modelopt_nvfp4", "weight_scale", [-1.0, float("nan")]),
    ("deepseek_mxfp4", "scale", [float("nan")]),
]


@pytest.mark.parametrize(
    ("fmt", "suffix", "value"), [(fmt, suffix, v) for fmt, suffix, vs in BAD_SCALES for v in vs]
)
@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
def test_a_scale_without_a_healthy_value_names_tensor_and_expert(
    tmp_path, fmt, suffix, value, proj
):
    tensors = make(fmt).tensors
    name = f"5.{proj}.{suffix}"
    tensors[name].view(-1)[-1:] = torch.tensor([value]).to(tensors[name].dtype)
    save(tmp_path, tensors)
    with pytest.raises(MoEEpConfigError, match=f"{PREFIX}.{name} of expert 5 is"):
        load(tmp_path, fmt)
    load(tmp_path, fmt, rank=0, num_ranks=2)  # experts 0 to 3: their bytes alone are read


def place_in_file(fmt: str, proj: str, row: int, col: int) -> tuple[str, list[int]]:
    """Where element (row, col) of a matrix of expert 5 stands: stem of the tensor, position."""
    if fmt in PER_EXPERT:
        return f"5.{proj}", [row, col]
    if proj == "down_proj":
        return proj, [5, col, row] if fmt == "gpt_oss" else [5, row, col]
    is_up = proj == "up_proj"
    if fmt == "hf_fused":
        return "gate_up_proj", [5, row + is_up * SHAPE.intermediate, col]
    row = 2 * row + is_up
    return "gate_up_proj", [5, col, row] if fmt == "gpt_oss" else [5, row, col]


NONFINITE = [
    (fmt, torch.tensor(value, dtype=dtype))
    for fmt in ("hf", "hf_fused", "gpt_oss")
    for dtype in (torch.bfloat16, torch.float16)
    for value in (float("nan"), float("-inf"))
] + [
    ("deepseek_fp8", torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn))
    for byte in (0x7F, 0xFF)
]


@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize(("fmt", "value"), NONFINITE)
def test_a_weight_that_is_not_finite_is_named_by_its_place_in_the_file(tmp_path, fmt, value, proj):
    dtype = torch.bfloat16 if fmt == "deepseek_fp8" else value.dtype
    tensors = make(fmt, dtype=dtype).tensors
    tensors |= {name: t.bfloat16() for name, t in tensors.items() if "bias" in name}
    stem, position = place_in_file(fmt, proj, 70, 71)
    name = stem if fmt in FUSED else f"{stem}.weight"
    tensors[name].view(INTEGERS[value.dtype])[tuple(position)] = value.view(INTEGERS[value.dtype])
    save(tmp_path, tensors)
    message = rf"{PREFIX}.{name} of expert 5 is {value.float().item()} at {position}; it must be "
    divisions = [{}, {"rank": 1, "num_ranks": 2}]
    divisions += [{"parallel": "tp", "rank": 1, "num_ranks": 2}] if fmt in DIVISIBLE else []
    for division in divisions:
        with pytest.raises(MoEEpConfigError, match=re.escape(message)):
            load(tmp_path, fmt, **division)
    load(tmp_path, fmt, rank=0, num_ranks=2)  # experts 0 to 3: their bytes alone are read
    allowed = load(tmp_path, fmt, allow_nonfinite=True).dequantize()
    held = allowed[1][5, 70, 71] if proj == "down_proj" else allowed[0][5, 70:199:128, 71]
    assert (~held.isfinite()).sum() == 1
    assert sum((~matrices.isfinite()).sum() for matrices in allowed) == 1


@pytest.mark.parametrize("fmt", ["gpt_oss", "gpt_oss_mxfp4"])
def test_a_bias_that_is_not_finite_is_named(tmp_path, fmt):
    tensors = make(fmt).tensors
    tensors["gate_up_proj_bias"][5, 2 * 70 + 1] = float("nan")
    save(tmp_path, tensors)
    message = r"gate_up_proj_bias of expert 5 is nan at \[5, 141\]"
    with pytest.raises(MoEEpConfigError, match=message):
        load(tmp_path, fmt, shape=GPT_OSS, rank=1, num_ranks=2)
    weights = load(tmp_path, fmt, shape=GPT_OSS, allow_nonfinite=True)
    assert weights.b13.isnan().nonzero().tolist() == [[5, 128 + 70]]


@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("fmt", ["deepseek_mxfp4", "gpt_oss_mxfp4"])
def test_an_e8m0_scale_whose_products_bf16_does_not_hold_is_named_by_its_place_in_the_file(
    tmp_path, fmt, proj
):
    tensors = make(fmt).tensors
    stem, position = place_in_file(fmt, proj, 70, 2)
    name = f"{stem}.scale" if fmt in PER_EXPERT else f"{stem}_scales"
    tensors[name].view(torch.uint8)[tuple(position)] = 254
    save(tmp_path, tensors)
    message = rf"{PREFIX}.{name} of expert 5 is 254 at {position}; it must be an E8M0 byte"
    for division in (
        {},
        {"rank": 1, "num_ranks": 2},
        {"parallel": "tp", "rank": 1, "num_ranks": 2},
    ):
        with pytest.raises(MoEEpConfigError, match=re.escape(message)):
            load(tmp_path, fmt, shape=GPT_OSS if fmt in FUSED else SHAPE, **division)


@pytest.mark.parametrize("fmt", FUSED)
def test_a_missing_or_unknown_fused_tensor_is_named(tmp_path, fmt):
    tensors = make(fmt).tensors
    name = list(tensors)[-1]
    renamed = {n: t for n, t in tensors.items() if n != name} | {"gate_up_proj_x": tensors[name]}
    save(tmp_path, renamed)
    with pytest.raises(MoEEpConfigError, match=f"{name}: missing, gate_up_proj_x: not known"):
        load(tmp_path, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_another_format_is_named(folders, fmt):
    other = "hf" if fmt != "hf" else "deepseek_fp8"
    with pytest.raises(MoEEpConfigError, match=f"the names fit format '{fmt}'"):
        load(folders[fmt], other)


@pytest.mark.parametrize(
    ("fmt", "name", "change", "message"),
    [
        ("hf", "2.up_proj.weight", torch.Tensor.float, "is F32; allowed: BF16 or F16"),
        ("hf", "2.up_proj.weight", lambda t: t.mT, r"shape \[256, 128\]; allowed: \[128, 256\]"),
        ("modelopt_nvfp4", "2.up_proj.weight_scale", lambda t: t.view(torch.uint8), "is U8;"),
        ("modelopt_nvfp4", "2.up_proj.weight_scale_2", torch.Tensor.double, "is F64;"),
        ("deepseek_fp8", "2.up_proj.weight_scale_inv", lambda t: t.mT, r"shape \[2, 1\]; allowed"),
        ("gpt_oss_mxfp4", "down_proj_blocks", lambda t: t.flatten(2), r"shape \[8, 256, 64\]"),
        ("hf_fused", "gate_up_proj", lambda t: t[:7], r"shape \[7, 256, 256\]; allowed: \[8, 256"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(tmp_path, fmt, name, change, message):
    tensors = make(fmt).tensors
    save(tmp_path, tensors | {name: change(tensors[name])})
    with pytest.raises(MoEEpConfigError, match=f"{PREFIX}.{name} .*{message}"):
        load(tmp_path, fmt)


def test_mixed_names_of_projections_are_refused(tmp_path):
    tensors = make("hf").tensors
    tensors["2.w3.weight"] = tensors.pop("2.up_proj.weight")
    save(tmp_path, tensors)
    message = r"mix gate_proj/up_proj/down_proj with w1/w3/w2 \(2.w3.weight\)"
    with pytest.raises(MoEEpConfigError, match=message):
        load(tmp_path, "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fmt": "nvfp4"}, "format 'nvfp4' is not known; allowed: hf, hf_fused"),
        ({"fmt": "hf", "gate_up_order": "up_first"}, "names gate and up apart"),
        ({"fmt": "hf_fused", "gate_up_order": "w31"}, "must be one of .*up_first"),
        ({"fmt": "hf", "rank": 2, "num_ranks": 2}, "rank must be 0 to 1"),
        ({"fmt": "hf", "parallel": "pp", "num_ranks": 2}, "parallel must be"),
        ({"fmt": "gpt_oss", "shape": dataclasses.replace(SHAPE, activation="relu2")}, "not gated"),
    ],
)
def test_bad_arguments_are_named(folders, options, message):
    with pytest.raises(MoEEpConfigError, match=message):
        load(folders[options["fmt"]] if options["fmt"] in folders else folders["hf"], **options)


def test_damaged_folders_name_the_file(tmp_path):
    with pytest.raises(MoEEpConfigError, match="no safetensors file"):
        load(tmp_path, "hf")
    save(tmp_path, make("hf").tensors)
    second = tmp_path / "model-00002-of-00002.safetensors"
    intact = second.read_bytes()
    second.write_bytes(intact[: len(intact) // 2])
    with pytest.raises(MoEEpConfigError, match="model-00002-of-00002.safetensors cannot be read"):
        load(tmp_path, "hf")
    second.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(MoEEpConfigError, match="model-00002.*is a Git LFS pointer.*git lfs pull"):
        load(tmp_path, "hf")
    with pytest.raises(MoEEpConfigError, match="index.json.*allowed: the folder that it lies in"):
        load(tmp_path / "model.safetensors.index.json", "hf")
    second.unlink()
    with pytest.raises(MoEEpConfigError, match="names model-00002.*not there"):
        load(tmp_path, "hf")
    second.write_bytes(intact)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = f"{PREFIX}.0.gate_proj.weight"
    swapped = {**weight_map, name: "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(MoEEpConfigError, match=f"model-00002.*should hold {name}"):
        load(tmp_path, "hf")
    index.write_text("{}")
    with pytest.raises(MoEEpConfigError, match="index.json is not an index"):
        load(tmp_path, "hf")


def test_a_tensor_in_two_files_without_index_is_refused(tmp_path):
    save(tmp_path, make("hf").tensors, num_shards=1, has_index=False)
    source = tmp_path / "model-00001-of-00001.safetensors"
    (tmp_path / "copy.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(MoEEpConfigError, match="copy.safetensors and in"):
        load(tmp_path, "hf")


def test_peak_memory_is_the_rank_s_part_and_one_tensor(tmp_path):
    """Resident memory, mapped pages of the file included, sampled while half is loaded."""
    shape = MoEShape(num_experts=32, top_k=2, hidden=2048, intermediate=1024)  # 384 MiB
    w13 = torch.ones(32, 2048, 2048, dtype=torch.bfloat16)
    w2 = torch.ones(32, 2048, 1024, dtype=torch.bfloat16)
    save(tmp_path, {"gate_up_proj": w13, "down_proj": w2}, num_shards=1)
    del w13, w2
    load(tmp_path, "hf_fused", shape=shape, num_ranks=32)  # imports and the like
    before, peak = resident_bytes(), 0
    is_done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not is_done.wait(0.001):
            peak = max(peak, resident_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    weights = load(tmp_path, "hf_fused", shape=shape, rank=1, num_ranks=2)
    is_done.set()
    thread.join()
    one_tensor = 2 * 2048 * 2048 * 2
    assert peak - before <= 1.3 * weights.num_bytes + one_tensor


@pytest.mark.parametrize("fmt", ["hf", "deepseek_fp8"])
def test_the_measurement_of_half_a_checkpoint_runs(fmt):
    script = Path(__file__).parent.parent / "scripts" / "bench_load.py"
    command = [sys.executable, script, "--gib", "0.1", "--format", fmt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "asked for 1.000 x its own bytes" in done.stdout


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return sum(
        int(line.split()[1]) * 1024
        for line in status.splitlines()
        if line.startswith(("RssAnon", "RssFile"))
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same(weights: MoEWeights, expected: MoEWeights) -> None:
    assert weights.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        held = weights.tensors[name]
        assert held.dtype == tensor.dtype
        assert torch.equal(as_bytes(held), as_bytes(tensor)), name
    for name in ("expert_ids", "num_experts", "parallel", "rank", "num_ranks", "intermediate"):
        assert getattr(weights, name) == getattr(expected, name)

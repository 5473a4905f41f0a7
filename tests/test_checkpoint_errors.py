"""What a checkpoint lacks, has too much of, or should not hold is an error that names it.

Tensor, expert and place in the file; nothing is loaded.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from checkpoint_files import DIVISIBLE, FORMATS, FUSED, PER_EXPERT, PREFIX, SHAPE, load, make, save

from moe_ep.comm.errors import MoEEpConfigError

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
    with pytest.raises(MoEEpConfigError, match=f"the names are nearest to '{fmt}'"):
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

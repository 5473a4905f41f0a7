"""`moe-ep inspect` says of each layer what is there and whether `moe_ep.load` takes it."""

import json
from pathlib import Path

import pytest
from checkpoint_files import FORMATS, PREFIX, SHAPE, WEIGHTS_FORMATS, make, save
from safetensors.torch import save_file

import moe_ep
from moe_ep.checkpoint import Checkpoint
from moe_ep.launch import cli


def inspect(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, list]:
    code = cli.main(["inspect", str(path), "--device", "cpu", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_format_and_the_sizes_are_those_that_load_takes(tmp_path, capsys, fmt):
    save(tmp_path, make(fmt).tensors)
    code, (report,) = inspect(capsys, tmp_path)
    assert code == 0
    assert report["can_run"] and "TorchGemmConfig" in report["reason"]
    assert (report["name"], report["layer"]) == (PREFIX, 3)
    assert (report["format"], report["weights_format"]) == (fmt, WEIGHTS_FORMATS[fmt])
    sizes = [report[name] for name in ("num_experts", "hidden", "intermediate")]
    assert sizes == [SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate]
    weights = moe_ep.load(tmp_path, report["layer"], shape=SHAPE, format=report["format"])
    assert report["num_bytes"] == weights.num_bytes
    assert report["has_bias"] == (weights.b13 is not None)


def test_values_are_not_read(tmp_path):
    from moe_ep.launch.inspect import examine

    save(tmp_path, make("modelopt_nvfp4").tensors)
    checkpoint = Checkpoint(tmp_path)
    examine(checkpoint)
    assert checkpoint.bytes_read == 0


def test_layers_are_listed_in_order_each_with_its_own_format(tmp_path, capsys):
    for layer, fmt in ((10, "hf"), (2, "modelopt_nvfp4")):
        tensors = make(fmt).tensors
        named = {f"model.layers.{layer}.mlp.experts.{n}": t for n, t in tensors.items()}
        save_file(named, tmp_path / f"{fmt}.safetensors")
    code, reports = inspect(capsys, tmp_path)
    assert code == 0
    assert [(r["layer"], r["format"]) for r in reports] == [(2, "modelopt_nvfp4"), (10, "hf")]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"5.down_proj.weight_scale_2": None}, r"5.down_proj.weight_scale_2 (expert 5): missing"),
        ({"5.down_proj.weight_scale": "5.down_proj.scale"}, "no known format has such names"),
        ({"7.up_proj.weight": None}, "7.up_proj.weight (expert 7): missing"),
    ],
)
def test_what_load_would_refuse_cannot_run_and_says_why(tmp_path, capsys, broken, reason):
    tensors = make("modelopt_nvfp4").tensors
    for name, renamed in broken.items():
        tensor = tensors.pop(name)
        if renamed:
            tensors[renamed] = tensor
    save(tmp_path, tensors)
    code, (report,) = inspect(capsys, tmp_path)
    assert code == 1
    assert not report["can_run"]
    assert reason in report["reason"]


def test_ranks_that_do_not_divide_the_layer_are_a_reason(tmp_path, capsys):
    save(tmp_path, make("deepseek_fp8").tensors)
    code, (report,) = inspect(capsys, tmp_path, "--ranks", "2", "--parallel", "tp")
    assert code == 1
    assert "does not divide over 2 tp ranks" in report["reason"]


def test_half_of_the_experts_is_half_of_the_bytes(tmp_path, capsys):
    save(tmp_path, make("hf").tensors)
    _, (whole,) = inspect(capsys, tmp_path)
    _, (half,) = inspect(capsys, tmp_path, "--ranks", "2")
    assert 2 * half["num_bytes"] == whole["num_bytes"]


def test_the_table_has_a_row_for_each_layer(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    save(tmp_path, make("gpt_oss_mxfp4").tensors)
    assert cli.main(["inspect", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "gpt_oss_mxfp4" in out and "mxfp4, bias" in out and "yes" in out


def test_a_path_without_experts_is_an_error(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "holds no safetensors file" in capsys.readouterr().err
    save(tmp_path, {})
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "holds no '...experts.' tensors" in capsys.readouterr().err

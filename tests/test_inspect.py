"""`moe-ep inspect` says of each layer what is there and whether `moe_ep.load` takes it."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_files import FORMATS, PREFIX, SHAPE, WEIGHTS_FORMATS, make, save
from safetensors.torch import save_file

import moe_ep
from moe_ep.checkpoint import Checkpoint
from moe_ep.launch import cli
from moe_ep.launch.inspect import examine


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
    ("broken", "reasons"),
    [
        ({"5.down_proj.weight_scale_2": None}, ["5.down_proj.weight_scale_2 (expert 5): missing"]),
        ({"7.up_proj.weight": None}, ["7.up_proj.weight (expert 7): missing"]),
        (
            {"5.down_proj.weight_scale": "5.down_proj.scale"},
            ["5.down_proj.weight_scale (expert 5): missing", "5.down_proj.scale (expert 5): not"],
        ),
        (
            {"0.down_proj.weight": "0.down.weight"},
            ["0.down_proj.weight (expert 0): missing", "0.down.weight (expert 0): not known"],
        ),
        ({"2.up_proj.weight": "2.w3.weight"}, ["with w1/w3/w2 (2.w3.weight)"]),
        (
            {"5.down_proj.weight": "50.down_proj.weight"},
            ["5.down_proj.weight (expert 5): missing, 50.down_proj.weight (expert 50): not known;"],
        ),
        (
            {"7.gate_proj.weight": "8.gate_proj.weight"},
            ["7.gate_proj.weight (expert 7): missing, 8.gate_proj.weight (expert 8): not known;"],
        ),
        ({"3.up_proj.weight": "router"}, ["3.up_proj.weight (expert 3): missing, router: not"]),
    ],
)
def test_what_load_would_refuse_cannot_run_and_names_the_wrong_tensor(
    tmp_path, capsys, broken, reasons
):
    tensors = make("modelopt_nvfp4").tensors
    for name, renamed in broken.items():
        tensor = tensors.pop(name)
        if renamed:
            tensors[renamed] = tensor
    save(tmp_path, tensors)
    code, (report,) = inspect(capsys, tmp_path)
    assert code == 1
    assert not report["can_run"]
    assert report["format"] == "modelopt_nvfp4"
    for reason in reasons:
        assert reason in report["reason"]


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_misnamed_tensor_is_named_in_every_format(tmp_path, capsys, fmt):
    tensors = make(fmt).tensors
    for number, name in enumerate(list(tensors)[:: max(1, len(tensors) // 6)]):
        if "input" in name:  # is not read
            continue
        renamed = {n if n != name else f"{n}x": t for n, t in tensors.items()}
        _, (report,) = inspect(capsys, save(tmp_path / str(number), renamed))
        assert report["format"] == fmt
        assert f"{name}" in report["reason"] and f"{name}x" in report["reason"]
        assert "not known" in report["reason"] and "missing" in report["reason"]


def test_tensors_of_no_known_format_are_said_to_be(tmp_path, capsys):
    names = [f"{e}.{p}.qweight" for e in range(8) for p in ("gate_proj", "up_proj", "down_proj")]
    save(tmp_path, {name: torch.zeros(4, 4) for name in names})
    code, (report,) = inspect(capsys, tmp_path)
    assert code == 1
    assert "no known format has such names (0.down_proj.qweight" in report["reason"]


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("fmt", ["hf", "hf_fused"])
def test_experts_that_config_json_counts_otherwise_are_a_reason(
    tmp_path, capsys, fmt, is_nested, key
):
    save(tmp_path, make(fmt).tensors)
    for count, can_run in ((8, True), (9, False), (7, False)):
        config = {key: count, "num_experts_per_tok": 2}
        config = {"text_config": config} if is_nested else config
        (tmp_path / "config.json").write_text(json.dumps(config))
        code, (report,) = inspect(capsys, tmp_path)
        assert report["can_run"] == can_run == (code == 0)
        if not can_run:
            said = f"config.json says {count} experts, the tensors are of 8"
            assert said in report["reason"]
            assert (
                "8.gate_proj" in report["reason"]
                or "7.gate_proj" in report["reason"]
                or (f"allowed: [{count}, 256" in report["reason"])
            )


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_config_json_that_is_none_is_named(tmp_path, capsys, text):
    save(tmp_path, make("hf").tensors)
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("config", [{"num_experts": None}, {"num_experts_per_tok": "two"}, {}])
def test_a_config_json_without_numbers_says_nothing(tmp_path, capsys, config):
    save(tmp_path, make("hf").tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect(capsys, tmp_path)[0] == 0


def test_ranks_below_one_are_an_argument_error(tmp_path, capsys):
    save(tmp_path, make("hf").tensors)
    assert cli.main(["inspect", str(tmp_path), "--ranks", "0"]) == 2
    assert "--ranks must be at least 1, got 0" in capsys.readouterr().err


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


@pytest.mark.parametrize("missing", [0, 3, 7])
def test_an_expert_that_is_missing_whole_is_named_unless_it_is_the_last(tmp_path, capsys, missing):
    """Without config.json nobody knows that there was one more."""
    tensors = make("modelopt_nvfp4").tensors
    save(tmp_path, {n: t for n, t in tensors.items() if not n.startswith(f"{missing}.")})
    code, (report,) = inspect(capsys, tmp_path)
    assert (code, report["num_experts"]) == ((0, 7) if missing == 7 else (1, 8))
    if missing < 7:
        assert f"{missing}.gate_proj.weight (expert {missing})" in report["reason"]
        assert "not known" not in report["reason"]
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    code, (report,) = inspect(capsys, tmp_path)
    assert code == 1
    assert f"{missing}.gate_proj.weight (expert {missing})" in report["reason"]


def test_progress_leaves_stdout_to_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setitem(examine.__globals__, "_PROGRESS_MIN_TENSORS", 0)
    save(tmp_path, make("hf").tensors)
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["can_run"]
    assert "reading headers" in printed.err


@pytest.mark.parametrize("columns", [70, 80, 160])
def test_the_table_has_a_row_for_each_layer_and_reasons_below(
    tmp_path, capsys, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    tensors = make("compressed_tensors_nvfp4").tensors
    named = {
        f"model.layers.{n}.mlp.experts.{k}": t for n in (58, 59, 60) for k, t in tensors.items()
    }
    del named["model.layers.59.mlp.experts.5.up_proj.weight_packed"]
    save_file({n: t.clone() for n, t in named.items()}, tmp_path / "one.safetensors")
    assert cli.main(["inspect", str(tmp_path), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert " layer   format " in out
    rows = [line.split() for line in out.splitlines() if "compressed_tensors_nvfp4   8" in line]
    assert [(row[0], row[-1]) for row in rows] == [("58", "yes"), ("59", "no"), ("60", "yes")]
    assert all(row[2:5] == ["8", "256", "128"] for row in rows)
    said = " ".join(out.split())
    assert "layer 58 and 1 more: split over TorchCommConfig" in said
    assert "5.up_proj.weight_packed (expert 5): missing" in said


def test_a_narrow_table_loses_no_character(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    save(tmp_path, make("compressed_tensors_nvfp4").tensors)
    assert cli.main(["inspect", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    header, _, *rows = out.partition(" layer")[2].splitlines()
    column = slice(header.index("format") + len(" layer"), header.index("E") + len(" layer"))
    cells = "".join(row[column].strip() for row in rows[: rows.index(" " * 60)])
    assert cells == "compressed_tensors_nvfp4"


def test_layers_of_one_number_are_told_apart_by_their_names(tmp_path, capsys):
    modules = ("model.layers.0.mlp.experts", "mtp.layers.0.mlp.experts")
    tensors = make("hf_fused").tensors
    named = {f"{module}.{n}": t.clone() for module in modules for n, t in tensors.items()}
    save_file(named, tmp_path / "one.safetensors")
    assert cli.main(["inspect", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert all(module in out for module in modules)


def test_a_path_without_experts_is_an_error(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "holds no safetensors file" in capsys.readouterr().err
    save(tmp_path, {})
    for options in ([], ["--json"]):
        assert cli.main(["inspect", str(tmp_path), *options]) == 2
        printed = capsys.readouterr()
        assert "holds no '...experts.' tensors" in printed.err
        assert printed.out == ("[]\n" if options else "")

"""Checkpoints of every format load exactly, lazily, and not at all where something is wrong.

The oracle is `checkpoint_files`: values in FP64 by the formats' definitions, and transformers.
"""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    DIVISIBLE,
    FORMATS,
    PER_EXPERT,
    PREFIX,
    SHAPE,
    W_NAMES,
    WEIGHTS_FORMATS,
    load,
    make,
    save,
)
from safetensors.torch import save_file

import moe_ep
from moe_ep import MoEShape, MoEWeights
from moe_ep.checkpoint import Checkpoint
from moe_ep.comm.errors import MoEEpConfigError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {fmt: save(root / fmt, make(fmt).tensors) for fmt in FORMATS}


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


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_shows_progress_and_leaves_stdout_alone(folders, capsys, monkeypatch, rank):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setitem(moe_ep.load.__globals__, "_PROGRESS_BYTES", 0)
    load(folders["hf"], "hf", rank=rank, num_ranks=2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (f"loading {PREFIX}" in printed.err) == (rank == 0)


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

"""Tuned builds on a GPU: found at warm-up or by `moe-ep tune`, kept, and of the same bits.

One H200: pytest tests/gpu/test_mega_tune.py. Some ten mega kernels are compiled on the way.
"""

import json

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import make_inputs, make_weights

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs
from moe_ep.comm.group import EpGroup
from moe_ep.config import MegaKernelConfig
from moe_ep.launch import cli
from moe_ep.launch.geometries import geometry
from moe_ep.megakernel import compile_cache, tune
from moe_ep.megakernel.mega_moe import MegaMoE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = geometry("tiny")
CAPACITY = 24


def make_layer(knobs=None) -> MoEEpLayer:
    weights = make_weights(SHAPE, "bf16").to("cuda").quantize("nvfp4")
    config = MegaConfig(megakernel=MegaKernelConfig(knobs=knobs))
    return MoEEpLayer(SHAPE, weights, max_tokens_per_rank=CAPACITY, backend=config)


def on_gpu(num_tokens: int) -> MoEInputs:
    inputs = make_inputs(SHAPE, num_tokens, seed=1, masked=0.1)
    return MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))


def kept_files() -> dict:
    folder = compile_cache.cache_dir()
    return {path: json.loads(path.read_text()) for path in folder.glob("knobs_*.json")}


def test_a_layer_tunes_at_warm_up_and_a_later_one_takes_what_was_found():
    for path, record in kept_files().items():
        if record["key"]["shape"] == repr(SHAPE):
            path.unlink()
    table, layer = make_layer(), make_layer("auto")
    inputs = [on_gpu(n) for n in (0, 1, 7, CAPACITY)]
    expected = [table.forward(one) for one in inputs]
    before = set(kept_files())
    for one, wanted in zip(inputs, expected, strict=True):  # by the table's builds: no sweep
        assert torch.equal(layer.forward(one), wanted)
    assert set(kept_files()) == before
    layer.warmup()
    (path,) = set(kept_files()) - before
    buckets = layer._backend._mega.buckets
    assert tune.from_json(kept_files()[path]["buckets"]) == buckets
    later = make_layer("auto")
    assert later._backend._mega.buckets == buckets
    for one, wanted in zip(inputs, expected, strict=True):
        assert torch.equal(layer.forward(one), wanted)
        assert torch.equal(later.forward(one), wanted)
    for each in (table, layer, later):
        each.check()
        each.destroy()


def test_every_candidate_has_the_same_bits_and_the_command_keeps_one(tmp_path, capsys):
    table, inputs = make_layer(), on_gpu(CAPACITY)
    tensors, held = tuple(vars(inputs).values()), table._backend.held
    expected = table.forward(inputs)
    for knobs in tune.candidates("nvfp4", SHAPE, CAPACITY, 1):
        mega = MegaMoE(
            *(EpGroup.single("cuda"), SHAPE, "nvfp4"), max_tokens_per_rank=CAPACITY, knobs=knobs
        )
        out = torch.empty_like(expected)
        mega.forward(*tensors, held, out)
        assert torch.equal(out, expected), knobs
        mega.destroy()
    words = ["tune", "--geometry", "tiny", "--max-tokens-per-rank", str(CAPACITY), "--skew"]
    assert cli.main([*words, "--json", str(tmp_path / "tune.json")]) == 0
    assert "kept in" in capsys.readouterr().out
    record = json.loads((tmp_path / "tune.json").read_text())
    assert record["counts"] == list(tune.token_counts(CAPACITY))
    assert all(time > 0 for times in record["seconds"] for time in times)
    layer = make_layer("auto")
    first = tune.to_json(layer._backend._mega.buckets)[0]["knobs"]
    fastest = min(range(len(record["builds"])), key=lambda i: record["seconds"][i][0])
    assert record["builds"][fastest] == json.loads(json.dumps(first))
    layer.destroy()
    table.destroy()

"""Models of transformers on one GPU against the untouched ones; checkpoints loaded onto it."""

import pytest
import torch
from checkpoint_files import FORMATS, SHAPE, load, make, save
from model_cases import FAMILIES
from model_errors import assert_within_noise, measure

from moe_ep import MegaConfig, MoEEpLayer, SplitConfig
from moe_ep.config import GroupedGemmConfig

pytestmark = pytest.mark.gpu
GROUPED = SplitConfig(kernel=GroupedGemmConfig())


@pytest.mark.parametrize("weights_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_kernels_are_within_the_models_noise(family, weights_format):
    measured = measure(family, weights_format, device="cuda", backend=SplitConfig())
    print(family, weights_format, measured)
    assert_within_noise(measured)


@pytest.mark.parametrize("backend", [GROUPED, MegaConfig()], ids=["grouped", "mega"])
@pytest.mark.parametrize(
    ("family", "weights_format"), [("Qwen3-MoE", "nvfp4"), ("gpt-oss", "mxfp4")]
)
def test_our_kernels_are_within_the_models_noise(family, weights_format, backend):
    measured = measure(family, weights_format, device="cuda", backend=backend)
    print(family, weights_format, measured)
    assert_within_noise(measured)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_checkpoint_loads_onto_the_gpu_and_refits_there_with_the_files_bits(tmp_path, fmt):
    weights = load(save(tmp_path / "0", make(fmt).tensors), fmt, device="cuda")
    assert_same(weights, load(tmp_path / "0", fmt))
    layer = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=8, backend=SplitConfig())
    tensors = make(fmt, seed=1).tensors
    layer.update_weights(tensors, format=fmt)  # from the CPU
    assert_same(weights, load(save(tmp_path / "1", tensors), fmt))
    layer.update_weights({name: t.cuda() for name, t in make(fmt).tensors.items()}, format=fmt)
    assert_same(weights, load(tmp_path / "0", fmt))


def assert_same(held, expected) -> None:
    assert held.device.type == "cuda"
    for name, tensor in expected.tensors.items():
        on_cpu = held.tensors[name].cpu()
        assert torch.equal(on_cpu.view(torch.uint8), tensor.view(torch.uint8)), name

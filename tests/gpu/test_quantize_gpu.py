"""Quantising and decoding on CUDA give the CPU's bits, for every format and option."""

import pytest
import torch

from moe_ep import MoEWeights
from moe_ep.megakernel.problem import WEIGHT_FORMATS
from moe_ep.quantize import BLOCKS, QuantSpec, dequantize, quantize
from moe_ep.reference import fc1_sums

pytestmark = pytest.mark.gpu

SPECS = [
    *[QuantSpec(format=name) for name in BLOCKS],
    QuantSpec(format="nvfp4", per_token=True),
    QuantSpec(format="nvfp4", four_over_six="mse", sf_max=256),
    QuantSpec(format="nvfp4", four_over_six="mae", error_scale="decode", per_token=True),
    QuantSpec(format="mxfp4", sf_rule="floor"),
    QuantSpec(format="mxfp8", element="e5m2"),
    QuantSpec(format="fp8_vector", sf_power_of_two=True),
]


def values() -> torch.Tensor:
    torch.manual_seed(0)
    exponents = torch.randint(-30, 30, (2, 384, 16, 1))
    x = torch.ldexp(torch.randn(2, 384, 16, 32), exponents)
    x[:, 7, 3] = 0
    return x.flatten(2).bfloat16()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_cuda_quantises_and_decodes_to_the_cpus_bits(spec):
    on_cpu, on_gpu = quantize(values(), spec), quantize(values().cuda(), spec)
    assert torch.equal(bits(on_gpu.codes), bits(on_cpu.codes))
    assert torch.equal(bits(on_gpu.sf), bits(on_cpu.sf))
    if on_cpu.global_scale is not None:
        assert torch.equal(on_gpu.global_scale.cpu(), on_cpu.global_scale)
    assert torch.equal(dequantize(on_gpu).cpu(), dequantize(on_cpu))


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_cuda_sums_are_fp32_sums(format_name):
    torch.manual_seed(0)
    dense = MoEWeights.from_dense(
        torch.randn(1, 512, 1024).bfloat16(), torch.randn(1, 1024, 256).bfloat16()
    )
    weights = dense.quantize(format_name)
    x = torch.randn(77, 1024).bfloat16()
    want = x.double() @ weights.dequantize_expert("w13", 0, torch.float64).T
    got = fc1_sums(x.cuda(), weights.to("cuda"), 0).cpu().double()
    assert (got - want).norm() / want.norm() < 1e-5

"""Codes and scale factors against torchao (extra `oracle`).

MX formats are equal to the bit. torchao's NVFP4 rounds in another order and clamps block scales to
the smallest normal, so that a fraction of a percent of its scales and codes are neighbours.
"""

import pytest
import torch

from moe_ep.quantize import QuantSpec, dequantize, quantize
from moe_ep.sf_layout import swizzle_sf

pytest.importorskip("torchao", reason="needs the extra 'oracle'")
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import to_blocked

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
RULES = {"ceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}


def values() -> torch.Tensor:
    """BF16 with blocks of many sizes, an all-zero one among them."""
    torch.manual_seed(0)
    exponents = torch.randint(-30, 30, (512, 16, 1))
    x = torch.ldexp(torch.randn(512, 16, 32), exponents)
    x[7, 3] = 0
    return x.view(512, 512).bfloat16()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_mxfp8_is_torchaos(element, rule):
    got = quantize(values(), QuantSpec(format="mxfp8", element=element, sf_rule=rule))
    sf, codes = to_mx(values(), ELEMENTS[element], 32, RULES[rule])
    assert torch.equal(got.sf, sf.view(torch.uint8))
    assert torch.equal(got.codes.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_is_torchaos(rule):
    got = quantize(values(), QuantSpec(format="mxfp4", sf_rule=rule))
    sf, codes = to_mx(values(), torch.float4_e2m1fn_x2, 32, RULES[rule])
    assert torch.equal(got.sf, sf.view(torch.uint8))
    assert torch.equal(got.codes, codes.view(torch.uint8))


def test_nvfp4_is_torchaos_but_for_the_last_bit():
    torch.manual_seed(0)
    x = torch.randn(1024, 1024).bfloat16()
    got = quantize(x, "nvfp4")
    decode = per_tensor_amax_to_scale(x.abs().amax().float())
    sf, codes = nvfp4_quantize(x, 16, decode)
    sf = sf.view(got.sf.shape)
    assert (got.sf.view(torch.uint8) != sf.view(torch.uint8)).float().mean() < 0.035
    assert (got.codes != codes.view(torch.uint8)).float().mean() < 0.02
    assert abs(got.global_scale.item() / decode.item() - 1) < 1e-6
    other = dequantize(
        type(got)(spec=got.spec, codes=codes.view(torch.uint8), sf=sf, global_scale=decode)
    )
    errors = [((y - x.float()).norm() / x.float().norm()).item() for y in (dequantize(got), other)]
    assert abs(errors[0] / errors[1] - 1) < 1e-3


def test_swizzle_is_torchaos():
    sf = torch.randint(0, 256, (300, 22), dtype=torch.uint8)
    assert torch.equal(swizzle_sf(sf), to_blocked(sf).flatten())

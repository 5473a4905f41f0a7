"""The exact chains that turn blocks of values into scale factors and scaled elements.

Every step is one FP32 operation, rounded to nearest even; v is a block's largest magnitude, A that
of the whole matrix (or row), x an element.

format      scale factor of a block                            element code
nvfp4       s = E4M3(min(v * (S * 1/6), 448)), 16 columns      E2M1(x * min(1 / (s * D), FLT_MAX))
            S = min(6 * sf_max / A, FLT_MAX), D = 1 / S       (FlashInfer exact = TransformerEngine)
mxfp4/8     s = E8M0 of v * (1/max) rounded up, 32 columns     E2M1 or E4M3 or E5M2 (x / s), exact
            ("floor": of 2^floor(log2 v) / 2^emax)             (OCP MX 1.0; a block with byte 0: 0)
fp8_block   s = v / 448, FP32, 128 x 128 (zero block: 1)       E4M3(x / s)   (DeepSeek-V3)
fp8_vector  s = v / 448, FP32, 1 x 128 (zero block: 1)         E4M3(x / s)

An all-zero matrix takes S = 1. A non-finite input is refused with the tensor's name. Where the
caller allows it, a NaN makes its block decode to NaN, and an Inf saturates (nvfp4), stays Inf (mx,
its neighbours 0) or makes its block NaN (fp8).
"""

from typing import NamedTuple

import torch

from moe_ep.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    E5M2_MAX,
    FP32_MAX,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_e8m0_ceil,
    round_e2m1,
)
from moe_ep.quant_spec import QuantSpec

_ENCODERS = {"e2m1": encode_e2m1, "e4m3": encode_e4m3, "e5m2": encode_e5m2}
# element -> largest magnitude, exponent of the largest power of two
_ELEMENT_RANGE = {"e2m1": (E2M1_MAX, 2), "e4m3": (E4M3_MAX, 8), "e5m2": (E5M2_MAX, 15)}


def block_amax(x_NK: torch.Tensor, block_cols: int) -> torch.Tensor:
    """Largest magnitude of each row's blocks, in x's dtype; NaN wins over everything.

    Magnitudes compare as integers, which torch reduces several times faster than floats.
    """
    integer, mask = (torch.int32, 0x7FFFFFFF) if x_NK.itemsize == 4 else (torch.int16, 0x7FFF)
    magnitudes = x_NK.view(integer) & mask
    amax = magnitudes.view(x_NK.shape[0], -1, block_cols).amax(dim=-1)
    return amax.view(x_NK.dtype)


class Nvfp4Scales(NamedTuple):
    """FP32, one for the matrix or [rows, 1] per token: A, S (multiplies before quantising), D."""

    amax: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor

    @classmethod
    def from_amax(cls, amax: torch.Tensor, sf_max: int) -> "Nvfp4Scales":
        encode = (_constant(E2M1_MAX * sf_max, amax) / amax).clamp_max(FP32_MAX)
        encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)  # all zero; Inf
        return cls(amax, encode, encode.reciprocal())

    def rows(self, rows: slice) -> "Nvfp4Scales":
        """Those of some rows; one scale for all stays one."""
        return self if self.amax.dim() == 0 else Nvfp4Scales(*(scale[rows] for scale in self))


def encode_nvfp4(
    x_NBk: torch.Tensor, amax_NB: torch.Tensor, scales: Nvfp4Scales, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, blocks, 16] and the blocks' FP32 amax -> packed codes [.., 8], E4M3 scale factors."""
    if spec.four_over_six:
        scaled_NBk, sf_NB = _four_over_six(x_NBk, amax_NB, scales, spec)
    else:
        sixth = _constant(1 / E2M1_MAX, amax_NB)  # 0x3E2AAAAB
        sf_NB = encode_e4m3(amax_NB * (scales.encode * sixth))
        scaled_NBk = x_NBk * _multiplier(sf_NB, scales.decode)[..., None]
    return encode_e2m1(scaled_NBk), sf_NB


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """FP32 scalar on `like`'s device. Between tensors torch divides with one rounding; a number
    over a tensor, and on CUDA a tensor over a number, goes through a rounded reciprocal."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _multiplier(sf: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """min(1 / (s * D), FLT_MAX), one for each block."""
    return (sf.float() * decode).reciprocal_().clamp_max_(FP32_MAX)


def _four_over_six(
    x_NBk: torch.Tensor, amax_NB: torch.Tensor, scales: Nvfp4Scales, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements over s * D, and s, for the better of two scale factors of each block."""
    base_NB = (amax_NB / _constant(E2M1_MAX, amax_NB)) * scales.encode
    candidates = []
    for stretch in (1.0, 1.5):
        sf_NB = encode_e4m3(base_NB * stretch)
        scaled_NBk = x_NBk * _multiplier(sf_NB, scales.decode)[..., None]
        decoded_NBk = round_e2m1(scaled_NBk).mul_(sf_NB.float()[..., None])
        if spec.error_scale == "amax":
            largest = _constant(E2M1_MAX * spec.sf_max, amax_NB)
            decoded_NBk = decoded_NBk * scales.amax[..., None] / largest
        else:
            decoded_NBk = decoded_NBk * scales.decode[..., None]
        error_NB = _block_error(decoded_NBk.sub_(x_NBk), spec.four_over_six)
        candidates.append((sf_NB, scaled_NBk, error_NB))
    (sf6_NB, scaled6_NBk, error6_NB), (sf4_NB, scaled4_NBk, error4_NB) = candidates
    is_four_NB = (error4_NB < error6_NB) & (amax_NB != 0)  # ties and NaN: 6
    sf_NB = torch.where(is_four_NB, sf4_NB.view(torch.uint8), sf6_NB.view(torch.uint8))
    scaled_NBk = torch.where(is_four_NB[..., None], scaled4_NBk, scaled6_NBk)
    return scaled_NBk, sf_NB.view(torch.float8_e4m3fn)


def _block_error(error_NBk: torch.Tensor, rule: str) -> torch.Tensor:
    """Errors summed over a block from element 0 to 15, each addition rounded."""
    if rule == "max":
        return error_NBk.abs().amax(dim=-1)
    terms_kNB = (error_NBk * error_NBk if rule == "mse" else error_NBk.abs()).movedim(-1, 0)
    total_NB = terms_kNB[0].clone()
    for term_NB in terms_kNB[1:]:
        total_NB += term_NB
    return total_NB


def encode_blocks(
    x_BrBk: torch.Tensor, amax_BB: torch.Tensor, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """mx and fp8: [.., block rows, .., block columns] and FP32 amax -> codes, scale factors."""
    element = "e2m1" if spec.format == "mxfp4" else spec.element
    if spec.format.startswith("mx"):
        sf_BB, inverse_BB = _mx_scale(amax_BB, spec.sf_rule, *_ELEMENT_RANGE[element])
        scaled_BrBk = x_BrBk * inverse_BB[:, None, :, None]
    else:
        sf_BB = _fp8_scale(amax_BB, spec.sf_power_of_two)
        scaled_BrBk = x_BrBk / sf_BB[:, None, :, None]
    return _ENCODERS[element](scaled_BrBk), sf_BB


def _mx_scale(
    amax: torch.Tensor, rule: str, largest: float, exponent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0 bytes, and the FP32 2^(127 - byte) that divides by them; 0 for byte 0."""
    if rule == "ceil":
        byte = encode_e8m0_ceil(amax * _constant(1 / largest, amax))
    else:
        biased = torch.bitwise_right_shift(amax.view(torch.int32), 23)
        byte = torch.where(torch.isinf(amax), 254, (biased - exponent).clamp_min_(0))
        byte = torch.where(torch.isnan(amax), 255, byte).to(torch.uint8)
    # 2^(127 - byte) has the byte 254 - byte; NaN stays NaN.
    inverse = decode_e8m0(torch.where(byte == 255, 255, 254 - byte).to(torch.uint8))
    return byte, torch.where(byte == 0, 0.0, inverse)


def _fp8_scale(amax: torch.Tensor, is_power_of_two: bool) -> torch.Tensor:
    """FP32 amax / 448, as it is or rounded up to a power of two; 1 for a zero block."""
    sf = amax / _constant(E4M3_MAX, amax)
    if is_power_of_two:
        sf = decode_e8m0(encode_e8m0_ceil(sf))
    return torch.where((amax == 0) | (sf == 0), 1.0, sf)

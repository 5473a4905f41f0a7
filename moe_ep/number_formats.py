"""Casts between FP32 and the narrow number formats of quantised tensors, bit for bit.

format   values                                         largest   special
E2M1     0 .5 1 1.5 2 3 4 6, sign in bit 3              6         no NaN, no Inf
E4M3     float8_e4m3fn, smallest 2^-9                   448       NaN (0x7F)
E5M2     float8_e5m2, smallest 2^-16                    57344     NaN, Inf
E8M0     2^(byte - 127), no sign, no zero               2^127     NaN (255)

Two E2M1 codes share a byte; the low nibble is the even column. (OCP Microscaling Formats 1.0.)
"""

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
FP32_MAX = torch.finfo(torch.float32).max

_EXPONENT_MASK = 0x7F800000
# Added to a magnitude in [1, 2), this leaves 0.5 as the last bit of the FP32 sum: the adder rounds
# to the E2M1 grid. The 3 makes the code come out of the sum's bits without a subtraction.
_E2M1_ROUNDER = 2.0**22 + 3


def _anchored_e2m1(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|x| + anchor, rounded to nearest even on the E2M1 grid by the FP32 adder; and the binade.

    The binade is the power of two at or below |x|, at least 1, and the anchor `_E2M1_ROUNDER` times
    it: below 2 the grid step is 0.5, then it doubles with every binade.
    """
    magnitude = torch.abs(x).clamp_max_(E2M1_MAX)
    binade = torch.bitwise_and(magnitude.view(torch.int32), _EXPONENT_MASK).view(torch.float32)
    binade.clamp_min_(1.0)
    return torch.add(magnitude, binade, alpha=_E2M1_ROUNDER), binade


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """FP32 -> the nearest E2M1 value as FP32, ties to the even code, saturating at 6."""
    anchored, binade = _anchored_e2m1(x)
    return torch.copysign(anchored.sub_(binade.mul_(_E2M1_ROUNDER)), x)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """FP32 [..., K] -> packed codes [..., K/2] uint8, ties to the even code, saturating at 6.

    -0 gives code 8. NaN gives 6: the scale factor beside it has to carry it.
    """
    anchored, binade = _anchored_e2m1(x)
    bits = anchored.view(torch.int32)
    # The low bits count grid steps, the exponent counts binades of two codes each.
    codes = torch.bitwise_right_shift(bits, 22, out=binade.view(torch.int32)).add_(bits)
    codes.bitwise_and_(7)
    sign = torch.bitwise_right_shift(x.view(torch.int32), 28, out=bits).bitwise_and_(8)
    pairs = codes.bitwise_or_(sign).view(torch.int64)
    odd = torch.bitwise_right_shift(pairs, 28, out=bits.view(torch.int64))
    return pairs.bitwise_or_(odd).to(torch.uint8)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes [..., K/2] uint8 -> [..., K] FP32, exact."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    values = torch.cat([magnitudes, -magnitudes])
    # One 64-bit look-up for each byte: the FP32 pair of its low and high nibble.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    decoded = pairs.view(torch.int64).flatten().index_select(0, packed.reshape(-1).int())
    return decoded.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """FP32 -> float8_e4m3fn, nearest even, saturating at 448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """FP32 -> float8_e5m2, nearest even, saturating at 57344; NaN stays NaN."""
    return x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)


def encode_e8m0_ceil(x: torch.Tensor) -> torch.Tensor:
    """FP32 >= 0 -> uint8 exponent, rounded up to a power of two; Inf gives 254, NaN 255.

    Byte 0 stands for everything up to 2^-127.
    """
    bits = x.view(torch.int32)
    byte = torch.bitwise_right_shift(bits + 0x7FFFFF, 23).clamp_max_(254)
    byte = torch.where(bits <= 0x00400000, 0, byte)
    return torch.where(torch.isnan(x), 255, byte).to(torch.uint8)


def decode_e8m0(byte: torch.Tensor) -> torch.Tensor:
    """uint8 -> FP32 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    bits = byte.int() << 23
    bits = torch.where(byte == 0, 0x00400000, bits)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)

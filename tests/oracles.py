"""Independent oracles: NumPy and ml_dtypes only, written from the formats' definitions.

Nothing here calls the code it is held against. Every FP32 step is one NumPy operation, so that it
is rounded once and never contracted.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
FLT_MAX = np.finfo(F32).max
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F32)
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE_BF16 = ALL_BF16[torch.isfinite(ALL_BF16)]


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """FP32 array of a BF16, FP16, FP8 or FP32 tensor (exact)."""
    return x.float().numpy()


def cast(x: np.ndarray, dtype: type, largest: float) -> np.ndarray:
    """FP32 through ml_dtypes' `dtype`, saturating, as FP32."""
    with np.errstate(invalid="ignore"):  # NaN
        return np.clip(x, -largest, largest).astype(F32).astype(dtype).astype(F32)


def e2m1(x: np.ndarray) -> np.ndarray:
    return cast(x, ml_dtypes.float4_e2m1fn, 6)


def e4m3(x: np.ndarray) -> np.ndarray:
    return cast(x, ml_dtypes.float8_e4m3fn, 448)


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., K/2] -> FP32 [..., K], low nibble = even column."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return np.where(codes < 8, 1, -1).astype(F32) * E2M1[codes % 8]


def e8m0(byte: np.ndarray) -> np.ndarray:
    """FP64 2^(byte - 127), NaN for 255."""
    return np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127))


def nvfp4_scales(amax: np.ndarray, sf_max: int) -> tuple[np.ndarray, np.ndarray]:
    """FP32 (S, D) of a largest magnitude."""
    amax = np.asarray(amax, dtype=F32)
    with np.errstate(divide="ignore"):
        encode = np.minimum(F32(6 * sf_max) / amax, FLT_MAX)
    encode = np.where((amax == 0) | (encode == 0), F32(1), encode)
    return encode, F32(1) / encode


def nvfp4(
    x: np.ndarray, sf_max: int = 448, per_token: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The exact chain on FP32 [N, K]: element values q, block scales s, decode scale D."""
    blocks = x.reshape(x.shape[0], -1, 16)
    v = np.abs(blocks).max(axis=-1)
    encode, decode = nvfp4_scales(v.max(axis=1, keepdims=True) if per_token else v.max(), sf_max)
    s = e4m3(v * (encode * np.uint32(0x3E2AAAAB).view(F32)))
    q = e2m1(blocks * _inverse(s * decode)[..., None])
    return q.reshape(x.shape), s, decode


def four_over_six(
    x: np.ndarray, sf_max: int, rule: str, error_scale: str, per_token: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numerics of arXiv 2512.02010 in strict FP32 order; as `nvfp4`."""
    blocks = x.reshape(x.shape[0], -1, 16)
    v = np.abs(blocks).max(axis=-1)
    amax = v.max(axis=1, keepdims=True) if per_token else v.max()
    encode, decode = nvfp4_scales(amax, sf_max)
    base = (v / F32(6)) * encode
    results = []
    for stretch in (F32(1), F32(1.5)):
        s = e4m3(base * stretch)
        q = e2m1(blocks * _inverse(s * decode)[..., None])
        t = q * s[..., None]
        if error_scale == "amax":
            t = (t * np.asarray(amax)[..., None]) / F32(6 * sf_max)
        else:
            t = t * np.asarray(decode)[..., None]
        d = t - blocks
        if rule == "max":
            error = np.abs(d).max(axis=-1)
        else:
            terms = d * d if rule == "mse" else np.abs(d)
            error = terms[..., 0]
            for i in range(1, 16):
                error = error + terms[..., i]
        results.append((q, s, error))
    (q6, s6, error6), (q4, s4, error4) = results
    pick4 = error4 < error6
    q = np.where(pick4[..., None], q4, q6)
    return q.reshape(x.shape), np.where(pick4, s4, s6), decode


def _inverse(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.minimum(F32(1) / x, FLT_MAX)


def mx_byte(amax: float, largest: float, rule: str) -> int:
    """The E8M0 byte of a finite block from exact rational arithmetic, no FP32 in between."""
    if amax == 0:
        return 0
    value = Fraction(float(amax)) / Fraction(largest)
    if rule == "floor":
        # OCP: 2^(floor(log2 amax) - emax), emax the exponent of `largest`.
        return max(0, _floor_log2(Fraction(float(amax))) - _floor_log2(Fraction(largest)) + 127)
    exponent = _floor_log2(value)
    return max(0, exponent + (value != Fraction(2) ** exponent) + 127)


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1


def assert_same_values(got: np.ndarray, want: np.ndarray) -> None:
    """Equal as numbers, so that codes 0 and 8 are equal; says where the first difference is."""
    differs = np.argwhere(~((got == want) | (np.isnan(got) & np.isnan(want))))
    assert len(differs) == 0, (
        f"{len(differs)} differ, first at {differs[0]}: {got[tuple(differs[0])]} "
        f"for {want[tuple(differs[0])]}"
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over that of `want`, in FP64."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()

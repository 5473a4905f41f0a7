"""Quantising whole tensors to nvfp4, mxfp4, mxfp8 and FP8 blocks, and back, by exact chains.

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

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from rich.progress import Progress

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    E5M2_MAX,
    FP32_MAX,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_e8m0_ceil,
    round_e2m1,
)

# format -> (rows, columns) of a block
BLOCKS = {
    "nvfp4": (1, 16),
    "mxfp4": (1, 32),
    "mxfp8": (1, 32),
    "fp8_block": (128, 128),
    "fp8_vector": (1, 128),
}
# option -> (its values, the formats that take it); the first value is the default
OPTIONS = {
    "per_token": ((False, True), ("nvfp4",)),
    "sf_max": ((448, 256), ("nvfp4",)),
    "four_over_six": ((None, "mse", "mae", "max"), ("nvfp4",)),
    "error_scale": (("amax", "decode"), ("nvfp4",)),
    "global_scale": (("decode", "encode"), ("nvfp4",)),
    "element": (("e4m3", "e5m2"), ("mxfp8",)),
    "sf_rule": (("ceil", "floor"), ("mxfp4", "mxfp8")),
    "sf_power_of_two": ((False, True), ("fp8_block", "fp8_vector")),
}
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # CPU: the chunk's FP32 copies stay in L2
_PROGRESS_ELEMENTS = 1 << 28  # about a second


_ENCODERS = {"e2m1": encode_e2m1, "e4m3": encode_e4m3, "e5m2": encode_e5m2}
# element -> largest magnitude, exponent of the largest power of two
_ELEMENT_RANGE = {"e2m1": (E2M1_MAX, 2), "e4m3": (E4M3_MAX, 8), "e5m2": (E5M2_MAX, 15)}


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Every choice that decides a quantised tensor's bits.

    format            a key of `BLOCKS`
    per_token         nvfp4: a global scale for each row instead of each matrix
    sf_max            nvfp4: the E4M3 scale factor that the largest magnitude maps to; 256 leaves
                      four_over_six its head-room
    four_over_six     nvfp4: map a block's largest magnitude to 6 or to 4, whichever has the smaller
                      "mse", "mae" or "max" error (arXiv 2512.02010); None: always 6
    error_scale       nvfp4 four_over_six: errors are taken on q*s*A/(6 sf_max) ("amax":
                      TransformerEngine, and FlashInfer per token) or on q*s*D ("decode": FlashInfer
                      per tensor); about 1 block in 20 000 picks otherwise
    global_scale      nvfp4: what the result states, D ("decode") or S ("encode")
    element           mxfp8: "e4m3" or "e5m2"
    sf_rule           mx: "ceil" (nothing clips) or "floor" (OCP's first rule, clips)
    sf_power_of_two   fp8: FP32 scale factors rounded up to powers of two

    Raises `MoEEpConfigError` for an unknown value and for an option the format does not take.
    """

    format: str
    per_token: bool = False
    sf_max: int = 448
    four_over_six: str | None = None
    error_scale: str = "amax"
    global_scale: str = "decode"
    element: str = "e4m3"
    sf_rule: str = "ceil"
    sf_power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.format not in BLOCKS:
            raise MoEEpConfigError(
                f"quantisation format {self.format!r} is not known; allowed: {', '.join(BLOCKS)}"
            )
        for name, (values, formats) in OPTIONS.items():
            value = getattr(self, name)
            if value not in values:
                raise MoEEpConfigError(f"{name} must be one of {values}, got {value!r}")
            if value != values[0] and self.format not in formats:
                raise MoEEpConfigError(
                    f"{name}={value!r} is for {' and '.join(formats)}, not for {self.format!r}"
                )

    @property
    def code_dtype(self) -> torch.dtype:
        if self.format in ("nvfp4", "mxfp4"):
            return torch.uint8
        return torch.float8_e4m3fn if self.element == "e4m3" else torch.float8_e5m2

    @property
    def sf_dtype(self) -> torch.dtype:
        by_format = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8, "mxfp8": torch.uint8}
        return by_format.get(self.format, torch.float32)

    @property
    def is_packed(self) -> bool:
        """Two codes in a byte."""
        return self.code_dtype == torch.uint8


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """A tensor [..., N, K] as codes and scale factors.

    codes          [..., N, K], or [..., N, K/2] where two share a byte (low nibble = even column)
    sf             [..., ceil(N / block rows), ceil(K / block columns)], linear, of `spec.sf_dtype`
    global_scale   nvfp4: FP32 [...] or, per token, [..., N]; else None
    """

    spec: QuantSpec
    codes: torch.Tensor
    sf: torch.Tensor
    global_scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * (2 if self.spec.is_packed else 1))

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], spec: QuantSpec, device: torch.device | str
    ) -> "QuantizedTensor":
        """Unwritten tensors of the right shapes."""
        *lead, rows, cols = shape
        block_rows, block_cols = BLOCKS[spec.format]
        code_cols = cols // 2 if spec.is_packed else cols
        sf_shape = (*lead, math.ceil(rows / block_rows), math.ceil(cols / block_cols))
        scale_shape = (*lead, rows) if spec.per_token else tuple(lead)
        return cls(
            spec=spec,
            codes=torch.empty(*lead, rows, code_cols, dtype=spec.code_dtype, device=device),
            sf=torch.empty(sf_shape, dtype=spec.sf_dtype, device=device),
            global_scale=torch.empty(scale_shape, device=device)
            if spec.format == "nvfp4"
            else None,
        )

    def matrix(self, index: tuple[int, ...]) -> "QuantizedTensor":
        """Views of one matrix."""
        scale = None if self.global_scale is None else self.global_scale[index]
        return QuantizedTensor(
            spec=self.spec, codes=self.codes[index], sf=self.sf[index], global_scale=scale
        )


def quantize(
    w: torch.Tensor,
    spec: QuantSpec | str,
    *,
    name: str = "tensor",
    allow_nonfinite: bool = False,
    out: QuantizedTensor | None = None,
    advance: Callable[[int], object] | None = None,
) -> QuantizedTensor:
    """BF16, FP16 or FP32 [..., N, K] -> codes and scale factors; each [N, K] is a matrix by itself.

    Works through chunks of rows, so that memory beside input and result stays at a few MiB (CPU).
    `out` is written if given. `advance` is called with the number of elements done; without it a
    large tensor shows a progress bar.

    Raises `MoEEpConfigError`, naming the tensor, for a dtype or K that the format does not take and
    for NaN or Inf unless `allow_nonfinite`.
    """
    spec = spec if isinstance(spec, QuantSpec) else QuantSpec(format=spec)
    _check(w, spec, name)
    if out is None:
        out = QuantizedTensor.empty(tuple(w.shape), spec, w.device)
    if advance is None:
        with element_progress(f"quantising {name} to {spec.format}", w.numel()) as advance:
            return quantize(
                w, spec, name=name, allow_nonfinite=allow_nonfinite, out=out, advance=advance
            )
    quantize_matrix = _quantize_nvfp4 if spec.format == "nvfp4" else _quantize_blocks
    for index in product(*map(range, w.shape[:-2])):
        largest = quantize_matrix(w[index], out.matrix(index), advance)
        if not (allow_nonfinite or bool(torch.isfinite(largest))):
            where = f"{name}{list(index)}" if index else name
            raise MoEEpConfigError(f"{where} holds NaN or Inf; {spec.format} takes finite values")
    return out


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., N, K] of FP32 or FP64: q * s, exact in FP32, times the global scale (one rounding)."""
    values = unscaled(q.codes, q.sf, q.spec.format).to(dtype)
    if q.spec.format.startswith("fp8"):
        values *= expand_sf(q.sf, q.shape, BLOCKS[q.spec.format]).to(dtype)
    if q.global_scale is not None:
        scale = q.global_scale.to(dtype)
        if q.spec.global_scale == "encode":
            scale = scale.reciprocal()
        values *= scale[..., None] if q.spec.per_token else scale[..., None, None]
    return values


def unscaled(codes: torch.Tensor, sf: torch.Tensor | None, format: str) -> torch.Tensor:
    """What a tensor core multiplies, as FP32 [..., N, K].

    q * s for nvfp4 and mx, exact (in BF16 too); q for fp8, whose scale factors multiply FP32 sums.
    """
    if format not in ("nvfp4", "mxfp4", "mxfp8"):
        return codes.float()
    values = decode_e2m1(codes) if codes.dtype == torch.uint8 else codes.float()
    factors = sf.float() if format == "nvfp4" else decode_e8m0(sf)
    blocks = values.view(*sf.shape, BLOCKS[format][1])
    return blocks.mul_(factors[..., None]).view(values.shape)


def expand_sf(
    sf: torch.Tensor, shape: tuple[int, ...] | torch.Size, block: tuple[int, int]
) -> torch.Tensor:
    """Scale factors [..., blocks, blocks] repeated to `shape` [..., N, K]."""
    rows = sf.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


@contextmanager
def element_progress(description: str, num_elements: int) -> Iterator[Callable[[int], object]]:
    """Yields `advance(elements)`; draws a bar when there is enough to do to wait for."""
    if num_elements < _PROGRESS_ELEMENTS:
        yield lambda num_done: None
        return
    with Progress(transient=True) as progress:
        task = progress.add_task(description, total=num_elements)
        yield lambda num_done: progress.advance(task, num_done)


def _check(w: torch.Tensor, spec: QuantSpec, name: str) -> None:
    if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise MoEEpConfigError(f"{name} must be BF16, FP16 or FP32 to quantise, got {w.dtype}")
    if w.dim() < 2:
        raise MoEEpConfigError(f"{name} must be [..., N, K], got shape {tuple(w.shape)}")
    block_cols = BLOCKS[spec.format][1]
    if not spec.format.startswith("fp8") and w.shape[-1] % block_cols:
        raise MoEEpConfigError(
            f"{name} has {w.shape[-1]} columns; {spec.format} takes multiples of {block_cols}"
        )


def _row_chunks(w_NK: torch.Tensor, block_rows: int) -> Iterator[slice]:
    """Slices of rows, whole blocks, of about `_ELEMENTS_PER_CHUNK` elements."""
    budget = _ELEMENTS_PER_CHUNK.get(w_NK.device.type, 1 << 24)
    step = max(1, budget // max(1, block_rows * w_NK.shape[1])) * block_rows
    for first in range(0, w_NK.shape[0], step):
        yield slice(first, min(first + step, w_NK.shape[0]))


def _block_amax(x_NK: torch.Tensor, block_cols: int) -> torch.Tensor:
    """Largest magnitude of each row's blocks, in x's dtype; NaN wins over everything.

    Magnitudes compare as integers, which torch reduces several times faster than floats.
    """
    integer, mask = (torch.int32, 0x7FFFFFFF) if x_NK.itemsize == 4 else (torch.int16, 0x7FFF)
    magnitudes = x_NK.view(integer) & mask
    amax = magnitudes.view(x_NK.shape[0], -1, block_cols).amax(dim=-1)
    return amax.view(x_NK.dtype)


def _largest(amax: torch.Tensor) -> torch.Tensor:
    """FP32 scalar; NaN if there is one; 0 for an empty tensor."""
    return amax.max().float() if amax.numel() else torch.zeros((), device=amax.device)


def _quantize_nvfp4(
    w_NK: torch.Tensor, out: QuantizedTensor, advance: Callable[[int], object]
) -> torch.Tensor:
    """Writes one matrix; returns its largest magnitude."""
    spec = out.spec
    amax_NB = w_NK.new_empty(out.sf.shape)
    for rows in _row_chunks(w_NK, 1):
        amax_NB[rows] = _block_amax(w_NK[rows].contiguous(), 16)
    # A NaN must not reach the other blocks through the global scale.
    finite_NB = torch.nan_to_num(amax_NB, nan=0.0, posinf=math.inf).float()
    amax = finite_NB.amax(dim=1) if spec.per_token else _largest(finite_NB)
    encode, decode = nvfp4_global_scale(amax, spec.sf_max)
    out.global_scale.copy_(decode if spec.global_scale == "decode" else encode)
    encode_block = _encode_four_over_six if spec.four_over_six else _encode_nvfp4
    for rows in _row_chunks(w_NK, 1):
        scales = (amax, encode, decode)
        if spec.per_token:
            scales = tuple(scale[rows, None] for scale in scales)
        x_NBk = w_NK[rows].contiguous().view(-1, amax_NB.shape[1], 16)
        codes_NBk, sf_NB = encode_block(x_NBk, amax_NB[rows].float(), *scales, spec)
        out.codes[rows] = codes_NBk.view(out.codes[rows].shape)
        out.sf[rows] = sf_NB
        advance(x_NBk.numel())
    return _largest(amax_NB)


def nvfp4_global_scale(amax: torch.Tensor, sf_max: int = 448) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 amax -> (S, D): what to multiply by before quantising, and after decoding."""
    encode = (_constant(E2M1_MAX * sf_max, amax) / amax).clamp_max(FP32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)  # all zero; Inf
    return encode, encode.reciprocal()


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """FP32 scalar on `like`'s device. Between tensors torch divides with one rounding; a number
    over a tensor, and on CUDA a tensor over a number, goes through a rounded reciprocal."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _multiplier(sf: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    """min(1 / (s * D), FLT_MAX), one for each block."""
    return (sf.float() * decode).reciprocal_().clamp_max_(FP32_MAX)


def _encode_nvfp4(
    x_NBk: torch.Tensor,
    amax_NB: torch.Tensor,
    amax: torch.Tensor,
    encode: torch.Tensor,
    decode: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    sixth = _constant(1 / E2M1_MAX, amax_NB)  # 0x3E2AAAAB
    sf_NB = encode_e4m3(amax_NB * (encode * sixth))
    return encode_e2m1(x_NBk * _multiplier(sf_NB, decode)[..., None]), sf_NB


def _encode_four_over_six(
    x_NBk: torch.Tensor,
    amax_NB: torch.Tensor,
    amax: torch.Tensor,
    encode: torch.Tensor,
    decode: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    base_NB = (amax_NB / _constant(E2M1_MAX, amax_NB)) * encode
    candidates = []
    for stretch in (1.0, 1.5):
        sf_NB = encode_e4m3(base_NB * stretch)
        scaled_NBk = x_NBk * _multiplier(sf_NB, decode)[..., None]
        decoded_NBk = round_e2m1(scaled_NBk).mul_(sf_NB.float()[..., None])
        if spec.error_scale == "amax":
            decoded_NBk = decoded_NBk * amax[..., None] / _constant(E2M1_MAX * spec.sf_max, amax)
        else:
            decoded_NBk = decoded_NBk * decode[..., None]
        error_NB = _block_error(decoded_NBk.sub_(x_NBk), spec.four_over_six)
        candidates.append((sf_NB, scaled_NBk, error_NB))
    (sf6_NB, scaled6_NBk, error6_NB), (sf4_NB, scaled4_NBk, error4_NB) = candidates
    is_four_NB = (error4_NB < error6_NB) & (amax_NB != 0)  # ties and NaN: 6
    sf_NB = torch.where(is_four_NB, sf4_NB.view(torch.uint8), sf6_NB.view(torch.uint8))
    scaled_NBk = torch.where(is_four_NB[..., None], scaled4_NBk, scaled6_NBk)
    return encode_e2m1(scaled_NBk), sf_NB.view(torch.float8_e4m3fn)


def _block_error(error_NBk: torch.Tensor, rule: str) -> torch.Tensor:
    """Errors summed over a block from element 0 to 15, each addition rounded."""
    if rule == "max":
        return error_NBk.abs().amax(dim=-1)
    terms_kNB = (error_NBk * error_NBk if rule == "mse" else error_NBk.abs()).movedim(-1, 0)
    total_NB = terms_kNB[0].clone()
    for term_NB in terms_kNB[1:]:
        total_NB += term_NB
    return total_NB


def _quantize_blocks(
    w_NK: torch.Tensor, out: QuantizedTensor, advance: Callable[[int], object]
) -> torch.Tensor:
    """Writes one matrix in an mx or fp8 format; returns its largest magnitude."""
    spec = out.spec
    num_rows, num_cols = w_NK.shape
    block_rows, block_cols = BLOCKS[spec.format]
    largest = torch.zeros((), device=w_NK.device)
    scale_blocks = _scale_mx if spec.format.startswith("mx") else _scale_fp8
    encode_element = _ENCODERS["e2m1" if spec.format == "mxfp4" else spec.element]
    for rows in _row_chunks(w_NK, block_rows):
        x_nK = w_NK[rows]
        padding = (0, -num_cols % block_cols, 0, -x_nK.shape[0] % block_rows)
        x_nK = torch.nn.functional.pad(x_nK, padding) if any(padding) else x_nK.contiguous()
        amax_nB = _block_amax(x_nK, block_cols)
        largest = torch.maximum(largest, _largest(amax_nB))
        amax_BB = amax_nB.view(-1, block_rows, amax_nB.shape[1]).amax(dim=1).float()
        x_BrBk = x_nK.view(-1, block_rows, amax_nB.shape[1], block_cols)
        sf_BB, scaled_BrBk = scale_blocks(x_BrBk, amax_BB, spec)
        codes = encode_element(scaled_BrBk.view(x_nK.shape))
        out.codes[rows] = codes[: rows.stop - rows.start, : out.codes.shape[1]]
        out.sf[rows.start // block_rows : math.ceil(rows.stop / block_rows)] = sf_BB
        advance((rows.stop - rows.start) * num_cols)
    return largest


def _scale_mx(
    x_BrBk: torch.Tensor, amax_BB: torch.Tensor, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """E8M0 scale factors, and the elements divided by them (exact, or 0 in a block with byte 0)."""
    largest, exponent = _ELEMENT_RANGE["e2m1" if spec.format == "mxfp4" else spec.element]
    if spec.sf_rule == "ceil":
        byte = encode_e8m0_ceil(amax_BB * _constant(1 / largest, amax_BB))
    else:
        biased = torch.bitwise_right_shift(amax_BB.view(torch.int32), 23)
        byte = (biased - exponent).clamp_(0, 254)
        byte = torch.where(torch.isinf(amax_BB), 254, byte)
        byte = torch.where(torch.isnan(amax_BB), 255, byte).to(torch.uint8)
    # 2^(127 - byte), whose byte is 254 - byte; 255 (NaN) stays.
    inverse = decode_e8m0(torch.where(byte == 255, 255, 254 - byte).to(torch.uint8))
    inverse = torch.where(byte == 0, 0.0, inverse)
    return byte, x_BrBk * inverse[:, None, :, None]


def _scale_fp8(
    x_BrBk: torch.Tensor, amax_BB: torch.Tensor, spec: QuantSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 scale factors amax / 448, and the elements divided by them."""
    sf = amax_BB / _constant(E4M3_MAX, amax_BB)
    if spec.sf_power_of_two:
        sf = decode_e8m0(encode_e8m0_ceil(sf))
    sf = torch.where((amax_BB == 0) | (sf == 0), 1.0, sf)
    return sf, x_BrBk / sf[:, None, :, None]

"""The choices that decide a quantised tensor's bits, and the tensors that result."""

import math
from dataclasses import dataclass

import torch

from moe_ep.arguments import check_kind
from moe_ep.comm.errors import MoEEpConfigError

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
        check_kind("format", self.format, str, "a quantisation format")
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
            global_scale=torch.empty(scale_shape, dtype=torch.float32, device=device)
            if spec.format == "nvfp4"
            else None,
        )

    def matrix(self, index: tuple[int, ...]) -> "QuantizedTensor":
        """Views of one matrix."""
        scale = None if self.global_scale is None else self.global_scale[index]
        return QuantizedTensor(
            spec=self.spec, codes=self.codes[index], sf=self.sf[index], global_scale=scale
        )

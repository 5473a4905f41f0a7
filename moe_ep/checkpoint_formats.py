"""How publishers write the experts of one layer down.

Names are relative to the experts module, e.g. "5.up_proj.weight" under
"model.layers.3.mlp.experts". A per-expert format may call the projections gate_proj, up_proj,
down_proj or w1, w3, w2. In every packed byte the low nibble is the even column.

format                    tensors of a matrix [N, K], or of all experts [E, N, K]
hf                        BF16 or FP16 `5.up_proj.weight` [N, K]
hf_fused                  BF16 or FP16 `gate_up_proj` [E, 2I, H] gate rows first, `down_proj`
gpt_oss                   BF16 or FP16 `gate_up_proj` [E, H, 2I] columns gate, up, gate, up, ...,
                          `down_proj` [E, I, H], `.._bias` [E, N]
modelopt_nvfp4            `weight` uint8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_scale_2`
                          FP32 scalar, decode; `input_scale` may be there and is not used
compressed_tensors_nvfp4  `weight_packed`, `weight_scale` as above, `weight_global_scale` FP32 [1],
                          encode: its FP32 reciprocal is taken, at most 1 ulp off the decode scale
                          it was made of; `input_global_scale` is not used
deepseek_fp8              `weight` E4M3 [N, K], `weight_scale_inv` FP32 or BF16 [N/128, K/128], a
                          multiplier
deepseek_mxfp4            `weight` int8 or uint8 [N, K/2], `scale` E8M0 [N, K/32]
gpt_oss_mxfp4             `gate_up_proj_blocks` uint8 [E, 2I, H/32, 16], `.._scales` uint8 E8M0
                          [E, 2I, H/32], rows gate, up, gate, up, ..., `.._bias` BF16 [E, N]
"""

from dataclasses import dataclass, replace

import torch

from moe_ep.arguments import check_kind
from moe_ep.comm.errors import MoEEpConfigError

# Names of gate, up and down in per-expert formats, and of the fused tensors.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
FUSED_PROJECTIONS = ("gate_up_proj", "gate_up_proj", "down_proj")
GATE_UP_ORDERS = ("gate_first", "up_first", "interleaved")

# Names of dtypes in safetensors files.
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True)
class Part:
    """One tensor that belongs to a matrix [N, K].

    kind     "codes", "sf", "scale" (global, decode), "inverse_scale" (global, encode), "bias", or
             "unused": may be there and is not read
    suffix   what follows the projection's name
    block    rows and columns of the matrix for which one element stands
    chunk    elements into which the last dimension is split, 0: it is not
    """

    kind: str
    suffix: str
    dtypes: tuple[str, ...] = ()
    block: tuple[int, int] = (1, 1)
    chunk: int = 0


@dataclass(frozen=True)
class CheckpointFormat:
    """One way to write experts down.

    gate_up_order   how a fused tensor holds gate and up; None: per-expert tensors
    is_transposed   fused matrices are stored [E, K, N]
    """

    name: str
    weights_format: str
    parts: tuple[Part, ...]
    gate_up_order: str | None = None
    is_transposed: bool = False

    @property
    def is_fused(self) -> bool:
        return self.gate_up_order is not None

    @property
    def has_bias(self) -> bool:
        return any(part.kind == "bias" for part in self.parts)

    @property
    def pattern(self) -> str:
        """What its names look like, for messages."""
        suffixes = "|".join(part.suffix for part in self.parts if part.kind != "unused")
        if self.is_fused:
            return "(gate_up_proj|down_proj)" + (f"({suffixes})" if suffixes else "")
        return f"EXPERT.(gate_proj|up_proj|down_proj or w1|w3|w2).({suffixes})"


_DENSE = ("BF16", "F16")
_NVFP4_SF = Part("sf", "weight_scale", ("F8_E4M3",), (1, 16))
_FORMATS = (
    CheckpointFormat("hf", "bf16", (Part("codes", "weight", _DENSE),)),
    CheckpointFormat("hf_fused", "bf16", (Part("codes", "", _DENSE),), "gate_first"),
    CheckpointFormat(
        "gpt_oss",
        "bf16",
        (Part("codes", "", _DENSE), Part("bias", "_bias", _DENSE)),
        "interleaved",
        is_transposed=True,
    ),
    CheckpointFormat(
        "modelopt_nvfp4",
        "nvfp4",
        (
            Part("codes", "weight", ("U8",), (1, 2)),
            _NVFP4_SF,
            Part("scale", "weight_scale_2", ("F32",)),
            Part("unused", "input_scale"),
        ),
    ),
    CheckpointFormat(
        "compressed_tensors_nvfp4",
        "nvfp4",
        (
            Part("codes", "weight_packed", ("U8",), (1, 2)),
            _NVFP4_SF,
            Part("inverse_scale", "weight_global_scale", ("F32",)),
            Part("unused", "input_global_scale"),
        ),
    ),
    CheckpointFormat(
        "deepseek_fp8",
        "fp8_block",
        (
            Part("codes", "weight", ("F8_E4M3",)),
            Part("sf", "weight_scale_inv", ("F32", "BF16"), (128, 128)),
        ),
    ),
    CheckpointFormat(
        "deepseek_mxfp4",
        "mxfp4",
        (
            Part("codes", "weight", ("I8", "U8"), (1, 2)),
            Part("sf", "scale", ("F8_E8M0", "U8"), (1, 32)),
        ),
    ),
    CheckpointFormat(
        "gpt_oss_mxfp4",
        "mxfp4",
        (
            Part("codes", "_blocks", ("U8",), (1, 2), chunk=16),
            Part("sf", "_scales", ("U8",), (1, 32)),
            Part("bias", "_bias", ("BF16",)),
        ),
        "interleaved",
    ),
)
CHECKPOINT_FORMATS = {fmt.name: fmt for fmt in _FORMATS}


def checkpoint_format(name: str, gate_up_order: str | None = None) -> CheckpointFormat:
    """The format of that name, with another order of gate and up if one is given.

    Raises `MoEEpConfigError` listing what is allowed.
    """
    check_kind("format", name, str, "the name of a checkpoint format")
    if name not in CHECKPOINT_FORMATS:
        raise MoEEpConfigError(
            f"format {name!r} is not known; allowed: {', '.join(CHECKPOINT_FORMATS)}"
        )
    fmt = CHECKPOINT_FORMATS[name]
    if gate_up_order is None:
        return fmt
    if not fmt.is_fused:
        raise MoEEpConfigError(
            f"gate_up_order {gate_up_order!r}: {name} names gate and up apart; allowed: None"
        )
    if gate_up_order not in GATE_UP_ORDERS:
        raise MoEEpConfigError(
            f"gate_up_order must be one of {GATE_UP_ORDERS}, got {gate_up_order!r}"
        )
    return replace(fmt, gate_up_order=gate_up_order)

"""How publishers write the experts of one layer down, and where each tensor goes in `MoEWeights`.

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

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.weights import MoEWeights

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
    return CheckpointFormat(
        fmt.name, fmt.weights_format, fmt.parts, gate_up_order, fmt.is_transposed
    )


@dataclass(frozen=True)
class Piece:
    """Part of one checkpoint tensor and the place in `MoEWeights` that it fills.

    index       into the checkpoint tensor
    expert      id in the checkpoint, for messages
    tensor, local_expert_idx, half, num_halves   where it goes: `target`
    """

    index: tuple[int | slice, ...]
    expert: int
    part: Part
    is_transposed: bool
    tensor: str
    local_expert_idx: int
    half: int
    num_halves: int

    def target(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """A view of the place, given the tensors of `MoEWeights` by name."""
        held = tensors[self.tensor][self.local_expert_idx]
        return held.unflatten(0, (self.num_halves, -1))[self.half] if held.dim() else held

    def values(self, stored: torch.Tensor, name: str, round_fp16: bool = False) -> torch.Tensor:
        """`stored` (what `index` cuts out of `name`) as `target` takes it, a view where it can.

        Raises `MoEEpConfigError`, naming tensor, expert and index, for a scale that no healthy
        checkpoint holds and for FP16 that BF16 does not hold, unless it may be rounded.
        """
        where = f"{name} of expert {self.expert}"
        if self.is_transposed and self.part.kind == "codes":
            stored = stored.mT
        if self.part.chunk:
            stored = stored.flatten(-2)
        if stored.dtype in (torch.int8, torch.float8_e8m0fnu):
            stored = stored.view(torch.uint8)
        if self.part.kind in ("scale", "inverse_scale"):
            return _global_scale(stored.reshape(()), where, self.part.kind)
        if self.part.kind == "sf":
            _check_sf(stored, where)
        if stored.dtype == torch.float16 and not round_fp16:
            _refuse(
                stored,
                stored.bfloat16().float() != stored.float(),
                where,
                "a value that BF16 holds (or give round_fp16=True)",
            )
        return stored


@dataclass
class Expected:
    """A checkpoint tensor as its format has it; `pieces` are those that this rank reads."""

    shape: tuple[int, ...] | None  # None: not read
    dtypes: tuple[str, ...] = ()
    is_optional: bool = False
    pieces: list[Piece] = field(default_factory=list)

    def misfit(self, shape: Sequence[int], dtype: str) -> str | None:
        """Why a tensor of that shape and dtype is not this one, or None."""
        if self.shape is None:
            return None
        if dtype not in self.dtypes:
            return f"is {dtype}; allowed: {' or '.join(self.dtypes)}"
        if tuple(shape) != self.shape and not (self.shape == () and tuple(shape) == (1,)):
            return f"has shape {list(shape)}; allowed: {list(self.shape)}"
        return None


def expected_tensors(
    fmt: CheckpointFormat,
    form: MoEWeights,
    num_experts: int,
    experts: Sequence[int],
    projections: Sequence[str],
) -> dict[str, Expected]:
    """Relative name -> tensor, for all `num_experts` experts of the checkpoint.

    form          how the rank holds its part: format, sizes, parallel mode (may be on meta)
    experts       id in the checkpoint of each expert of `form`, in its order
    projections   names of gate, up and down
    """
    if fmt.is_fused and not form.is_gated:
        raise MoEEpConfigError(f"format {fmt.name} is of gated experts, the layer is not gated")
    expected: dict[str, Expected] = {}
    for matrix in _matrices(form):
        for part in fmt.parts:
            names = _names(fmt, part, projections[matrix.projection], num_experts)
            shape = matrix.stored_shape(fmt, part, num_experts)
            for name in names:
                is_optional = part.kind == "unused"
                expected.setdefault(name, Expected(shape, part.dtypes, is_optional))
            tensor = matrix.tensor_of(part)
            if tensor is None or (part.kind == "bias" and tensor not in form.tensors):
                continue
            for local_idx, expert in enumerate(experts):
                name = names[0] if fmt.is_fused else names[expert]
                expected[name].pieces.append(
                    Piece(
                        matrix.index(fmt, part, expert),
                        expert,
                        part,
                        fmt.is_transposed,
                        tensor,
                        local_idx,
                        matrix.half,
                        matrix.num_halves,
                    )
                )
    return expected


def find_projections(fmt: CheckpointFormat, names: Iterable[str]) -> tuple[str, str, str]:
    """The names that a checkpoint, of which `names` are some tensors, gives gate, up and down.

    Raises `MoEEpConfigError` where two dialects are mixed.
    """
    if fmt.is_fused:
        return FUSED_PROJECTIONS
    words = {word for name in names for word in name.split(".")}
    found = [dialect for dialect in PROJECTIONS if words & set(dialect)]
    if len(found) > 1:
        raise MoEEpConfigError(
            f"names mix {'/'.join(found[0])} with {'/'.join(found[1])}; allowed: one of them"
        )
    return found[0] if found else PROJECTIONS[0]


@dataclass(frozen=True)
class _Matrix:
    """One projection of every expert, [rows, cols], and the part of it that a rank holds."""

    projection: int  # 0 gate, 1 up, 2 down
    half: int
    num_halves: int
    rows: int
    cols: int
    held_rows: range
    held_cols: range

    def tensor_of(self, part: Part) -> str | None:
        """Name in `MoEWeights`."""
        w, b = ("w2", "b2") if self.projection == 2 else ("w13", "b13")
        scale = ("gate_scale", "up_scale", "down_scale")[self.projection]
        by_kind = {"codes": w, "sf": f"{w}_sf", "bias": b, "scale": scale, "inverse_scale": scale}
        return by_kind.get(part.kind)

    def stored_shape(
        self, fmt: CheckpointFormat, part: Part, num_experts: int
    ) -> tuple[int, ...] | None:
        rows = self.rows * (self.num_halves if fmt.is_fused else 1)
        lead = (num_experts,) if fmt.is_fused else ()
        if part.kind == "unused":
            return None
        if part.kind in ("scale", "inverse_scale"):
            return lead
        if part.kind == "bias":
            return (*lead, rows)
        stored = (-(-rows // part.block[0]), -(-self.cols // part.block[1]))
        if fmt.is_transposed and part.kind == "codes":
            stored = stored[::-1]
        if part.chunk:
            stored = (*stored[:-1], stored[-1] // part.chunk, part.chunk)
        return (*lead, *stored)

    def index(self, fmt: CheckpointFormat, part: Part, expert: int) -> tuple[int | slice, ...]:
        lead = (expert,) if fmt.is_fused else ()
        if part.kind in ("scale", "inverse_scale"):
            return lead
        rows = _blocks(self.held_rows, part.block[0])
        if fmt.is_fused:
            rows = _in_fused(rows, self, fmt.gate_up_order)
        if part.kind == "bias":
            return (*lead, rows)
        cols = _blocks(self.held_cols, part.block[1] * (part.chunk or 1))
        is_transposed = fmt.is_transposed and part.kind == "codes"
        return (*lead, cols, rows) if is_transposed else (*lead, rows, cols)


def _matrices(form: MoEWeights) -> Iterator[_Matrix]:
    h, i = form.hidden, form.intermediate
    first = form.rank * form.local_intermediate if form.parallel == "tp" else 0
    held = range(first, first + form.local_intermediate)
    for half in range(form.num_halves):
        projection = half + 2 - form.num_halves
        yield _Matrix(projection, half, form.num_halves, i, h, held, range(h))
    yield _Matrix(2, 0, 1, h, i, range(h), held)


def _blocks(elements: range, block: int) -> slice:
    return slice(elements.start // block, -(-elements.stop // block))


def _in_fused(rows: slice, matrix: _Matrix, order: str | None) -> slice:
    """Rows of one half as rows of the tensor that holds gate and up (fused ones are unblocked)."""
    if matrix.num_halves == 1:
        return rows
    if order == "interleaved":
        return slice(2 * rows.start + matrix.half, 2 * rows.stop, 2)
    first = matrix.rows * (matrix.half if order == "gate_first" else 1 - matrix.half)
    return slice(first + rows.start, first + rows.stop)


def _names(fmt: CheckpointFormat, part: Part, projection: str, num_experts: int) -> list[str]:
    if fmt.is_fused:
        return [projection + part.suffix]
    return [f"{expert}.{projection}.{part.suffix}" for expert in range(num_experts)]


def _global_scale(stored: torch.Tensor, where: str, kind: str) -> torch.Tensor:
    scale = stored if kind == "scale" else stored.reciprocal()
    is_good = torch.isfinite(stored) & (stored > 0) & torch.isfinite(scale) & (scale > 0)
    _refuse(stored, ~is_good, where, "finite and above 0, and so its reciprocal where it is one")
    return scale


def _check_sf(stored: torch.Tensor, where: str) -> None:
    """What no scale factor may be, whatever its codes; `MoEWeights` looks at the products too."""
    if stored.dtype == torch.uint8:
        _refuse(stored, stored == 255, where, "an E8M0 exponent, 0 to 254")
    elif stored.dtype == torch.float8_e4m3fn:
        byte = stored.view(torch.uint8)
        _refuse(stored, ((byte & 0x7F) == 0x7F) | (byte > 0x80), where, "finite and not negative")
    else:
        _refuse(stored, ~(torch.isfinite(stored) & (stored > 0)), where, "finite and above 0")


def _refuse(stored: torch.Tensor, is_bad: torch.Tensor, where: str, allowed: str) -> None:
    if not is_bad.any():
        return
    index = is_bad.nonzero()[0].tolist()
    at = f" at {index}" if index else ""
    value = stored[tuple(index)].float().item()
    raise MoEEpConfigError(f"{where} is {value:g}{at}; it must be {allowed}")

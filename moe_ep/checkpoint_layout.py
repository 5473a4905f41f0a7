"""Where each tensor of a checkpoint goes in `MoEWeights`, and which part of it a rank reads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from moe_ep.checkpoint_formats import (
    FUSED_PROJECTIONS,
    PROJECTIONS,
    CheckpointFormat,
    Part,
)
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.weights import MoEWeights


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

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
from moe_ep.weight_checks import BadScaleError
from moe_ep.weights import MoEWeights

_BYTES_PER_CHUNK = 1 << 15  # stays in cache; above, torch would wake its threads for each


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

    def values(
        self,
        stored: torch.Tensor,
        name: str,
        *,
        round_fp16: bool = False,
        allow_nonfinite: bool = False,
    ) -> torch.Tensor:
        """`stored` (what `index` cuts out of `name`) as `target` takes it, a view where it can.

        Raises `MoEEpConfigError`, naming tensor, expert and index, for a global scale that is not
        finite and above 0, for a weight or bias that is NaN or Inf unless `allow_nonfinite`, and
        for FP16 that BF16 does not hold unless it may be rounded. Block scales are `MoEWeights`'
        to look at, beside their codes: see `name_bad_scale`.
        """
        if self.part.kind in ("scale", "inverse_scale"):
            return self._global_scale(stored, name).reshape(())
        if self.part.kind != "sf" and not allow_nonfinite and not _is_finite(stored):
            allowed = "finite (or give allow_nonfinite=True)"
            self._refuse(stored, name, _is_nonfinite(stored), allowed)
        if stored.dtype == torch.float16 and not round_fp16:
            is_inexact = (stored.bfloat16().float() != stored.float()) & ~stored.isnan()
            allowed = "a value that BF16 holds (or give round_fp16=True)"
            self._refuse(stored, name, is_inexact, allowed)
        if self.is_transposed and self.part.kind == "codes":
            stored = stored.mT
        if self.part.chunk:
            stored = stored.flatten(-2)
        # Packed codes and E8M0 exponents are bytes, whatever the file calls them.
        is_byte = stored.dtype in (torch.int8, torch.float8_e8m0fnu)
        return stored.view(torch.uint8) if is_byte else stored

    def refusal(
        self, name: str, position: Iterable[int], value: float, allowed: str
    ) -> MoEEpConfigError:
        """Of the value at `position` of what `index` cuts out of `name`; names that in the file."""
        rest = iter(position)
        cut = [
            part if isinstance(part, int) else part.start + (part.step or 1) * next(rest)
            for part in self.index
        ]
        stored_at = [*cut, *rest]
        at = f" at {stored_at}" if stored_at else ""
        return MoEEpConfigError(
            f"{name} of expert {self.expert} is {value:g}{at}; it must be {allowed}"
        )

    def _global_scale(self, stored: torch.Tensor, name: str) -> torch.Tensor:
        scale = stored if self.part.kind == "scale" else stored.reciprocal()
        is_good = torch.isfinite(stored) & (stored > 0) & torch.isfinite(scale) & (scale > 0)
        allowed = "finite and above 0, and so its reciprocal where it is one"
        self._refuse(stored, name, ~is_good, allowed)
        return scale

    def _refuse(self, stored: torch.Tensor, name: str, is_bad: torch.Tensor, allowed: str) -> None:
        if not is_bad.any():
            return
        position = tuple(is_bad.nonzero()[0].tolist())
        raise self.refusal(name, position, stored[position].float().item(), allowed)


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


def find_projections(fmt: CheckpointFormat, names: Sequence[str]) -> tuple[str, str, str]:
    """The names that a checkpoint, of which `names` are some tensors, gives gate, up and down.

    Raises `MoEEpConfigError` where two dialects are mixed, naming a tensor of the rarer one.
    """
    if fmt.is_fused:
        return FUSED_PROJECTIONS
    named = [
        [name for name in names if not set(name.split(".")).isdisjoint(dialect)]
        for dialect in PROJECTIONS
    ]
    if all(named):
        rarer = min(named, key=len)
        first, second = ("/".join(dialect) for dialect in PROJECTIONS)
        raise MoEEpConfigError(
            f"names mix {first} with {second} ({rarer[0]}); allowed: one of them"
        )
    return PROJECTIONS[1] if named[1] else PROJECTIONS[0]


def name_bad_scale(error: BadScaleError, pieces: Iterable[tuple[Piece, str]]) -> MoEEpConfigError:
    """The same refusal by the checkpoint tensor that the scale came from, one of `pieces` with
    their names; `error` itself if it came from none of them."""
    local_expert_idx, *position = error.index
    for piece, name in pieces:
        if (piece.tensor, piece.local_expert_idx) != (error.tensor, local_expert_idx):
            continue
        if not position:
            return piece.refusal(name, (), error.value, error.allowed)
        row, block = position
        rows = piece.index[-2]
        num_rows = len(range(rows.start, rows.stop, rows.step or 1))
        if row // num_rows == piece.half:
            return piece.refusal(name, (row % num_rows, block), error.value, error.allowed)
    return error


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


def _is_finite(stored: torch.Tensor) -> bool:
    """Whether all is finite, at the speed of memory: most checkpoints are asked and all is well."""
    if stored.dtype in (torch.uint8, torch.int8) or not stored.numel():
        return True  # E2M1 has neither NaN nor Inf
    if stored.dtype != torch.float8_e4m3fn:
        return all(torch.isfinite(extreme) for extreme in stored.aminmax())
    rows_per_chunk = max(1, _BYTES_PER_CHUNK // stored.shape[-1])
    chunks = stored.view(torch.uint8).split(rows_per_chunk)
    return all(int((chunk & 0x7F).max()) != 0x7F for chunk in chunks)


def _is_nonfinite(stored: torch.Tensor) -> torch.Tensor:
    if stored.dtype == torch.float8_e4m3fn:
        return (stored.view(torch.uint8) & 0x7F) == 0x7F
    return ~torch.isfinite(stored)

"""Names of a checkpoint's tensors: which a format knows and misses, and which format fits them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from moe_ep.checkpoint_formats import (
    CHECKPOINT_FORMATS,
    FUSED_PROJECTIONS,
    PROJECTIONS,
    CheckpointFormat,
)
from moe_ep.checkpoint_layout import Expected
from moe_ep.comm.errors import MoEEpConfigError

_NUM_NAMED = 3


def check_names(
    fmt: CheckpointFormat, expected: Mapping[str, Expected], names: Sequence[str]
) -> None:
    """Raise `MoEEpConfigError` unless `names` are the expected ones (unused tensors may be there).

    It names the first that are missing and that are not known, and the format they are nearest to.
    """
    found = set(names)
    missing = [n for n, t in expected.items() if not t.is_optional and n not in found]
    extra = sorted(found - expected.keys())
    if not missing and not extra:
        return
    wrong = ", ".join(_first(missing, "missing") + _first(extra, "not known"))
    nearest = nearest_format(names)
    other = f"; the names are nearest to {nearest!r}" if nearest not in (None, fmt.name) else ""
    raise MoEEpConfigError(f"{wrong}; format {fmt.name!r} is {fmt.pattern}{other}")


def _first(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    named = [f"{name} ({_expert(name)})" if _expert(name) else name for name in names[:_NUM_NAMED]]
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return [f"{', '.join(named)}{more}: {what}"]


def _expert(name: str) -> str:
    expert = name.partition(".")[0]
    return f"expert {expert}" if expert.isdecimal() else ""


def nearest_format(names: Sequence[str]) -> str | None:
    """The format with the fewest of `names` unknown to it and the fewest tensors missing beside
    them; None if that is more than half of them."""
    misfits = {fmt.name: _num_misfits(fmt, names) for fmt in CHECKPOINT_FORMATS.values()}
    nearest = min(misfits, key=lambda fmt: (sum(misfits[fmt]), misfits[fmt]))
    return nearest if 2 * sum(misfits[nearest]) <= len(names) else None


def known_matrix(fmt: CheckpointFormat, name: str) -> str | None:
    """The matrix, "5.up_proj" or "gate_up_proj", that a tensor of this name is a part of in `fmt`;
    None if it is of none."""
    suffixes = [part.suffix for part in fmt.parts]
    if fmt.is_fused:
        matrix = next((m for m in FUSED_PROJECTIONS if name.startswith(m)), None)
        return matrix if matrix and name.removeprefix(matrix) in suffixes else None
    matrix, _, suffix = name.rpartition(".")
    expert, _, projection = matrix.partition(".")
    is_matrix = expert.isdecimal() and any(projection in words for words in PROJECTIONS)
    return matrix if is_matrix and suffix in suffixes else None


def _num_misfits(fmt: CheckpointFormat, names: Sequence[str]) -> tuple[int, int]:
    """How many of the names the format does not know, how many it misses beside the others."""
    found: dict[str | None, set[str]] = defaultdict(set)  # matrix -> its tensors
    for name in names:
        found[known_matrix(fmt, name)].add(name)
    num_unknown = len(found.pop(None, ()))
    needed = {part.suffix for part in fmt.parts if part.kind != "unused"}
    dot = "" if fmt.is_fused else "."
    return num_unknown, sum(
        f"{matrix}{dot}{suffix}" not in known
        for matrix, known in found.items()
        for suffix in needed
    )

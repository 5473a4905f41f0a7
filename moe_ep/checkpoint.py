"""Experts from safetensors files: one rank's part, read by lazy slices into its place."""

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open

from moe_ep.arguments import check_device, check_kind
from moe_ep.checkpoint_formats import CheckpointFormat, checkpoint_format
from moe_ep.checkpoint_layout import (
    Expected,
    expected_tensors,
    find_projections,
    name_bad_scale,
)
from moe_ep.checkpoint_names import check_names
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import MoEShape
from moe_ep.placement import ExpertMap, slots_shape
from moe_ep.progress import progress_bar
from moe_ep.quant_spec import QuantizedTensor, QuantSpec
from moe_ep.weight_checks import BadScaleError
from moe_ep.weights import MoEWeights

__all__ = ["Checkpoint", "load"]

_log = logging.getLogger(__name__)

_INDEX = "*.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_EXPERTS = re.compile(r"((?:.*\.)?experts)\.(.+)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# A shard is mapped; pages that were read stay resident until it is closed.
_RESIDENT_BYTES = 64 << 20
_PROGRESS_BYTES = 256 << 20
_BYTE_COLUMNS = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
_NUM_NAMED = 3


class Checkpoint:
    """A folder of safetensors shards (with an index, or without), or one file.

    Open it once to load several layers. `bytes_read` counts the bytes that were asked for.

    Raises `MoEEpConfigError` naming the file for a path without safetensors files, an index that
    names a missing file, a file that is damaged and a tensor that is in two files.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_kind("path", path, (str, os.PathLike), "a folder or file, or an open Checkpoint")
        self.path = Path(path)
        self.bytes_read = 0
        self._shard: tuple[Path, safe_open] | None = None
        self._resident_bytes = 0
        self.files = self._find_files()

    def _find_files(self) -> dict[str, Path]:
        """Tensor name -> its file."""
        if self.path.is_file():
            return dict.fromkeys(self._names_in(self.path), self.path)
        indices = sorted(self.path.glob(_INDEX))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise MoEEpConfigError(f"path {self.path} holds several indices ({names}); allowed: 1")
        if indices:
            return self._indexed(indices[0])
        files: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            for name in self._names_in(file):
                if name in files:
                    raise MoEEpConfigError(f"{name} is in {files[name]} and in {file}")
                files[name] = file
        if not files:
            raise MoEEpConfigError(
                f"path {self.path} holds no safetensors file; allowed: a folder of "
                "*.safetensors, with or without an index, or one such file"
            )
        return files

    def _indexed(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = {name: self.path / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MoEEpConfigError(
                f"{index} is not an index of safetensors files: {error!r}"
            ) from None
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise MoEEpConfigError(f"{index} names {file.name}, which is not there")
        return files

    def _names_in(self, file: Path) -> list[str]:
        return list(self._open(file).keys())

    def _open(self, file: Path) -> safe_open:
        if self._shard is None or self._shard[0] != file or self._resident_bytes > _RESIDENT_BYTES:
            self._shard, self._resident_bytes = None, 0
            try:
                self._shard = (file, safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise MoEEpConfigError(f"{file} cannot be read: {_why(file, error)}") from error
        return self._shard[1]

    def _slice(self, name: str) -> Any:
        file = self.files[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise MoEEpConfigError(f"{file} should hold {name}: {error}") from error

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype (safetensors' name of it); no data is read."""
        stored = self._slice(name)
        return tuple(stored.get_shape()), str(stored.get_dtype())

    def read(self, name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """`tensor[index]` as a view of the mapped file; drop it before the next is read."""
        part = self._slice(name)[index or ...]
        self.bytes_read += part.nbytes
        self._resident_bytes += part.nbytes
        return part

    def experts(self) -> dict[str, list[str]]:
        """Name of each experts module -> names of its tensors, relative to it."""
        found: dict[str, list[str]] = {}
        for name in self.files:
            if match := _EXPERTS.fullmatch(name):
                found.setdefault(match[1], []).append(match[2])
        return found

    def find_experts(self, layer: int | str) -> tuple[str, list[str]]:
        """Name of the experts module of a layer (its number, or the name itself), its tensors.

        Raises `MoEEpConfigError` listing the modules that fit if it is not exactly one.
        """
        experts = self.experts()
        found = [name for name in experts if layer in (name, layer_number(name))]
        if len(found) == 1:
            return found[0], experts[found[0]]
        if found:
            raise MoEEpConfigError(
                f"layer {layer!r} of {self.path} is one of {', '.join(found)}; give the name"
            )
        known = ", ".join(list(experts)[:_NUM_NAMED]) + (
            ", ..." if len(experts) > _NUM_NAMED else ""
        )
        raise MoEEpConfigError(
            f"layer {layer!r} has no experts in {self.path}; allowed: "
            + (f"a layer of {known}" if experts else "none, it holds no '...experts.' tensors")
        )


def _why(file: Path, error: Exception) -> str:
    """Why a file could not be opened, in the terms of who downloaded it."""
    if file.suffix == ".json":
        return "it is no safetensors file; allowed: the folder that it lies in"
    if file.is_file():
        with file.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return "it is a Git LFS pointer to the file; download it with `git lfs pull`"
    return str(error)


def layer_number(experts_name: str) -> int | None:
    """3 of "model.layers.3.mlp.experts"."""
    numbers = _LAYER.findall(experts_name + ".")
    return int(numbers[-1]) if numbers else None


def load(
    path: str | os.PathLike[str] | Checkpoint,
    layer: int | str,
    *,
    shape: MoEShape,
    format: str,
    parallel: str = "ep",
    rank: int = 0,
    num_ranks: int = 1,
    expert_map: ExpertMap | None = None,
    gate_up_order: str | None = None,
    round_fp16: bool = False,
    allow_nonfinite: bool = False,
    device: torch.device | str = "cpu",
) -> MoEWeights:
    """One rank's experts of one layer, exactly as the checkpoint has them.

    path            folder of safetensors shards, one file, or an open `Checkpoint`
    layer           number of the layer, or the full name of its experts module
    shape           what the layer must be; every tensor is held against it
    format          how the checkpoint is written, a name of `moe_ep.checkpoint_formats`: declared
                    by the caller, never guessed
    expert_map      which expert each physical slot holds; default: each expert once, in order
    gate_up_order   of fused tensors: "gate_first", "up_first" or "interleaved"; default: the
                    format's
    round_fp16      FP16 values may be rounded to BF16 (nearest even)
    allow_nonfinite NaN and Inf among BF16, FP16 and FP8 values are kept as they are

    Only this rank's bytes are read, tensor by tensor into their place: memory beside the result is
    one tensor's part and some 64 MiB of mapped file. Not collective.

    Raises `MoEEpConfigError` naming the argument and what is allowed, and naming tensor, expert and
    index in the file for what is missing, unknown, of another shape or dtype, for a weight or bias
    that is NaN or infinite, and for a scale that `MoEWeights` refuses.
    """
    check_kind("layer", layer, (int, str), "a number or the name of an experts module")
    check_kind("shape", shape, MoEShape, "a MoEShape")
    check_kind("round_fp16", round_fp16, bool, "a bool")
    check_kind("allow_nonfinite", allow_nonfinite, bool, "a bool")
    device = check_device(device)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    fmt = checkpoint_format(format, gate_up_order)
    prefix, names = checkpoint.find_experts(layer)
    form = meta_weights(shape, fmt, expert_map).shard(parallel, rank, num_ranks)
    experts = form.expert_ids
    if expert_map:
        form = replace(form, slot_experts=expert_map.physical_to_logical)
        experts = expert_map.logical_of(form.expert_ids)
    wanted = check_tensors(checkpoint, prefix, names, fmt, form, shape.num_experts, experts)
    tensors = {n: torch.empty_like(t, device=device) for n, t in form.tensors.items()}
    options = {"round_fp16": round_fp16, "allow_nonfinite": allow_nonfinite}
    bytes_before = checkpoint.bytes_read
    with progress_bar(
        f"loading {prefix}",
        form.num_bytes,
        *_BYTE_COLUMNS,
        is_shown=rank == 0 and form.num_bytes >= _PROGRESS_BYTES,
    ) as advance:
        for name in sorted(wanted, key=checkpoint.files.get):
            for piece in wanted[name].pieces:
                target = piece.target(tensors)
                stored = checkpoint.read(name, piece.index)
                target.copy_(piece.values(stored, name, **options))
                advance(target.nbytes)
    _log.info(
        "%s: read %d bytes for rank %d of %d",
        *(prefix, checkpoint.bytes_read - bytes_before, rank, num_ranks),
    )
    try:
        return replace(form, **tensors)
    except BadScaleError as error:
        pieces = ((piece, name) for name, tensor in wanted.items() for piece in tensor.pieces)
        raise name_bad_scale(error, pieces) from None


def check_tensors(
    checkpoint: Checkpoint,
    prefix: str,
    names: list[str],
    fmt: CheckpointFormat,
    form: MoEWeights,
    num_experts: int,
    experts: Sequence[int],
) -> dict[str, Expected]:
    """Full name -> what `form`, whose experts are these of the checkpoint, reads of that tensor.

    Raises `MoEEpConfigError` unless `names` are those of the format, none less and none more, and
    what is read has the format's shapes and dtypes. Headers alone are looked at.
    """
    try:
        projections = find_projections(fmt, names)
        expected = expected_tensors(fmt, form, num_experts, experts, projections)
        check_names(fmt, expected, names)
    except MoEEpConfigError as error:
        raise MoEEpConfigError(f"{prefix} in {checkpoint.path}: {error}") from None
    wanted = {f"{prefix}.{name}": tensor for name, tensor in expected.items() if tensor.pieces}
    for name in sorted(wanted, key=checkpoint.files.get):
        if misfit := wanted[name].misfit(*checkpoint.header(name)):
            raise MoEEpConfigError(f"{name} {misfit}")
    return wanted


def meta_weights(
    shape: MoEShape, fmt: CheckpointFormat, expert_map: ExpertMap | None = None
) -> MoEWeights:
    """All experts of the layer on the meta device: dtypes and shapes without bytes."""
    e = slots_shape(shape, expert_map).num_experts
    halves, h, i = shape.num_fc1_halves, shape.hidden, shape.intermediate
    is_gated = shape.activation.is_gated
    biases = {}
    if fmt.has_bias:
        bias = torch.empty(e, shape.fc1_rows + h, dtype=torch.bfloat16, device="meta")
        biases = {"b13": bias[:, : shape.fc1_rows].clone(), "b2": bias[:, shape.fc1_rows :].clone()}
    ownership = dict(
        num_experts=e,
        expert_ids=tuple(range(e)),
        hidden=h,
        intermediate=i,
        is_gated=is_gated,
        **biases,
    )
    if fmt.weights_format == "bf16":
        w13 = torch.empty(e, shape.fc1_rows, h, dtype=torch.bfloat16, device="meta")
        w2 = torch.empty(e, h, i, dtype=torch.bfloat16, device="meta")
        return MoEWeights(weights_format="bf16", w13=w13, w2=w2, **ownership)
    spec = QuantSpec(format=fmt.weights_format)
    q13 = QuantizedTensor.empty((e, halves, i, h), spec, "meta")
    q2 = QuantizedTensor.empty((e, h, i), spec, "meta")
    scales = {}
    if q2.global_scale is not None:
        scales = {"up_scale": q2.global_scale, "down_scale": q2.global_scale}
        scales |= {"gate_scale": q2.global_scale} if is_gated else {}
    return MoEWeights(
        weights_format=fmt.weights_format,
        w13=q13.codes.flatten(1, 2),
        w2=q2.codes,
        w13_sf=q13.sf.flatten(1, 2),
        w2_sf=q2.sf,
        **scales,
        **ownership,
    )

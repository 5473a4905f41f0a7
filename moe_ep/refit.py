"""New weights for a layer that runs: what fits it, and what a checkpoint's names change in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from moe_ep.arguments import check_kind
from moe_ep.checkpoint_formats import DTYPE_NAMES, checkpoint_format
from moe_ep.checkpoint_layout import (
    Expected,
    expected_tensors,
    find_projections,
    name_bad_scale,
)
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.held_weights import HeldWeights, read_experts, some_experts, write_experts
from moe_ep.inputs import check_tensor
from moe_ep.weight_checks import BadScaleError
from moe_ep.weights import MoEWeights


def stage(
    named: Mapping[str, torch.Tensor],
    held: HeldWeights,
    form: MoEWeights,
    *,
    num_experts: int,
    experts: Sequence[int],
    format: str | None,
    prefix: str = "",
    gate_up_order: str | None = None,
    round_fp16: bool = False,
    allow_nonfinite: bool = False,
) -> Callable[[], None]:
    """Everything that can be wrong is found here, on copies of the experts that change; the result
    writes them into `held`, in place.

    named        checkpoint name -> tensor, whole tensors as in a checkpoint, on any device; what
                 other ranks hold is left out
    form         what the layer's weights look like (may be on meta)
    num_experts  of the checkpoint; `experts`: the id there of each expert held here
    prefix       what stands before the names that `format` has, "model.layers.3.mlp.experts."

    Raises `MoEEpConfigError` naming the tensor for an unknown name, another shape or dtype, and
    what `moe_ep.load` refuses.
    """
    if not named:
        raise MoEEpConfigError("weights is an empty mapping; allowed: at least one named tensor")
    if format is None:
        raise MoEEpConfigError("format is missing; named tensors need the checkpoint's format")
    check_kind("round_fp16", round_fp16, bool, "a bool")
    check_kind("allow_nonfinite", allow_nonfinite, bool, "a bool")
    fmt = checkpoint_format(format, gate_up_order)
    if fmt.weights_format != form.weights_format:
        raise MoEEpConfigError(
            f"format {format!r} holds {fmt.weights_format} weights, the layer {form.weights_format}"
        )
    check_kind("prefix", prefix, str, "a str")
    for name in named:
        check_kind("name of a tensor", name, str, "a str")
    cut = len(prefix)
    projections = find_projections(fmt, [name[cut:] for name in named])
    expected = expected_tensors(fmt, form, num_experts, experts, projections)
    for name in named:
        if not name.startswith(prefix) or name[cut:] not in expected:
            raise MoEEpConfigError(
                f"{name} is not known to format {format!r} with {num_experts} experts; allowed: "
                f"{prefix}{fmt.pattern}{_other_prefix(name, prefix, expected)}"
            )
    pieces = []
    for name, tensor in named.items():
        _check(tensor, name, expected[name[cut:]])
        pieces += [(piece, name) for piece in expected[name[cut:]].pieces]
    local_experts = sorted({piece.local_expert_idx for piece, _ in pieces})
    position = {local_idx: position for position, local_idx in enumerate(local_experts)}
    tensors = read_experts(held, form, local_experts)
    options = {"round_fp16": round_fp16, "allow_nonfinite": allow_nonfinite}
    staged = []
    for piece, name in pieces:
        piece = replace(piece, local_expert_idx=position[piece.local_expert_idx])
        stored = named[name].detach()[piece.index or ...]
        piece.target(tensors).copy_(piece.values(stored, name, **options))
        staged.append((piece, name))
    try:
        some_experts(form, local_experts, tensors)  # looks at every scale
    except BadScaleError as error:
        raise name_bad_scale(error, staged) from None
    return lambda: write_experts(held, form, tensors, local_experts)


def _other_prefix(name: str, prefix: str, expected: Mapping[str, Expected]) -> str:
    """What to add to a refusal of `name`, which would be known behind another prefix."""
    parts = name.split(".")
    for cut in range(len(parts)):
        if ".".join(parts[cut:]) in expected:
            fitting = "".join(f"{part}." for part in parts[:cut])
            return f"; prefix is {prefix!r}, with {fitting!r} the name is known"
    return ""


def _check(tensor: torch.Tensor, name: str, expected: Expected) -> None:
    check_kind(name, tensor, torch.Tensor, "a tensor")
    if tensor.is_meta:
        raise MoEEpConfigError(f"{name} is on meta; allowed: a tensor with values")
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    if misfit := expected.misfit(tensor.shape, dtype):
        raise MoEEpConfigError(f"{name} {misfit}")


def check_update(weights: MoEWeights, form: MoEWeights, device: torch.device) -> None:
    """Raise `MoEEpConfigError` unless `weights` are of the same kind as `form`, on `device`."""
    if not isinstance(weights, MoEWeights):
        raise MoEEpConfigError(
            f"weights must be MoEWeights, got {type(weights).__name__}, or a mapping of checkpoint "
            "tensors"
        )
    for name in ("weights_format", "parallel", "rank", "num_ranks", "expert_ids"):
        value, wanted = getattr(weights, name), getattr(form, name)
        if value != wanted:
            raise MoEEpConfigError(f"weights.{name} is {value}; allowed: {wanted}, as built")
    if weights.tensors.keys() != form.tensors.keys():
        raise MoEEpConfigError(
            f"weights hold {', '.join(weights.tensors)}; allowed: {', '.join(form.tensors)}, "
            "as built"
        )
    for name, tensor in form.tensors.items():
        new = getattr(weights, name)
        check_tensor(f"weights.{name}", new, (tensor.dtype,), tensor.shape, device)

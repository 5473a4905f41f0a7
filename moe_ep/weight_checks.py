"""What `MoEWeights` accepts: ownership, shapes, dtypes, layouts and scale values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from moe_ep.arguments import check_int, check_kind
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import weight_format
from moe_ep.number_formats import decode_e2m1, decode_e8m0

if TYPE_CHECKING:
    from moe_ep.weights import MoEWeights

_CODE_DTYPES = {
    "bf16": torch.bfloat16,
    "nvfp4": torch.uint8,
    "mxfp4": torch.uint8,
    "mxfp8": torch.float8_e4m3fn,
    "fp8_block": torch.float8_e4m3fn,
}
_SF_DTYPES = {
    "nvfp4": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "mxfp8": torch.uint8,
    "fp8_block": torch.float32,
}
# E8M0 bytes that multiply some element code to a value BF16 does not hold.
_RISKY_BYTES = {"mxfp4": (0, 252), "mxfp8": (3, 246)}  # below the first, above the second

Expected = dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...] | None]]


class BadScaleError(MoEEpConfigError):
    """A scale of `MoEWeights` that is refused: `tensor`, `index` into it, `value`, `allowed`."""

    def __init__(
        self,
        message: str,
        *,
        tensor: str = "",
        index: tuple[int, ...] = (),
        value: float = math.nan,
        allowed: str = "",
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.index = index
        self.value = value
        self.allowed = allowed


def check_ownership(weights: MoEWeights) -> None:
    """Parallel mode, rank, expert ids and the parts' sizes."""
    w = weights
    for name in ("num_experts", "hidden", "intermediate", "num_ranks"):
        check_int(name, getattr(w, name), 1)
    check_int("rank", w.rank, 0)
    check_kind("expert_ids", w.expert_ids, tuple, "a tuple of ints")
    for expert_id in w.expert_ids:
        check_kind("expert_ids", expert_id, int, "a tuple of ints")
    if w.parallel not in ("ep", "tp"):
        raise MoEEpConfigError(f"parallel must be 'ep' or 'tp', got {w.parallel!r}")
    if not 0 <= w.rank < w.num_ranks:
        raise MoEEpConfigError(f"rank must be 0 to {w.num_ranks - 1}, got {w.rank}")
    ids = w.expert_ids
    if len(set(ids)) != len(ids) or not all(0 <= i < w.num_experts for i in ids):
        raise MoEEpConfigError(
            f"expert_ids must be different ids below num_experts {w.num_experts}, got {ids}"
        )
    if w.parallel == "tp" and len(ids) != w.num_experts:
        raise MoEEpConfigError(
            f"tp holds a part of every expert: expert_ids must be all {w.num_experts}, "
            f"got {len(ids)}"
        )
    if w.parallel == "tp" and w.rank > 0 and w.b2 is not None:
        raise MoEEpConfigError(
            f"b2 must be None on tp rank {w.rank}: rank 0 alone holds it, so that it is added once"
        )
    k_multiple = weight_format(w.weights_format).k_multiple
    if w.hidden % k_multiple:
        raise MoEEpConfigError(
            f"hidden {w.hidden} must be a multiple of {k_multiple} in {w.weights_format}"
        )
    parts = w.num_ranks if w.parallel == "tp" else 1
    if w.intermediate % (parts * k_multiple):
        raise MoEEpConfigError(
            f"intermediate {w.intermediate} must be a multiple of {parts * k_multiple} in "
            f"{w.weights_format} over {parts} tp ranks"
        )


def check_tensors(weights: MoEWeights) -> None:
    """Presence, shape, dtype, device and layout of every tensor."""
    check_kind("w13", weights.w13, torch.Tensor, "a tensor")
    for name, (shape, dtypes) in _expected_tensors(weights).items():
        tensor = getattr(weights, name)
        if dtypes is None:
            if tensor is not None:
                raise MoEEpConfigError(
                    f"{name} must be None for {weights.weights_format} weights with "
                    f"is_gated={weights.is_gated}"
                )
        elif tensor is not None:
            _check_tensor(name, tensor, shape, dtypes, weights.device)
        elif name not in ("b13", "b2"):
            raise MoEEpConfigError(
                f"{name} is missing; {weights.weights_format} weights need it, shape {shape}"
            )


def _expected_tensors(weights: MoEWeights) -> Expected:
    """Tensor name -> (shape, allowed dtypes), dtypes None where it must be absent."""
    w = weights
    e, rows, h, i_r = w.num_local_experts, w.fc1_rows, w.hidden, w.local_intermediate
    fmt = weight_format(w.weights_format)
    codes_per_byte = 2 if fmt.bits == 4 else 1
    codes = (_CODE_DTYPES[fmt.name],)
    sf = (_SF_DTYPES[fmt.name],) if fmt.sf_bits else None
    scale = (torch.float32,) if fmt.has_global_scale else None
    bias = (torch.float32, torch.bfloat16)

    def sf_shape(num_rows: int, num_cols: int, num_halves: int) -> tuple[int, int, int]:
        if not fmt.sf_bits:
            return (0, 0, 0)
        row_blocks = num_halves * -(-(num_rows // num_halves) // fmt.sf_rows)
        return (e, row_blocks, -(-num_cols // fmt.sf_cols))

    return {
        "w13": ((e, rows, h // codes_per_byte), codes),
        "w2": ((e, h, i_r // codes_per_byte), codes),
        "w13_sf": (sf_shape(rows, h, w.num_halves), sf),
        "w2_sf": (sf_shape(h, i_r, 1), sf),
        "gate_scale": ((e,), scale if w.is_gated else None),
        "up_scale": ((e,), scale),
        "down_scale": ((e,), scale),
        "b13": ((e, rows), bias),
        "b2": ((e, h), bias),
    }


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    check_kind(name, tensor, torch.Tensor, "a tensor")
    if tuple(tensor.shape) != shape:
        raise MoEEpConfigError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise MoEEpConfigError(f"{name} must be {allowed}, got {tensor.dtype}")
    if tensor.device != device:
        raise MoEEpConfigError(f"{name} is on {tensor.device}, w13 on {device}; use one device")
    if shape[0] and tensor.dim() > 1 and not tensor[0].is_contiguous():
        raise MoEEpConfigError(
            f"{name} must be row-major within an expert (any stride over the experts), got strides "
            f"{tensor.stride()} for shape {shape}"
        )


def check_scales(weights: MoEWeights) -> None:
    """Every scale finite and of a sign and size that decodes exactly."""
    for name in ("gate_scale", "up_scale", "down_scale"):
        scale = getattr(weights, name)
        if scale is not None:
            _refuse(weights, name, ~(torch.isfinite(scale) & (scale > 0)), "finite and above 0")
    if weights.w13_sf is None:
        return
    for name in ("w13", "w2"):
        sf = getattr(weights, f"{name}_sf")
        for local_expert_idx in range(weights.num_local_experts):
            sf_e = sf[local_expert_idx]
            is_bad, allowed = _bad_scales(
                weights.weights_format, sf_e, getattr(weights, name)[local_expert_idx]
            )
            _refuse(weights, f"{name}_sf", is_bad, allowed, local_expert_idx)


def _bad_scales(
    format_name: str, sf: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, str]:
    """Which scale factors of one matrix are refused, and what is allowed."""
    if format_name == "fp8_block":
        return ~(torch.isfinite(sf) & (sf > 0)), "finite and above 0"
    if format_name == "nvfp4":
        # 0 is a block that underflowed; -0 is harmless.
        byte = sf.view(torch.uint8)
        return ((byte & 0x7F) == 0x7F) | (byte > 0x80), "finite and not negative"
    below, above = _RISKY_BYTES[format_name]
    is_bad = (sf < below) | (sf > above)
    if is_bad.any():
        rows, blocks = is_bad.nonzero(as_tuple=True)
        is_bad[rows, blocks] = ~_products_are_exact(codes, sf, rows, blocks)
    return is_bad, "an E8M0 byte whose products with its block's codes are exact in BF16"


def _products_are_exact(
    codes: torch.Tensor, sf: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """For each named block of a matrix: whether BF16 holds every code times the scale factor."""
    block_codes = codes.view(codes.shape[0], sf.shape[1], -1)[rows, blocks]
    q = decode_e2m1(block_codes) if codes.dtype == torch.uint8 else block_codes.float()
    products = q.double() * decode_e8m0(sf[rows, blocks]).double()[:, None]
    return (products.to(torch.bfloat16).double() == products).all(dim=1)


def _refuse(
    weights: MoEWeights,
    name: str,
    is_bad: torch.Tensor,
    allowed: str,
    local_expert_idx: int | None = None,
) -> None:
    """Raises for the first bad scale, naming tensor, expert and index."""
    if not is_bad.any():
        return
    index = tuple(is_bad.nonzero()[0].tolist())
    if local_expert_idx is None:
        local_expert_idx = index[0]
    else:
        index = (local_expert_idx, *index)
    value = getattr(weights, name)[index].float().item()
    raise BadScaleError(
        f"{name}{list(index)} of expert {weights.expert_ids[local_expert_idx]} is "
        f"{value}; it must be {allowed}",
        tensor=name,
        index=index,
        value=value,
        allowed=allowed,
    )

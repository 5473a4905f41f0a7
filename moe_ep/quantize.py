"""Quantising whole tensors and back: nvfp4, mxfp4, mxfp8 and FP8 blocks (`quant_chains` has the
arithmetic, `QuantSpec` the choices)."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import TypeVar

import torch

from moe_ep.arguments import check_float_dtype, check_kind
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.number_formats import decode_e2m1, decode_e8m0
from moe_ep.progress import progress_bar
from moe_ep.quant_chains import Nvfp4Scales, block_amax, encode_blocks, encode_nvfp4
from moe_ep.quant_spec import BLOCKS, QuantizedTensor, QuantSpec

__all__ = [
    "BLOCKS",
    "QuantSpec",
    "QuantizedTensor",
    "dequantize",
    "expand_sf",
    "qdq",
    "quantize",
    "unscaled",
]

T = TypeVar("T")
_ELEMENTS_PER_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # CPU: FP32 copies of 1 MiB stay in cache
_MAX_WORKERS = 16  # each needs about 6 MiB
_PROGRESS_ELEMENTS = 1 << 28  # about a second


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

    Works through chunks of rows: on CPU the memory beside input and result is a few MiB a thread.
    `out` is written if given. `advance` is called with the number of elements done; without it a
    large tensor shows a progress bar.

    Raises `MoEEpConfigError`, naming the tensor, for a dtype or K that the format does not take and
    for NaN or Inf unless `allow_nonfinite`.
    """
    spec = spec if isinstance(spec, QuantSpec) else QuantSpec(format=spec)
    _check(w, spec, name)
    check_kind("allow_nonfinite", allow_nonfinite, bool, "a bool")
    w = w.detach()
    if out is None:
        out = QuantizedTensor.empty(tuple(w.shape), spec, w.device)
    check_kind("out", out, QuantizedTensor, "a QuantizedTensor")
    if (out.spec, out.shape, out.codes.device) != (spec, tuple(w.shape), w.device):
        raise MoEEpConfigError(
            f"out is of {out.spec}, shape {out.shape}, on {out.codes.device}; allowed: {spec}, "
            f"{tuple(w.shape)}, on {w.device}"
        )
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
    """[..., N, K] of `dtype`: q * s (exact in FP32), times the global scale.

    FP64 rounds nowhere, FP32 at the FP32 scale, narrower types once more.
    """
    check_kind("q", q, QuantizedTensor, "a QuantizedTensor")
    check_float_dtype(dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.codes.device)
    for index in product(*map(range, q.shape[:-2])):
        matrix, out_NK = q.matrix(index), out[index]
        decode = partial(_dequantize_rows, matrix, out_NK)
        _map_row_chunks(decode, out_NK, BLOCKS[q.spec.format][0])
    return out


def _dequantize_rows(q: QuantizedTensor, out_NK: torch.Tensor, rows: slice) -> None:
    """Writes some rows of one matrix, whole blocks; FP64 where asked, else by way of FP32."""
    wide = torch.float64 if out_NK.dtype == torch.float64 else torch.float32
    block_rows, block_cols = BLOCKS[q.spec.format]
    codes = q.codes[rows]
    sf = q.sf[rows.start // block_rows : math.ceil(rows.stop / block_rows)]
    values = unscaled(codes, sf, q.spec.format).to(wide)
    if q.spec.format.startswith("fp8"):
        values *= expand_sf(sf, values.shape, (block_rows, block_cols))
    if q.global_scale is not None:
        scale = q.global_scale.to(wide)
        scale = scale if q.spec.global_scale == "decode" else scale.reciprocal()
        values *= scale[rows, None] if q.spec.per_token else scale
    out_NK[rows] = values


def qdq(
    x: torch.Tensor,
    spec: QuantSpec | str,
    *,
    name: str = "tensor",
    allow_nonfinite: bool = False,
) -> torch.Tensor:
    """What x [..., N, K] becomes when quantised and decoded, in x's dtype; for training.

    The gradient passes straight through, as if nothing were rounded. Arguments and errors as
    `quantize`.
    """
    return _StraightThrough.apply(x, spec, name, allow_nonfinite)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object, x: torch.Tensor, spec: QuantSpec | str, name: str, allow_nonfinite: bool
    ) -> torch.Tensor:
        q = quantize(
            x, spec, name=name, allow_nonfinite=allow_nonfinite, advance=lambda num_done: None
        )
        return dequantize(q, x.dtype)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad, None, None, None


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


def element_progress(
    description: str, num_elements: int
) -> AbstractContextManager[Callable[[int], object]]:
    """A `progress_bar` over elements, drawn when there are enough to wait for."""
    return progress_bar(description, num_elements, is_shown=num_elements >= _PROGRESS_ELEMENTS)


def _check(w: torch.Tensor, spec: QuantSpec, name: str) -> None:
    check_kind(name, w, torch.Tensor, "a tensor")
    if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise MoEEpConfigError(f"{name} must be BF16, FP16 or FP32 to quantise, got {w.dtype}")
    if w.is_meta:
        raise MoEEpConfigError(f"{name} is on meta; allowed: a tensor with values")
    if w.dim() < 2:
        raise MoEEpConfigError(f"{name} must be [..., N, K], got shape {tuple(w.shape)}")
    block_cols = BLOCKS[spec.format][1]
    if not spec.format.startswith("fp8") and w.shape[-1] % block_cols:
        raise MoEEpConfigError(
            f"{name} has {w.shape[-1]} columns; {spec.format} takes multiples of {block_cols}"
        )


def _map_row_chunks(work: Callable[[slice], T], w_NK: torch.Tensor, block_rows: int) -> list[T]:
    """work(rows) for slices of whole blocks of rows, `_ELEMENTS_PER_CHUNK` elements each.

    On CPU as many chunks run at a time as torch has threads, each on one thread: a chunk takes a
    score of short operations, and splitting every one of them would wait at as many barriers.
    """
    budget = _ELEMENTS_PER_CHUNK.get(w_NK.device.type, _ELEMENTS_PER_CHUNK["cuda"])
    step = max(1, budget // max(1, block_rows * w_NK.shape[1])) * block_rows
    num_rows = w_NK.shape[0]
    chunks = [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
    num_threads = torch.get_num_threads()
    num_workers = min(num_threads, len(chunks), _MAX_WORKERS)
    if w_NK.device.type != "cpu" or num_workers <= 1:
        return [work(rows) for rows in chunks]

    is_inference = torch.is_inference_mode_enabled()

    def work_in_thread(rows: slice) -> T:
        with torch.inference_mode(is_inference):
            return work(rows)

    try:
        with ThreadPoolExecutor(num_workers, initializer=lambda: torch.set_num_threads(1)) as pool:
            return list(pool.map(work_in_thread, chunks))
    finally:
        torch.set_num_threads(num_threads)  # the workers' setting is also that of later threads


def _quantize_nvfp4(
    w_NK: torch.Tensor, out: QuantizedTensor, advance: Callable[[int], object]
) -> torch.Tensor:
    """Writes one matrix; returns its largest magnitude."""
    spec = out.spec
    amaxes = _map_row_chunks(lambda rows: block_amax(w_NK[rows].contiguous(), 16), w_NK, 1)
    amax_NB = torch.cat(amaxes) if amaxes else w_NK.new_empty(out.sf.shape)
    # A NaN must not reach the other blocks through the global scale.
    finite_NB = torch.where(amax_NB.isnan(), 0, amax_NB).float()
    amax = finite_NB.amax(dim=1, keepdim=True) if spec.per_token else _largest(finite_NB)
    scales = Nvfp4Scales.from_amax(amax, spec.sf_max)
    stated = scales.decode if spec.global_scale == "decode" else scales.encode
    out.global_scale.copy_(stated.view(out.global_scale.shape))

    def encode(rows: slice) -> None:
        x_NBk = w_NK[rows].contiguous().view(-1, amax_NB.shape[1], 16)
        codes, sf = encode_nvfp4(x_NBk, amax_NB[rows].float(), scales.rows(rows), spec)
        out.codes[rows] = codes.flatten(1)
        out.sf[rows] = sf
        advance(x_NBk.numel())

    _map_row_chunks(encode, w_NK, 1)
    return _largest(amax_NB)


def _largest(amax: torch.Tensor) -> torch.Tensor:
    """FP32 scalar; NaN if there is one; 0 for an empty tensor."""
    return (
        amax.max().float()
        if amax.numel()
        else torch.zeros((), dtype=torch.float32, device=amax.device)
    )


def _quantize_blocks(
    w_NK: torch.Tensor, out: QuantizedTensor, advance: Callable[[int], object]
) -> torch.Tensor:
    """Writes one matrix in an mx or fp8 format; returns its largest magnitude."""
    spec = out.spec
    num_cols = w_NK.shape[1]
    block_rows, block_cols = BLOCKS[spec.format]

    def encode(rows: slice) -> torch.Tensor:
        x_nK = w_NK[rows]
        num_rows = len(x_nK)
        padding = (0, -num_cols % block_cols, 0, -num_rows % block_rows)
        x_nK = torch.nn.functional.pad(x_nK, padding) if any(padding) else x_nK.contiguous()
        amax_nB = block_amax(x_nK, block_cols)
        amax_BB = amax_nB.view(-1, block_rows, amax_nB.shape[1]).amax(dim=1).float()
        x_BrBk = x_nK.view(-1, block_rows, amax_nB.shape[1], block_cols)
        codes, sf = encode_blocks(x_BrBk, amax_BB, spec)
        out.codes[rows] = codes.view(len(x_nK), -1)[:num_rows, : out.codes.shape[1]]
        out.sf[rows.start // block_rows : math.ceil(rows.stop / block_rows)] = sf
        advance(num_rows * num_cols)
        return _largest(amax_nB)

    largest = _map_row_chunks(encode, w_NK, block_rows)
    return (
        torch.stack(largest).max()
        if largest
        else torch.zeros((), dtype=torch.float32, device=w_NK.device)
    )

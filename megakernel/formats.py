"""Prepared weights: the checkpoint's numbers in the order in which the kernels read them.

`tiles.py` says how numbers lie in a tile. Everything is exact: `restore` gives back the
checkpoint's bytes. Only codes under a zero scale factor come back as zero, and a scale factor byte
is re-coded without loss:

    nvfp4    E4M3 s      -> (bits of bf16(s * 2^119) - 0x7000) >> 4, 0 for s = 0; alpha * 2^7
    mx*      E8M0 b      -> b - largest b of the matrix + 254; alpha * 2^(largest b - constant)
"""

import functools
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import weight_format
from moe_ep.megakernel.tiles import (
    BLOCK_TILES,
    E8M0_WINDOW,
    TILE_COLS,
    TILE_FORMATS,
    TileFormat,
    codes_from_tiles,
    codes_to_tiles,
    num_slabs,
    row_order,
    sf_from_tiles,
    sf_to_tiles,
)

# Below this many bytes preparation is over before a progress bar could be read.
PROGRESS_MIN_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedWeights:
    """Weights of a rank's experts as the kernels take them.

    w13, w2              uint8 [e, bytes]
    w13_alpha, w2_alpha  FP32 [e, 2], scale of the accumulator for gate and for up (w2: twice)
    b13, b2              FP32 [e, fc1_rows], [e, H] or None
    """

    weights_format: str
    hidden: int
    intermediate: int
    is_gated: bool
    w13: torch.Tensor
    w2: torch.Tensor
    w13_alpha: torch.Tensor
    w2_alpha: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None

    @property
    def num_local_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def num_bytes(self) -> int:
        tensors = (self.w13, self.w2, self.w13_alpha, self.w2_alpha, self.b13, self.b2)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def prepare(weights, out: PreparedWeights | None = None) -> PreparedWeights:
    """`MoEWeights` -> prepared weights on the same device; `out` given is overwritten in place.

    Works expert by expert: beside source and result it needs a few times one expert's matrix.
    Raises `MoEEpConfigError` for FP8 NaN codes and for E8M0 scale factors more than 2^131 apart in
    one matrix, naming tensor and index, and for an `out` of another shape or format.
    """
    fmt = TILE_FORMATS[weight_format(weights.weights_format).name]
    num_experts, num_halves = weights.num_local_experts, 2 if weights.is_gated else 1
    sizes = {
        "w13": fmt.matrix_bytes(weights.fc1_rows, weights.hidden, is_paired=weights.is_gated),
        "w2": fmt.matrix_bytes(weights.hidden, weights.local_intermediate, is_paired=False),
    }
    if out is None:
        out = _empty(weights, sizes)
    elif (out.weights_format, out.w13.shape, out.w2.shape, out.is_gated) != (
        fmt.name,
        (num_experts, sizes["w13"]),
        (num_experts, sizes["w2"]),
        weights.is_gated,
    ):
        raise MoEEpConfigError(
            f"out holds {out.weights_format} {tuple(out.w13.shape)} {tuple(out.w2.shape)}; the "
            f"weights need {fmt.name} {(num_experts, sizes['w13'])} {(num_experts, sizes['w2'])}"
        )
    is_long = num_experts * sum(sizes.values()) >= PROGRESS_MIN_BYTES
    experts = track(
        range(num_experts),
        "preparing weights",
        console=Console(stderr=True),
        transient=True,
        disable=not is_long,
    )
    global_scales = {
        "w13": (weights.gate_scale, weights.up_scale),
        "w2": (weights.down_scale, weights.down_scale),
    }
    for expert in experts:
        for name, halves in (("w13", num_halves), ("w2", 1)):
            sf = getattr(weights, f"{name}_sf")
            matrix = _Matrix(
                fmt,
                getattr(weights, name)[expert],
                None if sf is None else sf[expert],
                f"{name}[{expert}]",
                num_halves=halves,
            )
            tiles, alpha_log2 = matrix.tiles()
            getattr(out, name)[expert] = tiles.reshape(-1)
            alpha = getattr(out, f"{name}_alpha")
            for half, scale in enumerate(global_scales[name]):
                alpha[expert, half] = 2.0**alpha_log2 if scale is None else scale[expert]
                if scale is not None:
                    alpha[expert, half] *= 2.0**alpha_log2
    for name in ("b13", "b2"):
        if getattr(out, name) is not None:
            getattr(out, name).copy_(getattr(weights, name))
    return out


def _empty(weights, sizes: dict[str, int]) -> PreparedWeights:
    num_experts, device = weights.num_local_experts, weights.w13.device

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    return PreparedWeights(
        weights_format=weights.weights_format,
        hidden=weights.hidden,
        intermediate=weights.local_intermediate,
        is_gated=weights.is_gated,
        w13=empty(num_experts, sizes["w13"], dtype=torch.uint8),
        w2=empty(num_experts, sizes["w2"], dtype=torch.uint8),
        w13_alpha=empty(num_experts, 2),
        w2_alpha=empty(num_experts, 2),
        b13=None if weights.b13 is None else empty(*weights.b13.shape),
        b2=None if weights.b2 is None else empty(*weights.b2.shape),
    )


def restore(
    prepared: torch.Tensor,
    weights_format: str,
    num_rows: int,
    num_cols: int,
    *,
    is_paired: bool,
    max_e8m0: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inverse of `prepare` for one expert's matrix: codes [N, K..] and scale factors or None.

    `max_e8m0` (mx formats) is the largest scale byte of the matrix, log2(alpha) - alpha_log2 of
    the format. The scale factors of fp8_block come back as FP32 [N, ceil(K / 128)], one per row.
    """
    fmt = TILE_FORMATS[weights_format]
    order = row_order(num_rows, is_paired=is_paired).to(prepared.device)
    slabs = num_slabs(num_cols)
    tiles = prepared.view(-1, slabs, BLOCK_TILES, fmt.tile_bytes)
    tiles = tiles.movedim(1, 2).flatten(0, 1)  # [tiles, slabs, bytes]
    codes = codes_from_tiles(tiles[..., : fmt.code_bytes], fmt)
    sf = None
    if fmt.num_tile_sf:
        factors = tiles[..., fmt.code_bytes :].contiguous().view(torch.float32)[..., :2]
        sf = factors.unflatten(-1, (1, 2, 1)).expand(-1, -1, 4, -1, 8)
        sf = sf.permute(0, 2, 3, 4, 1).reshape(-1, slabs)
    elif fmt.sf_cols:
        sf = sf_from_tiles(tiles[..., fmt.code_bytes :], fmt)
        sf = _decode_sf(sf, fmt, max_e8m0)
    rows = torch.empty(num_rows, dtype=torch.long, device=prepared.device)
    is_real = order >= 0
    rows[order[is_real]] = torch.arange(len(order), device=prepared.device)[is_real]
    row_bytes = num_cols * fmt.code_bits // 8
    codes = codes[rows][:, :row_bytes].contiguous()
    if sf is not None:
        sf = sf[rows]
        if fmt.sf_cols:
            sf = sf[:, : -(-num_cols // fmt.sf_cols)].contiguous()
    dtype = {4: torch.uint8, 8: torch.float8_e4m3fn, 16: torch.bfloat16}[fmt.code_bits]
    return codes.view(dtype), sf


@dataclass(frozen=True)
class _Matrix:
    """One expert's matrix on its way into tiles."""

    fmt: TileFormat
    codes: torch.Tensor  # [N, K] (4-bit: uint8 [N, K / 2], low nibble = even k)
    sf: torch.Tensor | None
    label: str
    num_halves: int

    def tiles(self) -> tuple[torch.Tensor, int]:
        """uint8 [blocks, slabs, 4, tile bytes] and log2 of the accumulator's extra scale."""
        fmt = self.fmt
        order = row_order(self.codes.shape[0], is_paired=self.num_halves == 2)
        order = order.to(self.codes.device)
        if fmt.code_bits == 8:
            self._refuse((self.codes.view(torch.uint8) & 0x7F) == 0x7F, "", "is a NaN code")
        codes = self.codes if fmt.code_bits == 4 else self.codes.contiguous()
        codes = _gather_rows(codes.view(torch.uint8), order, TILE_COLS * fmt.code_bits // 8)
        alpha_log2 = fmt.alpha_log2
        parts = []
        if fmt.num_tile_sf:
            parts = [self._tile_sf(order)]
        elif fmt.sf_cols:
            sf, is_zero, alpha_log2 = self._coded_sf()
            sf = _gather_rows(sf, order, TILE_COLS // fmt.sf_cols)
            is_zero = _gather_rows(is_zero, order, TILE_COLS // fmt.sf_cols)
            if bool(is_zero.any()):
                sf_bytes = fmt.sf_cols * fmt.code_bits // 8
                codes = codes.masked_fill(is_zero.repeat_interleave(sf_bytes, 1), 0)
            parts = [sf_to_tiles(sf, fmt)]
        tiles = torch.cat([codes_to_tiles(codes, fmt), *parts], -1)
        return tiles.unflatten(0, (-1, BLOCK_TILES)).movedim(1, 2), alpha_log2

    def _coded_sf(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Re-coded scale bytes [N, K / sf_cols], which of them decode to zero, alpha's log2."""
        fmt, sf = self.fmt, self.sf.contiguous().view(torch.uint8)
        if fmt.name == "nvfp4":
            table = _nvfp4_sf_codes().to(sf.device)
            return table[sf.int()], (sf & 0x7F) == 0, fmt.alpha_log2
        largest = int(sf.max())
        low = largest - E8M0_WINDOW[fmt.name]
        is_outside = sf.int() < low
        if bool(is_outside.any()):
            # Under a scale that small only zero codes may stand.
            codes = self.codes.contiguous().view(torch.uint8)
            magnitude = 0x77 if fmt.code_bits == 4 else 0x7F
            bytes_per_sf = fmt.sf_cols * fmt.code_bits // 8
            is_used = (codes & magnitude).unflatten(1, (-1, bytes_per_sf)).any(-1)
            self._refuse(
                is_outside & is_used,
                "_sf",
                f"is too far below the matrix's largest, {largest}; allowed: from {low} on",
            )
        coded = (sf.int() + (254 - largest)).clamp_(min=0).to(torch.uint8)
        return coded, torch.zeros_like(sf, dtype=torch.bool), largest + fmt.alpha_log2

    def _tile_sf(self, order: torch.Tensor) -> torch.Tensor:
        """fp8_block: FP32 [halves * ceil(n / 128), ceil(K / 128)] -> bytes [tiles, slabs, 16]."""
        sf = self.sf.float()
        rows = self.codes.shape[0] // self.num_halves
        sf = (
            sf.unflatten(0, (self.num_halves, -1)).repeat_interleave(128, 1)[:, :rows].flatten(0, 1)
        )
        # Rows of one tile and half share a 128-row block: the first of them stands for all.
        order = order.view(-1, 4, 2, 8)[:, 0, :, 0]  # [tiles, 2]
        tile_sf = torch.zeros(order.shape[0], sf.shape[1], 4, dtype=torch.float32, device=sf.device)
        tile_sf[..., :2] = (sf[order.clamp(min=0)] * (order >= 0)[..., None]).movedim(1, 2)
        return tile_sf.view(torch.uint8)

    def _refuse(self, is_bad: torch.Tensor, suffix: str, what: str) -> None:
        if bool(is_bad.any()):
            index = [int(i) for i in is_bad.nonzero()[0]]
            name, expert = self.label.rstrip("]").split("[")
            raise MoEEpConfigError(f"{name}{suffix}{[int(expert), *index]} {what}")


def _gather_rows(x: torch.Tensor, order: torch.Tensor, col_multiple: int) -> torch.Tensor:
    """Rows of `x` in `order` (-1: zeros), columns zero-padded to a multiple."""
    rows = x.index_select(0, order.clamp(min=0))
    rows.masked_fill_((order < 0)[:, None], 0)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % col_multiple))


def _decode_sf(coded: torch.Tensor, fmt: TileFormat, max_e8m0: int | None) -> torch.Tensor:
    """Coded scale bytes -> the checkpoint's."""
    if fmt.name != "nvfp4":
        return (coded.int() - 254 + max_e8m0).clamp_(min=0).to(torch.uint8)
    inverse = torch.zeros(256, dtype=torch.uint8, device="cpu")
    inverse[_nvfp4_sf_codes()[:0x7F].long()] = torch.arange(0x7F, dtype=torch.uint8, device="cpu")
    return inverse.to(coded.device)[coded.int()].view(torch.float8_e4m3fn)


@functools.cache
def _nvfp4_sf_codes() -> torch.Tensor:
    """uint8 [256]: E4M3 byte -> code c with bf16 bits 0x7000 | c << 4 == s * 2^119.

    The exponent field of s * 2^119 always begins with 111, so eight bits hold the rest.
    """
    sf = torch.arange(0x7F, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    bits = (sf * 2.0**119).to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    codes = torch.zeros(256, dtype=torch.uint8, device="cpu")
    codes[:0x7F] = torch.where(sf == 0, 0, (bits - 0x7000) >> 4).to(torch.uint8)
    return codes

"""Prepared weights: the checkpoint's numbers in the order in which the kernels read them.

A weight matrix [N, K] is cut into tiles of 64 rows x 128 columns, the operand of one warpgroup for
one K slab. Four tiles (256 rows) make a block:

    prepared matrix   [blocks, K slabs, 4 tiles, bytes of a tile]
    tile              codes in register order, then its block scale factors

Register order: 16 bytes of thread t (warp w, g = lane / 4, q = lane % 4) hold 1, 2 or 4 k16 steps
of WGMMA's A fragment: registers a0..a3 = (row g, k 2q..2q+1), (row g + 8, same k), (row g, k + 8),
(row g + 8, k + 8). Below 16 bits the bits of every 8 bytes are permuted so that few instructions
bring a pair of codes to where the exponent and mantissa of two BF16 numbers sit (`decode.py`).

Rows are permuted inside a tile: in a gated FC1 row g of a 16-row group is the gate and row g + 8
the up row of one channel, so that a thread holds the pair; elsewhere the rows make a thread's
output channels contiguous. N is padded to 256 rows (gated: 128 channels) and K to 128 columns with
zero codes.

Everything is exact: `restore` gives back the checkpoint's bytes. Only codes under a zero scale
factor come back as zero, and a scale factor byte is re-coded without loss:

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

TILE_ROWS = 64
TILE_COLS = 128
BLOCK_TILES = 4
BLOCK_ROWS = TILE_ROWS * BLOCK_TILES
# Below this many bytes preparation is over before a progress bar could be read.
PROGRESS_MIN_BYTES = 1 << 30


@dataclass(frozen=True)
class TileFormat:
    """How one weight format lies in a tile.

    code_bits     of one element
    sf_cols       columns that share a scale byte in the tile; 0: no scale bytes
    sf_shift      bits by which a decoded scale's low end stands above bit 0 of its half word
    num_tile_sf   FP32 scale factors of a tile (rows g, rows g + 8), padded to 16 bytes
    alpha_log2    log2 of the constant that decoding leaves to the accumulator's scale
    """

    name: str
    code_bits: int
    sf_cols: int = 0
    sf_shift: int = 0
    num_tile_sf: int = 0
    alpha_log2: int = 0

    @property
    def code_bytes(self) -> int:
        return TILE_ROWS * TILE_COLS * self.code_bits // 8

    @property
    def sf_bytes(self) -> int:
        if self.num_tile_sf:
            return 16
        return TILE_ROWS * TILE_COLS // self.sf_cols if self.sf_cols else 0

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + self.sf_bytes

    @property
    def steps_per_load(self) -> int:
        """k16 steps in one 16-byte load of a thread."""
        return 16 // self.code_bits

    def matrix_bytes(self, num_rows: int, num_cols: int, *, is_paired: bool) -> int:
        """Prepared bytes of one expert's [num_rows, num_cols] matrix."""
        blocks, slabs = num_blocks(num_rows, is_paired=is_paired), num_slabs(num_cols)
        return blocks * slabs * BLOCK_TILES * self.tile_bytes


TILE_FORMATS = {
    "nvfp4": TileFormat("nvfp4", 4, sf_cols=16, sf_shift=4, alpha_log2=7),
    "mxfp4": TileFormat("mxfp4", 4, sf_cols=32, sf_shift=7, alpha_log2=-128),
    "mxfp8": TileFormat("mxfp8", 8, sf_cols=32, sf_shift=7, alpha_log2=-134),
    "fp8_block": TileFormat("fp8_block", 8, num_tile_sf=2),
    "bf16": TileFormat("bf16", 16),
}
# Widest spread below the largest byte of a matrix that the re-coded byte keeps exact.
E8M0_WINDOW = {"mxfp4": 133, "mxfp8": 131}


def num_blocks(num_rows: int, *, is_paired: bool) -> int:
    """256-row blocks of a matrix; a paired one (gate and up) pads each half to 128 channels."""
    if is_paired:
        return -(-num_rows // 2 // (BLOCK_ROWS // 2))
    return -(-num_rows // BLOCK_ROWS)


def num_slabs(num_cols: int) -> int:
    return -(-num_cols // TILE_COLS)


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
    codes = _codes_from_tiles(tiles[..., : fmt.code_bytes], fmt)
    sf = None
    if fmt.num_tile_sf:
        factors = tiles[..., fmt.code_bytes :].contiguous().view(torch.float32)[..., :2]
        sf = factors.unflatten(-1, (1, 2, 1)).expand(-1, -1, 4, -1, 8)
        sf = sf.permute(0, 2, 3, 4, 1).reshape(-1, slabs)
    elif fmt.sf_cols:
        sf = _sf_from_tiles(tiles[..., fmt.code_bytes :], fmt)
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


@functools.cache
def row_order(num_rows: int, *, is_paired: bool) -> torch.Tensor:
    """Source row of every prepared row [256 * blocks], -1 for padding.

    Prepared row 64 T + 16 w + 8 r + g holds
      paired   channel 32 T + 8 w + g, of the gate half for r = 0 and the up half for r = 1
      plain    channel 64 T + 16 w + 4 (g // 2) + 2 r + g % 2
    """
    tiles = num_blocks(num_rows, is_paired=is_paired) * BLOCK_TILES
    tile, warp, half, g = torch.meshgrid(
        *(torch.arange(n) for n in (tiles, 4, 2, 8)), indexing="ij"
    )
    if is_paired:
        num_channels = num_rows // 2
        channel = 32 * tile + 8 * warp + g
        row = half * num_channels + channel
    else:
        num_channels = num_rows
        channel = 64 * tile + 16 * warp + 4 * (g // 2) + 2 * half + g % 2
        row = channel
    return torch.where(channel < num_channels, row, -1).flatten()


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
            parts = [_sf_to_tiles(sf, fmt)]
        tiles = torch.cat([_codes_to_tiles(codes, fmt), *parts], -1)
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
        tile_sf = torch.zeros(order.shape[0], sf.shape[1], 4, device=sf.device)
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


def _codes_to_tiles(codes: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    """uint8 [rows, bytes] in prepared row order -> [tiles, slabs, code bytes]."""
    pair = fmt.code_bits // 4  # bytes of two adjacent elements
    steps = fmt.steps_per_load
    # tile, warp, row half, g, slab, load, step, k half, quad lane, bytes of a pair
    x = codes.view(-1, 4, 2, 8, codes.shape[1] // (64 * pair), 8 // steps, steps, 2, 4, pair)
    x = x.permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9).contiguous()
    if fmt.code_bits < 16:
        x = _permute_bits(x.view(-1, 8), _code_bits(fmt.code_bits))
    return x.reshape(codes.shape[0] // TILE_ROWS, -1, fmt.code_bytes)


def _codes_from_tiles(tiles: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    pair = fmt.code_bits // 4
    steps = fmt.steps_per_load
    num_tiles, slabs, _ = tiles.shape
    x = tiles.reshape(-1, 8)
    if fmt.code_bits < 16:
        x = _permute_bits(x, _inverse(_code_bits(fmt.code_bits)))
    x = x.reshape(num_tiles, slabs, 8 // steps, 4, 8, 4, steps, 2, 2, pair)
    x = x.permute(0, 3, 8, 4, 1, 2, 6, 7, 5, 9)
    return x.reshape(num_tiles * TILE_ROWS, -1)


def _sf_to_tiles(sf: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    """Coded bytes [rows, K / sf_cols] -> [tiles, slabs, sf bytes].

    Of a quad (rows g and g + 8) one word holds two neighbours along K:
    byte 0 (first, row g), 1 (second, row g + 8), 2 (first, row g + 8), 3 (second, row g), rotated
    left by `sf_shift`: two masks, one of them after a rotation by 8, give a pair each.
    """
    per_slab = TILE_COLS // fmt.sf_cols
    x = sf.view(-1, 4, 2, 8, sf.shape[1] // per_slab, per_slab // 2, 2)
    x = x.permute(0, 4, 1, 3, 5, 6, 2)  # tile, slab, warp, g, word, neighbour, row half
    words = torch.stack([x[..., 0, 0], x[..., 1, 1], x[..., 0, 1], x[..., 1, 0]], -1)
    words = _permute_bits(words.reshape(-1, 8), _rotation(fmt.sf_shift))
    return words.reshape(sf.shape[0] // TILE_ROWS, -1, fmt.sf_bytes)


def _sf_from_tiles(tiles: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    per_slab = TILE_COLS // fmt.sf_cols
    num_tiles, slabs, _ = tiles.shape
    words = _permute_bits(tiles.reshape(-1, 8), _inverse(_rotation(fmt.sf_shift)))
    words = words.reshape(num_tiles, slabs, 4, 8, per_slab // 2, 4)
    first = torch.stack([words[..., 0], words[..., 2]], -1)
    second = torch.stack([words[..., 3], words[..., 1]], -1)
    x = torch.stack([first, second], -2)  # tile, slab, warp, g, word, neighbour, row half
    return x.permute(0, 2, 6, 3, 1, 4, 5).reshape(num_tiles * TILE_ROWS, slabs * per_slab)


def _decode_sf(coded: torch.Tensor, fmt: TileFormat, max_e8m0: int | None) -> torch.Tensor:
    """Coded scale bytes -> the checkpoint's."""
    if fmt.name != "nvfp4":
        return (coded.int() - 254 + max_e8m0).clamp_(min=0).to(torch.uint8)
    inverse = torch.zeros(256, dtype=torch.uint8)
    inverse[_nvfp4_sf_codes()[:0x7F].long()] = torch.arange(0x7F, dtype=torch.uint8)
    return inverse.to(coded.device)[coded.int()].view(torch.float8_e4m3fn)


@functools.cache
def _nvfp4_sf_codes() -> torch.Tensor:
    """uint8 [256]: E4M3 byte -> code c with bf16 bits 0x7000 | c << 4 == s * 2^119.

    The exponent field of s * 2^119 always begins with 111, so eight bits hold the rest.
    """
    sf = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    bits = (sf * 2.0**119).to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    codes = torch.zeros(256, dtype=torch.uint8)
    codes[:0x7F] = torch.where(sf == 0, 0, (bits - 0x7000) >> 4).to(torch.uint8)
    return codes


@functools.cache
def _code_bits(code_bits: int) -> tuple[int, ...]:
    """Destination of every bit of eight bytes (bit 8 i + b of byte i) that hold a thread's codes.

    4 bits: two k16 steps, 8 register pairs in words A, B. A pair is read as rotl(word, shift) &
    0x81C081C0 (sign at 15, magnitude at 8..6 of each half); A serves shifts 2, 8, 12, B serves 4,
    10, 14, and what is left of both, merged, 0 and 6.
    8 bits: one k16 step. Pairs 0 and 2 are word & 0x87F087F0; pairs 1 and 3 are
    (word << 4) & 0x80F080F0 | (word >> 4) & 0x07000700.
    """
    if code_bits == 4:
        shifts = {0: 2, 1: 8, 2: 12, 3: 0, 4: 4, 5: 10, 6: 14, 7: 6}
        target = {0: 6, 1: 7, 2: 8, 3: 15}
        in_word_a = {1, 2, 8, 9}  # bits of a half that the merged word takes from A

        def place(pair: int, half: int, bit: int) -> int:
            position = (16 * half + target[bit] - shifts[pair]) % 32
            if pair in (3, 7):
                return position if position % 16 in in_word_a else 32 + position
            return 32 * (pair // 4) + position

        source = [(i // 2, i % 2) for i in range(16)]
    else:
        even = {7: 15} | {bit: bit + 4 for bit in range(7)}
        odd = {7: 11, 6: 14, 5: 13, 4: 12} | {bit: bit for bit in range(4)}

        def place(pair: int, half: int, bit: int) -> int:
            return 32 * (pair // 2) + 16 * half + (odd if pair % 2 else even)[bit]

        source = [(i // 2, i % 2) for i in range(8)]
    return tuple(place(pair, half, bit) for pair, half in source for bit in range(code_bits))


def _rotation(shift: int) -> tuple[int, ...]:
    """Both words of eight bytes rotated left by `shift`."""
    return tuple(32 * (i // 32) + (i % 32 + shift) % 32 for i in range(64))


def _inverse(destination: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(64), key=lambda bit: destination[bit]))


@functools.cache
def _bit_table(destination: tuple[int, ...]) -> torch.Tensor:
    """int64 [8, 256]: where the bits of byte i with value v go."""
    table = torch.zeros(8, 256, dtype=torch.int64)
    value = torch.arange(256)
    for byte in range(8):
        for bit in range(8):
            table[byte] |= (value >> bit & 1) << destination[8 * byte + bit]
    return table


def _permute_bits(groups: torch.Tensor, destination: tuple[int, ...]) -> torch.Tensor:
    """uint8 [n, 8] -> uint8 [n, 8], bits of each row moved to `destination`."""
    table = _bit_table(destination).to(groups.device)
    result = table[0][groups[:, 0].int()]
    for byte in range(1, 8):
        result |= table[byte][groups[:, byte].int()]
    return result.view(torch.uint8).view(-1, 8)

"""How the numbers of a weight matrix lie in tiles, the order in which the kernels read them.

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
"""

import functools
from dataclasses import dataclass

import torch

TILE_ROWS = 64
TILE_COLS = 128
BLOCK_TILES = 4
BLOCK_ROWS = TILE_ROWS * BLOCK_TILES


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


@functools.cache
def row_order(num_rows: int, *, is_paired: bool) -> torch.Tensor:
    """Source row of every prepared row [256 * blocks], -1 for padding.

    Prepared row 64 T + 16 w + 8 r + g holds
      paired   channel 32 T + 8 w + g, of the gate half for r = 0 and the up half for r = 1
      plain    channel 64 T + 16 w + 4 (g // 2) + 2 r + g % 2
    """
    tiles = num_blocks(num_rows, is_paired=is_paired) * BLOCK_TILES
    tile, warp, half, g = torch.meshgrid(
        *(torch.arange(n, device="cpu") for n in (tiles, 4, 2, 8)), indexing="ij"
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


def codes_to_tiles(codes: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    """uint8 [rows, bytes] in prepared row order -> [tiles, slabs, code bytes]."""
    pair = fmt.code_bits // 4  # bytes of two adjacent elements
    steps = fmt.steps_per_load
    # tile, warp, row half, g, slab, load, step, k half, quad lane, bytes of a pair
    x = codes.view(-1, 4, 2, 8, codes.shape[1] // (64 * pair), 8 // steps, steps, 2, 4, pair)
    x = x.permute(0, 4, 5, 1, 3, 8, 6, 7, 2, 9).contiguous()
    if fmt.code_bits < 16:
        x = _permute_bits(x.view(-1, 8), _code_bits(fmt.code_bits))
    return x.reshape(codes.shape[0] // TILE_ROWS, -1, fmt.code_bytes)


def codes_from_tiles(tiles: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    pair = fmt.code_bits // 4
    steps = fmt.steps_per_load
    num_tiles, slabs, _ = tiles.shape
    x = tiles.reshape(-1, 8)
    if fmt.code_bits < 16:
        x = _permute_bits(x, _inverse(_code_bits(fmt.code_bits)))
    x = x.reshape(num_tiles, slabs, 8 // steps, 4, 8, 4, steps, 2, 2, pair)
    x = x.permute(0, 3, 8, 4, 1, 2, 6, 7, 5, 9)
    return x.reshape(num_tiles * TILE_ROWS, -1)


def sf_to_tiles(sf: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
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


def sf_from_tiles(tiles: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    per_slab = TILE_COLS // fmt.sf_cols
    num_tiles, slabs, _ = tiles.shape
    words = _permute_bits(tiles.reshape(-1, 8), _inverse(_rotation(fmt.sf_shift)))
    words = words.reshape(num_tiles, slabs, 4, 8, per_slab // 2, 4)
    first = torch.stack([words[..., 0], words[..., 2]], -1)
    second = torch.stack([words[..., 3], words[..., 1]], -1)
    x = torch.stack([first, second], -2)  # tile, slab, warp, g, word, neighbour, row half
    return x.permute(0, 2, 6, 3, 1, 4, 5).reshape(num_tiles * TILE_ROWS, slabs * per_slab)


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
    table = torch.zeros(8, 256, dtype=torch.int64, device="cpu")
    value = torch.arange(256, device="cpu")
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

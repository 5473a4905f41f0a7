"""Prepared codes to BF16 operand registers: `tiles.py` seen from a thread of a math warpgroup.

A decoder is a trace-time object: its methods emit instructions for one thread and one 64 x 128
tile in shared memory. `load` issues the tile's loads, `half` writes the 16 A registers of four k16
steps. Raw codes stand where a BF16 number's exponent and mantissa are, so one multiply by a BF16
scale both re-biases and scales, exactly, subnormal codes included:

    E2M1   3 magnitude bits at 8..6     reads as q * 2^-126
    E4M3   7 magnitude bits at 10..4    reads as q * 2^-120

What the scale leaves out (a power of two) is in the accumulator's scale (`TileFormat.alpha_log2`).
"""

from cutlass import Uint32, cute

from moe_ep.comm.ptx import mul_bf16x2, rotate_left, select_bits
from moe_ep.megakernel.tiles import TILE_FORMATS, TileFormat

STEPS_PER_HALF = 4
E2M1_MASK = 0x81C081C0
E2M1_MERGE = 0x03060306  # bits that the left-over pairs take from the first word
E4M3_MASK = 0x87F087F0
BF16_2_POW_120 = 0x7B807B80


class Decoder:
    """Loads and decodes tiles of one format. Subclasses differ in code width.

    `sf_mask` is the scale bits' mask as a run-time value: as an immediate, ptxas would materialise
    it again for every scale word.
    """

    def __init__(self, fmt: TileFormat, sf_mask: Uint32) -> None:
        self.fmt = fmt
        self.sf_mask = sf_mask
        self.loads_per_half = STEPS_PER_HALF // fmt.steps_per_load
        self.num_sf_words = fmt.sf_bytes // 32 // 4 if fmt.sf_cols else 0

    def load(self, tile, tid):
        """Words of a tile for thread `tid` of its warpgroup; `tile` points to 32-bit words."""
        words = [self._load(tile, 512 * i, 4 * tid, 4) for i in range(2 * self.loads_per_half)]
        sf = None
        if self.num_sf_words:
            # The four lanes of a quad read the same words: rows g and g + 8 are theirs together.
            count = self.num_sf_words
            sf = self._load(tile, self.fmt.code_bytes // 4, count * (tid // 4), count)
        return words, sf

    def _load(self, tile, base: int, offset, count: int):
        registers = cute.make_rmem_tensor(count, Uint32)
        source = cute.make_tensor((tile + base + offset).align(4 * count), cute.make_layout(count))
        cute.autovec_copy(source, registers)
        return registers

    def scales(self, sf, step: int):
        """BF16 scales of rows g (low half) and g + 8 (high half) for one k16 step."""
        index = 16 * step // self.fmt.sf_cols
        word = sf[index // 2]
        if index % 2:
            word = rotate_left(word, 8)
        word = word & self.sf_mask
        return word | 0x70007000 if self.fmt.name == "nvfp4" else word

    def half(self, loaded, half: int, registers) -> None:
        """Write A registers 16 * half .. 16 * half + 15 of the tile: [step][a0..a3]."""
        words, sf = loaded
        for load in range(self.loads_per_half):
            self.steps(words[half * self.loads_per_half + load], sf, half, load, registers)


class E2M1Decoder(Decoder):
    """nvfp4 and mxfp4: one load is four k16 steps, two words are two."""

    def steps(self, words, sf, half, load, registers) -> None:
        for pair in range(2):
            step = STEPS_PER_HALF * half + 2 * pair
            first, second = self.scales(sf, step), None
            second = first if self.fmt.sf_cols > 16 else self.scales(sf, step + 1)
            raw = _e2m1_pairs(words[2 * pair], words[2 * pair + 1])
            for i in range(8):
                scale = (first, second)[i // 4]
                registers[4 * step + i] = mul_bf16x2(raw[i], scale, i % 2)


class E4M3Decoder(Decoder):
    """mxfp8 and fp8_block: one load is two k16 steps. fp8_block scales the partial sums instead."""

    def steps(self, words, sf, half, load, registers) -> None:
        for i in range(2):
            step = STEPS_PER_HALF * half + 2 * load + i
            scale = Uint32(BF16_2_POW_120) if sf is None else self.scales(sf, step)
            raw = _e4m3_pairs(words[2 * i], words[2 * i + 1])
            for r in range(4):
                registers[4 * step + r] = mul_bf16x2(raw[r], scale, r % 2)


class Bf16Decoder(Decoder):
    """Nothing to decode: a load is the four A registers of one k16 step."""

    def steps(self, words, sf, half, load, registers) -> None:
        step = STEPS_PER_HALF * half + load
        for r in range(4):
            registers[4 * step + r] = words[r]


def _e2m1_pairs(a, b):
    """Eight raw pairs of two words: a0..a3 of one k16 step, then of the next.

    Five left shifts go to the FMA pipe as multiplies; two rotations, one merge and eight masks to
    the ALU.
    """
    merged = select_bits(a, b, Uint32(E2M1_MERGE))
    a8, b10 = rotate_left(a, 8), rotate_left(b, 10)
    shifted = (a << 2, a8, a8 << 4, merged, b << 4, b10, b10 << 4, merged << 6)
    return [word & E2M1_MASK for word in shifted]


def _e4m3_pairs(a, b):
    """Four raw pairs a0..a3 of one k16 step."""
    pairs = []
    for word in (a, b):
        odd = ((word << 4) & 0x80F080F0) | ((word >> 4) & 0x07000700)
        pairs += [word & E4M3_MASK, odd]
    return pairs


DECODERS = {4: E2M1Decoder, 8: E4M3Decoder, 16: Bf16Decoder}


def make_decoder(name: str, zero) -> Decoder:
    """The decoder of a weight format; `zero` is a run-time 0 that keeps the mask in a register."""
    fmt = TILE_FORMATS[name]
    mask = 0x0FF00FF0 if name == "nvfp4" else 0x7F807F80
    return DECODERS[fmt.code_bits](fmt, Uint32(mask) | Uint32(zero))

"""What one build of the GEMM kernel fixes at compile time, and which build a problem gets."""

import functools
import math
from dataclasses import dataclass

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.schedule import TOKEN_STEP
from moe_ep.megakernel.tiles import TILE_COLS, TILE_FORMATS, TILE_ROWS

# Shared memory of one CTA on sm_90.
MAX_SMEM_BYTES = 227 * 1024
REGISTERS_PER_SM = 65536
THREADS_PER_WARPGROUP = 128
SETMAXNREG_COUNTS = range(24, 257, 8)  # what the instruction takes
MAX_LOCAL_EXPERTS = 384
BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class KernelKnobs:
    """One build.

    num_math_warpgroups   4 (decode: enough warps to cover the latencies) or 2 (prefill)
    slices_per_item       64-row tiles that a math warpgroup works on in turn, per token slab
    tile_widths           token tile widths, ascending; an item takes the narrowest that holds it
    stages                of the shared-memory ring, one K = 128 slab each
    producer_registers, math_registers   per thread of warpgroup 0 and of the math warpgroups
    """

    num_math_warpgroups: int
    slices_per_item: int
    tile_widths: tuple[int, ...]
    stages: int
    producer_registers: int
    math_registers: int

    def __post_init__(self) -> None:
        if self.num_math_warpgroups not in (2, 4):
            raise MoEEpConfigError(
                f"num_math_warpgroups must be 2 or 4, got {self.num_math_warpgroups}"
            )
        if self.slices_per_item not in (1, 2):
            raise MoEEpConfigError(f"slices_per_item must be 1 or 2, got {self.slices_per_item}")
        if isinstance(self.stages, bool) or not isinstance(self.stages, int) or self.stages < 2:
            raise MoEEpConfigError(f"stages must be an int of at least 2, got {self.stages!r}")
        for name in ("producer_registers", "math_registers"):
            value = getattr(self, name)
            if value not in SETMAXNREG_COUNTS:
                raise MoEEpConfigError(
                    f"{name} must be a multiple of 8 from 24 to 256, got {value!r}"
                )
        widths = self.tile_widths
        if (
            not isinstance(widths, tuple)
            or not widths
            or list(widths) != sorted(set(widths))
            or any(w % TOKEN_STEP or not 8 <= w <= 256 for w in widths)
            or widths[-1] % 16
            and len(widths) > 1
        ):
            raise MoEEpConfigError(
                f"tile_widths must be an ascending tuple of multiples of {TOKEN_STEP} from 8 to "
                f"256, the last one of 16, got {widths}"
            )
        if self.registers > self.register_pool:
            raise MoEEpConfigError(
                f"{self.producer_registers} and {self.math_registers} registers need "
                f"{self.registers}; {self.num_threads} threads launch with {self.register_pool}"
            )

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (1 + self.num_math_warpgroups)

    @property
    def register_pool(self) -> int:
        """Registers that the CTA is launched with: setmaxnreg only moves them around."""
        return REGISTERS_PER_SM // self.num_threads // 8 * 8 * self.num_threads

    @property
    def registers(self) -> int:
        return THREADS_PER_WARPGROUP * (
            self.producer_registers + self.num_math_warpgroups * self.math_registers
        )

    @property
    def max_tile_width(self) -> int:
        return self.tile_widths[-1]

    @property
    def slice_rows(self) -> int:
        return TILE_ROWS * self.num_math_warpgroups

    def smem_bytes(self, weights_format: str, num_experts: int) -> int:
        """Ring, expert order (three words each), and room for barriers, records and alignment."""
        return self.stages * self.stage_bytes(weights_format) + 12 * num_experts + 1536

    def stage_bytes(self, weights_format: str) -> int:
        tiles = self.num_math_warpgroups * self.slices_per_item
        tokens = self.max_tile_width * TILE_COLS * BF16_BYTES
        return tiles * TILE_FORMATS[weights_format].tile_bytes + tokens


@dataclass(frozen=True)
class KnobRow:
    """One row of the table: up to `max_rows` rows per expert, `formats` take `knobs`."""

    max_rows: float
    formats: tuple[str, ...]
    knobs: KernelKnobs
    reason: str


FP4 = ("nvfp4", "mxfp4")
FP8 = ("mxfp8", "fp8_block")
NO_LIMIT = float("inf")


def _decode(slices: int, widths: tuple[int, ...], stages: int) -> KernelKnobs:
    """640 threads. 32 and 112 registers fill the 96 x 640 pool exactly."""
    return KernelKnobs(
        num_math_warpgroups=4,
        slices_per_item=slices,
        tile_widths=widths,
        stages=stages,
        producer_registers=32,
        math_registers=112,
    )


def _prefill(slices: int, widths: tuple[int, ...], stages: int) -> KernelKnobs:
    """384 threads. 24 and 240 registers fill the 168 x 384 pool exactly."""
    return KernelKnobs(
        num_math_warpgroups=2,
        slices_per_item=slices,
        tile_widths=widths,
        stages=stages,
        producer_registers=24,
        math_registers=240,
    )


# In the order of the search: the first row that holds the format and the rows is taken. Times are
# FC1 + FC2 of 32 experts of 7168/2048 on one H200 that reads 4.3 TB/s, 2026-11-29.
KNOB_TABLE = (
    KnobRow(
        1,
        FP4,
        _decode(1, (8, 16), 9),
        "one token: one slice cuts its experts into enough items for all CTAs, nine stages bridge "
        "the end of FC1. The fused layer, T 1: 64.4 us, with two slices 66.3 in the same run",
    ),
    KnobRow(
        16,
        FP4,
        _decode(2, (8, 16), 5),
        "HBM bound, and a smaller kernel: the fused layer, T 8: 173.2 us, with tiles of up to 32 "
        "175.3, with one slice 175.0; T 32: 198.4, 199.5, 203.0",
    ),
    KnobRow(
        32,
        FP4,
        _decode(2, (8, 16, 24, 32), 5),
        "HBM bound: two slices halve token traffic and barriers per weight. 8 rows 195 us, with "
        "one slice and 8 stages 197; 4 stages at 16 rows are equal",
    ),
    KnobRow(
        48,
        FP4,
        _decode(2, (16, 24, 32, 40, 48), 4),
        "memory and decoding in balance: narrow steps pay. The fused layer, T 128: 252 us, with "
        "one slice of up to 64 columns 262, in steps of 16 271",
    ),
    KnobRow(
        64,
        FP4,
        _decode(1, (32, 40, 48, 56, 64), 6),
        "two slices of 64 columns do not fit 112 registers, ptxas would serialise WGMMA; two "
        "warpgroups are slower. 64 rows 308 us, two warpgroups 355",
    ),
    KnobRow(
        160,
        FP4,
        _prefill(2, (80, 112, 120, 128, 136, 144, 160), 3),
        "tensor bound: two slices share a token slab, and an expert with a few rows more than "
        "usual needs no second tile. The fused layer, T 512: 557 us, with one slice 580, up to "
        "128 columns 662",
    ),
    KnobRow(
        176,
        FP4,
        _prefill(2, (128, 136, 144, 160, 176), 3),
        "the widest tile whose two slices fit 240 registers, 192 serialises. The fused layer takes "
        "it for any more rows, too: T 2048 2026 us (least 2008), with up to 160 columns 2206 "
        "(2054), with one slice of up to 224 2128 (2105)",
    ),
    KnobRow(
        NO_LIMIT,
        FP4,
        _prefill(1, (64, 128, 192, 256), 3),
        "each weight is decoded once per 256 tokens. 256 rows 919 us, as two tiles of 128 972. Row "
        "buffers leave the fused layer no three stages of it",
    ),
    KnobRow(
        32,
        FP8,
        _decode(1, (8, 16, 24, 32), 5),
        "a slab has twice the bytes of 4-bit codes: one slice leaves room for five stages. 8 rows "
        "333 us, at the rate of memory",
    ),
    KnobRow(
        NO_LIMIT,
        FP8,
        _prefill(1, (32, 64, 96, 128), 4),
        "wider tiles leave too little shared memory for a ring; 128 rows 568 us",
    ),
    KnobRow(
        32,
        ("bf16",),
        _decode(1, (8, 16, 24, 32), 3),
        "64 KiB of weights a stage: three stages are all that fits. 8 rows 621 us, at the rate of "
        "memory",
    ),
    KnobRow(
        NO_LIMIT,
        ("bf16",),
        _prefill(1, (32, 64, 96, 128), 3),
        "128 weight rows a stage leave three stages for 128 tokens; 128 rows 708 us",
    ),
)


def choose_knobs(weights_format: str, rows_per_expert: float) -> KernelKnobs:
    """The table's row for a format and the number of rows of every expert."""
    return choose_row(weights_format, rows_per_expert).knobs


def choose_row(weights_format: str, rows_per_expert: float) -> KnobRow:
    rows = [row for row in KNOB_TABLE if weights_format in row.formats]
    return next((row for row in rows if rows_per_expert <= row.max_rows), rows[-1])


@functools.lru_cache(1024)  # of every call
def choose_routed_knobs(weights_format: str, mean_rows: float) -> KernelKnobs:
    """The table's row for a format and the mean number of rows of experts that a router fills. At a
    mean of 32 rows, half of the experts would need a second tile of 32: 317 us, 264 in one of 64.
    """
    rows = [row for row in KNOB_TABLE if weights_format in row.formats]
    return next((row for row in rows if mean_rows <= usual_rows(row.max_rows)), rows[-1]).knobs


def usual_rows(max_rows: float) -> float:
    """Mean rows per expert for which an expert usually has at most `max_rows`: one tile, so that
    its weights are read and decoded once. Routed at random, rows scatter by about the root of the
    mean m; m + 1.5 sqrt(m) covers nine experts in ten.
    """
    return ((math.sqrt(2.25 + 4 * max_rows) - 1.5) / 2) ** 2

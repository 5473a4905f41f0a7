"""Every buffer of the fused layer: one list that gives sizes to the host and offsets to the device.

Symmetric regions lie in the heap, at the same offset on every rank, and are what peers write or
read; local regions are a rank's own. With one rank nothing is staged and nothing is published, so
that the heap holds the terms alone. Letters: R ranks, C capacity in tokens, K slots, H hidden,
I intermediate (a rank's part of it under tp), P = R * C * K pool rows (every token of every rank
may choose this rank).

    region      scope      shape          written by -> read by
    routed      symmetric  [R]            peer r: its ids and num_tokens of this step are there
    arrived     symmetric  [R]            peer r: its x_stage of this step is there
    drained     symmetric  [R]            peer r: it has left everything of this step
    num_tokens  symmetric  [R]            peer r: tokens it brings, or -1 - code when it refuses
    ids         symmetric  [R, C, K]      peer r: its routing
    x_stage     symmetric  [C, H]         own tokens -> peers pull
    terms       symmetric  [C, K, H]      peers: FC2 rows -> own reduction
    step        local      [1]            number of launches so far
    abort       local      [1]            not 0: a wait of this rank ran out of time
    counters    local      [2, N]         two banks, see `Counters`
    src_meta    local      [P]            source of a pool row, see `protocol.src_meta`
    pool_row    local      [R * C * K]    the inverse, of peers' pulled tokens; -1 = not here
    pool        local      [P, H]         token rows sorted by expert
    hidden      local      [P, I]         FC1 results

Under tp, where all ranks compute for every token, FC2 rows stay where they are and their weighted
sums travel, both FP32:

    weights     symmetric  [R, C, K]      peer r: its routing weights
    terms       local      [R, C, K, H]   FC2 rows -> own sum over the slots
    parts       symmetric  [R, C, H]      peer r: its sums for own tokens -> own reduction

The pool holds a row for each routed slot and not for each token, which is up to K times the memory,
because FC1 then reads the tokens of a stage by one tensor copy. Gathered from tokens held once, a
stage takes two copies for each row. Measured on one H200 with a prototype of the kernel, one rank,
a whole layer gathered / from a pool that was there / copied into the pool first: 173.5 / 175.0 /
177.8 us at 8 tokens, 206.0 / 198.6 / 199.5 us at 32 (some 13 rows of an expert). So gathering wins
up to 8 rows of an expert, loses from there on, and prefill has 256 rows in a tile; rows of peers
would cross NVLink with every tile that reads them.

`routed`, `arrived` and `drained` hold step numbers and only grow. Counters alternate: step n counts
in bank n % 2 and clears the other one, which everybody left when step n - 1 ended.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import PARALLEL_MODES

ALIGNMENT = 128  # bytes; of every region, so that bulk copies and tensor maps may start there
NUM_BANKS = 2
MAX_TOP_K = 32

_DTYPE_BYTES = {"int32": 4, "int64": 8, "bfloat16": 2, "float32": 4}
MAX_TP_ELEMENTS = 2**32  # of `parts`: threads number four of them with an int32


def aligned_bytes(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Region:
    """One array. `scope`: "symmetric" or "local"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scope: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Counters:
    """Int32 counters of one bank, as first index of each.

    staged          CTAs that have copied their part of x_stage
    finished        CTAs that have written all their terms
    next_item       position in the list of GEMM items
    summed          under tp: CTAs that have written their part of the sums over the slots
    tokens_arrived  [tiles] pool rows of a token tile that are there
    fc1_done        [tiles] FC1 row slices of a token tile that are done
    """

    num_tiles: int

    @property
    def staged(self) -> int:
        return 0

    @property
    def finished(self) -> int:
        return 1

    @property
    def next_item(self) -> int:
        return 2

    @property
    def summed(self) -> int:
        return 3

    @property
    def tokens_arrived(self) -> int:
        return 32  # a cache line of its own

    @property
    def fc1_done(self) -> int:
        return self.tokens_arrived + self.num_tiles

    @property
    def num_counters(self) -> int:
        """Of one bank, in whole cache lines."""
        return -(-(self.fc1_done + self.num_tiles) // 32) * 32


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The layout for one geometry. `num_local_experts` is the most that any rank holds.

    intermediate    I held here, 0 where no GEMM runs between dispatch and combine
    max_tile_width  rows of the widest token tile
    least_tile_width  the least `max_tile_width` among the builds that share the memory, which sizes
                    the counters; 0: this build's
    parallel        "ep": ranks divide the experts; "tp": every expert's intermediate
    Raises `MoEEpConfigError` for values below 1, for a hidden size that is not a multiple of 8
    (16 bytes, the unit of bulk copies), for more than 32 slots of a token (one for each lane of a
    warp), for more slots than int32 can number, and for more than 2^32 elements of `parts`.
    """

    num_ranks: int
    num_local_experts: int
    top_k: int
    hidden: int
    intermediate: int
    max_tokens_per_rank: int
    max_tile_width: int
    least_tile_width: int = 0
    parallel: str = "ep"

    def __post_init__(self) -> None:
        if self.parallel not in PARALLEL_MODES:
            raise MoEEpConfigError(
                f"parallel must be one of {PARALLEL_MODES}, got {self.parallel!r}"
            )
        for field in fields(self):
            if field.name == "parallel":
                continue
            may_be_zero = field.name in ("intermediate", "least_tile_width")
            value, least = getattr(self, field.name), int(not may_be_zero)
            if value < least:
                raise MoEEpConfigError(f"{field.name} must be at least {least}, got {value}")
        if self.hidden % 8:
            raise MoEEpConfigError(f"hidden must be a multiple of 8, got {self.hidden}")
        if self.top_k > MAX_TOP_K:
            raise MoEEpConfigError(f"top_k must be at most {MAX_TOP_K}, got {self.top_k}")
        if self.num_pool_rows >= 2**31:
            raise MoEEpConfigError(
                f"num_ranks * max_tokens_per_rank * top_k is {self.num_pool_rows}; "
                f"allowed: less than {2**31}"
            )
        num_elements = self.num_ranks * self.max_tokens_per_rank * self.hidden
        if self.is_tp and num_elements > MAX_TP_ELEMENTS:
            raise MoEEpConfigError(
                f"num_ranks * max_tokens_per_rank * hidden is {num_elements}; allowed under tp: at "
                f"most {MAX_TP_ELEMENTS}"
            )

    @property
    def is_tp(self) -> bool:
        return self.parallel == "tp"

    @property
    def num_pool_rows(self) -> int:
        """P: every slot of every rank."""
        return self.num_ranks * self.max_tokens_per_rank * self.top_k

    @property
    def counters(self) -> Counters:
        """An expert's last tile may be partly filled, hence one more tile for each."""
        rows = self.least_tile_width or self.max_tile_width
        return Counters(self.num_local_experts + self.num_pool_rows // rows)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        ranks, tokens, top_k = self.num_ranks, self.max_tokens_per_rank, self.top_k
        rows, hidden = self.num_pool_rows, self.hidden
        published = (
            Region("routed", "int32", (ranks,), "symmetric"),
            Region("arrived", "int32", (ranks,), "symmetric"),
            Region("drained", "int32", (ranks,), "symmetric"),
            Region("num_tokens", "int32", (ranks,), "symmetric"),
            Region("ids", "int32", (ranks, tokens, top_k), "symmetric"),
            Region("x_stage", "bfloat16", (tokens, hidden), "symmetric"),
        )
        combined = (Region("terms", "bfloat16", (tokens, top_k, hidden), "symmetric"),)
        if self.is_tp:
            published += (Region("weights", "float32", (ranks, tokens, top_k), "symmetric"),)
            combined = (
                Region("parts", "float32", (ranks, tokens, hidden), "symmetric"),
                Region("terms", "float32", (ranks, tokens, top_k, hidden), "local"),
            )
        return (
            *(published if ranks > 1 else ()),
            *combined,
            Region("step", "int32", (1,), "local"),
            Region("abort", "int32", (1,), "local"),
            Region("counters", "int32", (NUM_BANKS, self.counters.num_counters), "local"),
            Region("src_meta", "int64", (rows,), "local"),
            Region("pool_row", "int32", (rows,), "local"),
            Region("pool", "bfloat16", (rows, hidden), "local"),
            Region("hidden", "bfloat16", (rows, self.intermediate), "local"),
        )

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Region -> bytes from the start of its scope's allocation."""
        ends = {"symmetric": 0, "local": 0}
        offsets = {}
        for region in self.regions:
            offsets[region.name] = ends[region.scope]
            ends[region.scope] += aligned_bytes(region.num_bytes)
        return offsets

    def num_bytes(self, scope: str) -> int:
        """Bytes of one rank's allocation of that scope."""
        return sum(
            aligned_bytes(region.num_bytes) for region in self.regions if region.scope == scope
        )

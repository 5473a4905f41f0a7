"""What a fused kernel is compiled for: its spec, the builds of a capacity, the layout they share.

Plain values: nothing here needs CuTe DSL or a GPU.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.compile_cache import KernelBuild
from moe_ep.megakernel.grouped_gemm import CHANNEL_MULTIPLE, GemmSpec
from moe_ep.megakernel.knobs import (
    BF16_BYTES,
    KNOB_TABLE,
    MAX_SMEM_BYTES,
    KernelKnobs,
    usual_rows,
)
from moe_ep.megakernel.problem import Activation, MoEShape
from moe_ep.megakernel.tiles import TILE_COLS, TILE_FORMATS
from moe_ep.megakernel.workspace import Workspace

NUM_ROW_BUFFERS = 2  # of dispatch, a token row each
# Widest token tile of builds that lend ring stages to dispatch: it is over there in a few us.
MAX_LENDING_WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class MegaSpec:
    """Everything that one compiled kernel depends on.

    layout        of the workspace; its tile width is the knobs' widest
    num_experts   E over all ranks
    num_launched  ranks in one launch: 1, or all of a virtual group
    is_bounded    whether waits end when the time is up
    takes_stamps  whether CTAs note the times of `protocol.Moment`: for measuring
    """

    layout: Workspace
    num_experts: int
    weights_format: str
    activation: Activation
    has_bias13: bool
    has_bias2: bool
    knobs: KernelKnobs
    num_launched: int = 1
    ids_are_int64: bool = False
    is_bounded: bool = True
    takes_stamps: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            value = getattr(self.layout, name)
            if value % CHANNEL_MULTIPLE:
                raise MoEEpConfigError(
                    f"{name} must be a multiple of {CHANNEL_MULTIPLE} for this kernel, got {value}"
                )
        if self.num_lent_stages >= self.knobs.stages:
            raise MoEEpConfigError(
                f"hidden {self.layout.hidden} needs {self.num_lent_stages} ring stages for two "
                f"token rows; allowed: fewer than the {self.knobs.stages} of the knobs"
            )
        if self.smem_bytes > MAX_SMEM_BYTES:
            raise MoEEpConfigError(
                f"knobs with {self.knobs.stages} stages of {self.weights_format} and "
                f"{self.layout.num_local_experts} experts need {self.smem_bytes} bytes of shared "
                f"memory; allowed: {MAX_SMEM_BYTES}"
            )

    @cached_property
    def fc1(self) -> GemmSpec:
        return self._gemm("fc1", self.layout.hidden, self.layout.intermediate)

    @cached_property
    def fc2(self) -> GemmSpec:
        return self._gemm("fc2", self.layout.intermediate, self.layout.hidden)

    def _gemm(self, name: str, num_cols: int, num_channels: int) -> GemmSpec:
        is_fc1 = name == "fc1"
        return GemmSpec(
            name=name,
            weights_format=self.weights_format,
            num_cols=num_cols,
            num_channels=num_channels,
            activation=self.activation if is_fc1 else None,
            has_bias=self.has_bias13 if is_fc1 else self.has_bias2,
            num_experts=self.layout.num_local_experts,
            scatters_rows=not is_fc1,
            is_fp32=not is_fc1 and self.layout.is_tp,
            knobs=self.knobs,
        )

    @property
    def stage_weight_bytes(self) -> int:
        tiles = self.knobs.num_math_warpgroups * self.knobs.slices_per_item
        return tiles * TILE_FORMATS[self.weights_format].tile_bytes

    @property
    def stage_token_bytes(self) -> int:
        return self.knobs.max_tile_width * TILE_COLS * BF16_BYTES

    @property
    def row_buffer_bytes(self) -> int:
        return row_buffer_bytes(self.layout.hidden)

    @property
    def lends_weights(self) -> bool:
        """Whether lent row buffers lie in the ring's weights or in its tokens."""
        return self.stage_weight_bytes >= self.stage_token_bytes

    @property
    def num_lent_stages(self) -> int:
        """Ring stages that hold the row buffers until dispatch ends; 0 where both fit."""
        if self._ring_and_scan_bytes + self.row_buffer_bytes <= MAX_SMEM_BYTES:
            return 0
        return -(-self.row_buffer_bytes // max(self.stage_weight_bytes, self.stage_token_bytes))

    @property
    def smem_bytes(self) -> int:
        own_buffer_bytes = 0 if self.num_lent_stages else self.row_buffer_bytes
        return self._ring_and_scan_bytes + own_buffer_bytes

    @property
    def _ring_and_scan_bytes(self) -> int:
        ring_bytes = self.knobs.stages * self.knobs.stage_bytes(self.weights_format)
        return ring_bytes + scan_bytes(self.layout.num_local_experts, self.layout.num_ranks)

    def kernel_build(self) -> KernelBuild:
        return KernelBuild("mega_moe", self, _build)


def _build(spec: MegaSpec):
    from moe_ep.megakernel.mega_moe_sm90 import build

    return build(spec)


def scan_bytes(num_local_experts: int, num_ranks: int) -> int:
    """Shared memory beside ring and row buffers: what the scan finds (nine words an expert),
    peers, barriers, alignment."""
    return 36 * num_local_experts + 16 * num_ranks + 1536


def row_buffer_bytes(hidden: int) -> int:
    """Shared memory of dispatch's token rows."""
    return NUM_ROW_BUFFERS * hidden * BF16_BYTES


@dataclass(frozen=True)
class Bucket:
    """A build that serves calls of up to `max_tokens` tokens on every rank."""

    max_tokens: int
    knobs: KernelKnobs


def make_buckets(
    weights_format: str,
    shape: MoEShape,
    max_tokens_per_rank: int,
    num_ranks: int,
    parallel: str = "ep",
) -> tuple[Bucket, ...]:
    """The builds of the knob table that a capacity can need, by ascending tokens.

    A build for many rows keeps its row buffers out of the ring, which would else stand still until
    the CTA has brought its share of them; one that has no three stages left then is passed over.
    """
    rows = [row for row in KNOB_TABLE if weights_format in row.formats]
    num_experts = most_local_experts(shape, num_ranks, parallel)
    free = MAX_SMEM_BYTES - row_buffer_bytes(shape.hidden) - scan_bytes(num_experts, num_ranks)
    choices = []
    for row in rows:
        knobs = row.knobs
        if knobs.max_tile_width > MAX_LENDING_WIDTH:
            stages = min(knobs.stages, free // knobs.stage_bytes(weights_format))
            if stages < 3:
                continue
            knobs = replace(knobs, stages=stages)
        choices.append((usual_rows(row.max_rows), knobs))
    buckets = []
    for max_rows, knobs in choices:
        limit = max_rows * shape.num_experts / (num_ranks * shape.top_k)
        if knobs is choices[-1][1] or limit >= max_tokens_per_rank:
            buckets.append(Bucket(max_tokens_per_rank, knobs))
            break
        if limit >= 1:
            buckets.append(Bucket(int(limit), knobs))
    return tuple(buckets)


def choose_bucket(buckets: tuple[Bucket, ...], max_tokens: int | None) -> int:
    """Position of the first bucket that holds so many tokens a rank; None: the capacity."""
    last = len(buckets) - 1
    if max_tokens is not None:
        for i in range(last):
            if max_tokens <= buckets[i].max_tokens:
                return i
    return last


def most_local_experts(shape: MoEShape, num_ranks: int, parallel: str) -> int:
    """Experts of the rank that holds most."""
    return shape.num_experts if parallel == "tp" else -(-shape.num_experts // num_ranks)


def make_layout(
    shape: MoEShape,
    num_ranks: int,
    max_tokens_per_rank: int,
    buckets: tuple[Bucket, ...],
    parallel: str = "ep",
) -> Workspace:
    """The workspace that all builds share.

    Raises `MoEEpConfigError` under tp for an intermediate whose parts the kernel does not take.
    """
    num_parts = num_ranks if parallel == "tp" else 1
    multiple = num_parts * CHANNEL_MULTIPLE
    if num_parts > 1 and shape.intermediate % multiple:
        raise MoEEpConfigError(
            f"intermediate must be a multiple of {multiple} over {num_parts} tp ranks for this "
            f"kernel, got {shape.intermediate}"
        )
    least_width = min(bucket.knobs.max_tile_width for bucket in buckets)
    return Workspace(
        num_ranks=num_ranks,
        num_local_experts=most_local_experts(shape, num_ranks, parallel),
        top_k=shape.top_k,
        hidden=shape.hidden,
        intermediate=shape.intermediate // num_parts,
        max_tokens_per_rank=max_tokens_per_rank,
        max_tile_width=least_width,
        least_tile_width=least_width,
        parallel=parallel,
    )


def fit_spec(
    *, shape: MoEShape, layout: Workspace, knobs: KernelKnobs, **options: object
) -> MegaSpec:
    """The build of `knobs` for a layer, with fewer ring stages where many experts need the memory.

    Raises `MoEEpConfigError` where not even two stages fit.
    """
    layout = replace(layout, max_tile_width=knobs.max_tile_width)
    while True:
        try:
            return MegaSpec(
                layout=layout,
                num_experts=shape.num_experts,
                activation=shape.activation,
                knobs=knobs,
                **options,
            )
        except MoEEpConfigError:
            if knobs.stages == 2:
                raise
            knobs = replace(knobs, stages=knobs.stages - 1)

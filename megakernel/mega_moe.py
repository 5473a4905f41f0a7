"""The fused layer on the device: torch tensors in, one launch, nothing awaited.

The kernel is `mega_moe_sm90.py`; this module needs CuTe DSL only when it compiles or launches.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.megakernel import workspace_memory
from moe_ep.megakernel.bound_call import BoundCall, Int32, Int64
from moe_ep.megakernel.compile_cache import KernelBuild, compile_all, load
from moe_ep.megakernel.formats import TILE_COLS, TILE_FORMATS, PreparedWeights
from moe_ep.megakernel.grouped_gemm import CHANNEL_MULTIPLE, GemmSpec
from moe_ep.megakernel.knobs import (
    BF16_BYTES,
    KNOB_TABLE,
    MAX_SMEM_BYTES,
    KernelKnobs,
    usual_rows,
)
from moe_ep.megakernel.problem import Activation, MoEShape
from moe_ep.megakernel.protocol import Moment
from moe_ep.megakernel.workspace import Workspace

NUM_ROW_BUFFERS = 2  # of dispatch, a token row each
# Widest token tile of builds that lend ring stages to dispatch: it is over there in a few us.
MAX_LENDING_WIDTH = 32
# Argument sets kept ready, one for each build and set of weights.
MAX_CALLS = 256


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


class MegaMoE:
    """One layer's geometry on one GPU: this rank, or all ranks of a virtual group. Collective.

    parallel   "ep": ranks divide the experts, "tp": every expert's intermediate
    has_bias2  of this rank's weights: under tp rank 0 alone has it
    knobs      None: the knob table's build for each call's bound on tokens; one build for all
               calls; or buckets, by ascending tokens. No choice changes bits
    max_sms    most SMs that a launch takes; None: all
    is_bounded False builds kernels whose waits have no end
    takes_stamps  True builds kernels that write `stamps`

    Layers of one geometry share the workspace and take turns. Calls may be captured in a CUDA
    graph after `warmup()`; the number of tokens is then the captured one, routing may change.
    Raises `MoEEpConfigError` where a build or the workspace does not fit.
    """

    def __init__(
        self,
        group: EpGroup,
        shape: MoEShape,
        weights_format: str,
        *,
        max_tokens_per_rank: int,
        parallel: str = "ep",
        has_bias13: bool = False,
        has_bias2: bool = False,
        knobs: KernelKnobs | Sequence[Bucket] | None = None,
        max_sms: int | None = None,
        is_bounded: bool = True,
        takes_stamps: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        num_launched = group.num_ranks if group.is_virtual else 1
        if max_sms is not None and max_sms < num_launched:
            raise MoEEpConfigError(
                f"max_sms is {max_sms}; allowed: at least {num_launched}, one for each rank in a "
                "launch"
            )
        self.device = group.device
        self._is_alone = group.num_ranks == 1
        table = make_buckets(weights_format, shape, max_tokens_per_rank, group.num_ranks, parallel)
        if isinstance(knobs, KernelKnobs):
            knobs = (Bucket(max_tokens_per_rank, knobs),)
        self.buckets = tuple(knobs or table)
        # The table's builds too, so that layers share the workspace whatever their knobs.
        builds = (*table, *self.buckets)
        layout = make_layout(shape, group.num_ranks, max_tokens_per_rank, builds, parallel)
        self._spec = functools.partial(
            fit_spec,
            shape=shape,
            weights_format=weights_format,
            has_bias13=has_bias13,
            has_bias2=has_bias2,
            num_launched=num_launched,
            is_bounded=is_bounded,
            takes_stamps=takes_stamps,
        )
        self._layout = layout
        self._calls: dict[tuple, Call] = {}
        self.kernel_builds()  # raises where one does not fit, before anything is allocated
        self.memory = workspace_memory.acquire(group, layout)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._ctas_per_rank = min(num_sms, max_sms or num_sms) // num_launched
        # [CTAs, moments] nanoseconds of the GPU's global timer
        self.stamps = torch.zeros(num_sms, len(Moment), dtype=torch.int64, device=self.device)
        self._first_rank = 0 if group.is_virtual else group.rank
        self._timeout_ns = int(timeout_s * 1e9)

    @property
    def num_bytes(self) -> int:
        """Of the workspace of one rank; layers of one geometry share it."""
        return sum(self._layout.num_bytes(scope) for scope in ("symmetric", "local"))

    def spec(self, knobs: KernelKnobs, ids_are_int64: bool) -> MegaSpec:
        return self._spec(layout=self._layout, knobs=knobs, ids_are_int64=ids_are_int64)

    def kernel_builds(self) -> list[KernelBuild]:
        """Every kernel that a call may launch."""
        return [
            self.spec(bucket.knobs, is_int64).kernel_build()
            for bucket in self.buckets
            for is_int64 in (False, True)
        ]

    def warmup(self) -> None:
        """Compile and load every kernel; afterwards calls neither compile nor allocate."""
        builds = self.kernel_builds()
        compile_all(builds)
        for build in builds:
            load(build)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: PreparedWeights,
        out: torch.Tensor,
        *,
        max_tokens: int | None = None,
        num_tokens: torch.Tensor | None = None,
        late_rank: int = -1,
        late_s: float = 0.0,
    ) -> None:
        """One launch on the current stream. Contiguous tensors on the GPU, x and out aligned to 16
        bytes.

        x, out        [T, H] BF16; of n virtual ranks [n, C, H], C the capacity
        topk_ids      [T, K] int32 or int64, [n, C, K]
        topk_weights  [T, K] FP32, [n, C, K]
        weights       of this rank; of virtual ranks those of all ranks, one after the other
        max_tokens    bound on every rank's tokens that chooses the build; default: the capacity.
                      One rank alone knows it: T
        num_tokens    [n] int32 on the GPU, T of each virtual rank, or -1 - code to refuse
        late_rank     virtual rank that starts `late_s` late, or if that is negative never: for
                      tests
        """
        own_tokens = x.shape[0]
        bucket_idx = choose_bucket(self.buckets, own_tokens if self._is_alone else max_tokens)
        call = self._call_for(bucket_idx, topk_ids.dtype == torch.int64, weights)
        call.stream.value = self.memory.enter()
        call.x.value, call.topk_ids.value = x.data_ptr(), topk_ids.data_ptr()
        call.topk_weights.value, call.out.value = topk_weights.data_ptr(), out.data_ptr()
        call.num_tokens.value, call.token_counts.value = own_tokens, _address(num_tokens)
        call.late_rank.value, call.late_ns.value = late_rank, int(late_s * 1e9)
        call.launch()

    def refuse(self, code: int, weights: PreparedWeights) -> None:
        """One real rank's part of a step whose input it does not take: no rank computes anything,
        and every rank finds rank and `code` (0 or more) in `check`."""
        call = self._call_for(0, False, weights)
        call.stream.value = self.memory.enter()
        for cell in (call.x, call.topk_ids, call.topk_weights, call.out):
            cell.value = 0
        call.num_tokens.value = -1 - code
        call.launch()

    def _call_for(self, bucket_idx: int, ids_are_int64: bool, weights: PreparedWeights) -> "Call":
        """Bound once. A dictionary, as a cache of the method would hold this object, and with it
        the GPU's memory, until the garbage is collected."""
        key = (bucket_idx, ids_are_int64, weights)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            call = self._calls[key] = self._bind(*key)
        return call

    def _bind(self, bucket_idx: int, ids_are_int64: bool, weights: PreparedWeights) -> "Call":
        """A build with everything that stays from call to call."""
        knobs = self.buckets[bucket_idx].knobs
        parts = (weights.w13, weights.w13_alpha, weights.b13)
        parts += (weights.w2, weights.w2_alpha, weights.b2)
        return Call(
            load(self.spec(knobs, ids_are_int64).kernel_build()),
            weights=tuple(map(_address, parts)),
            heaps=self.memory.heaps.data_ptr(),
            local=self.memory.local.data_ptr(),
            record=self.memory.post_mortem.address,
            timeout_ns=self._timeout_ns,
            stamps=self.stamps.data_ptr(),
            first_rank=self._first_rank,
            ctas_per_rank=self._ctas_per_rank,
        )

    def check(self, refusals: Sequence[str] = ()) -> None:
        """Raise what earlier launches have found, see `WorkspaceMemory.check`; does not wait.

        refusals   what each code of `refuse` stands for
        """
        self.memory.check(refusals)

    def destroy(self) -> None:
        """Give the workspace back once the launches that use it have ended. Idempotent."""
        workspace_memory.release(self.memory)


class Call:
    """A build's launch: the arguments that change, as cells, and those that stay."""

    def __init__(
        self,
        function,
        *,
        weights: tuple[int, ...],
        heaps: int,
        local: int,
        record: int,
        timeout_ns: int,
        stamps: int,
        first_rank: int,
        ctas_per_rank: int,
    ) -> None:
        self.x, self.topk_ids, self.topk_weights, self.out = (Int64() for _ in range(4))
        self.token_counts, self.late_ns, self.stream = Int64(), Int64(), Int64()
        self.num_tokens, self.late_rank = Int32(), Int32()
        self.launch = BoundCall(
            function,
            [
                *(self.x, self.topk_ids, self.topk_weights, self.out, self.token_counts),
                *map(Int64, (*weights, heaps, local, record, timeout_ns)),
                *(self.late_ns, Int64(stamps), self.num_tokens, self.late_rank),
                *map(Int32, (first_rank, ctas_per_rank, 0)),
                self.stream,
            ],
        )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

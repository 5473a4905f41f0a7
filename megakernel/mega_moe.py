"""The fused layer on the device: torch tensors in, one launch, nothing awaited.

The kernel is `mega_moe_sm90.py`; this module needs CuTe DSL only when it compiles or launches.
"""

import functools
from collections.abc import Sequence

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.megakernel import workspace_memory
from moe_ep.megakernel.bound_call import BoundCall, Int32, Int64
from moe_ep.megakernel.compile_cache import KernelBuild, compile_all, load
from moe_ep.megakernel.formats import PreparedWeights
from moe_ep.megakernel.knobs import KernelKnobs
from moe_ep.megakernel.mega_spec import (
    Bucket,
    MegaSpec,
    choose_bucket,
    fit_spec,
    make_buckets,
    make_layout,
)
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.protocol import Moment

# Argument sets kept ready, one for each build and set of weights.
MAX_CALLS = 256


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
        call.stream.value = self.memory.order.enter()
        call.x.value, call.topk_ids.value = x.data_ptr(), topk_ids.data_ptr()
        call.topk_weights.value, call.out.value = topk_weights.data_ptr(), out.data_ptr()
        call.num_tokens.value, call.token_counts.value = own_tokens, _address(num_tokens)
        call.late_rank.value, call.late_ns.value = late_rank, int(late_s * 1e9)
        call.launch()

    def refuse(self, code: int, weights: PreparedWeights) -> None:
        """One real rank's part of a step whose input it does not take: no rank computes anything,
        and every rank finds rank and `code` (0 or more) in `check`."""
        call = self._call_for(0, False, weights)
        call.stream.value = self.memory.order.enter()
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

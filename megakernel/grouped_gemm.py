"""FC1 and FC2 of a rank's experts on the device: torch tensors in, two launches, nothing awaited.

The kernel is `grouped_gemm_sm90.py`; this module needs CuTe DSL only when it compiles or launches.
"""

from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel import schedule
from moe_ep.megakernel.bound_call import BoundCall, Int32, Int64, stream_handle
from moe_ep.megakernel.compile_cache import KernelBuild, compile_all, load
from moe_ep.megakernel.formats import PreparedWeights
from moe_ep.megakernel.knobs import (
    KNOB_TABLE,
    MAX_LOCAL_EXPERTS,
    MAX_SMEM_BYTES,
    KernelKnobs,
    choose_routed_knobs,
)
from moe_ep.megakernel.problem import Activation
from moe_ep.megakernel.tiles import BLOCK_ROWS, TILE_FORMATS, num_blocks

# H and I: every channel group that a warp stores at once is whole.
CHANNEL_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """Everything that one compiled kernel depends on.

    name              "fc1" or "fc2"
    num_cols          K: H for FC1, I for FC2
    num_channels      width of an output row: I for FC1, H for FC2
    activation        of FC1; None for FC2
    num_experts       local experts
    scatters_rows     row p of the pool is written to dst_rows[p]
    is_fp32           FC2 writes its FP32 sums, not rounded
    """

    name: str
    weights_format: str
    num_cols: int
    num_channels: int
    activation: Activation | None
    has_bias: bool
    num_experts: int
    scatters_rows: bool
    knobs: KernelKnobs
    is_fp32: bool = False

    def __post_init__(self) -> None:
        needed = self.knobs.smem_bytes(self.weights_format, self.num_experts)
        if needed > MAX_SMEM_BYTES:
            raise MoEEpConfigError(
                f"knobs with {self.knobs.stages} stages of {self.weights_format} and "
                f"{self.num_experts} experts need {needed} bytes of shared memory; allowed: "
                f"{MAX_SMEM_BYTES}"
            )

    @property
    def is_paired(self) -> bool:
        return self.activation is not None and self.activation.is_gated

    @property
    def num_weight_rows(self) -> int:
        return self.num_channels * (2 if self.is_paired else 1)

    @property
    def num_slices(self) -> int:
        blocks = num_blocks(self.num_weight_rows, is_paired=self.is_paired)
        return blocks * BLOCK_ROWS // self.knobs.slice_rows

    @property
    def expert_bytes(self) -> int:
        fmt = TILE_FORMATS[self.weights_format]
        return fmt.matrix_bytes(self.num_weight_rows, self.num_cols, is_paired=self.is_paired)

    def grid(self, num_ctas: int) -> schedule.GemmGrid:
        return schedule.GemmGrid(
            self.num_slices, self.knobs.slices_per_item, self.knobs.max_tile_width, num_ctas
        )

    def kernel_build(self) -> KernelBuild:
        return KernelBuild(f"grouped_gemm_{self.name}", self, _build)


def _build(spec: GemmSpec):
    from moe_ep.megakernel.grouped_gemm_sm90 import build

    return build(spec)


class GroupedGemm:
    """The two GEMMs of one layer shape on one device.

    hidden, intermediate   H and I as held here; both multiples of 16
    scatters_terms         FC2 writes pool row p to row dst_rows[p]
    terms_are_fp32         FC2 writes FP32 sums, not rounded (a rank's part under tp)
    knobs                  None: chosen from the table for every call, by pool rows per expert. The
                           choice changes no bit.
    max_sms                most SMs that a launch takes; None: all

    Calls may be captured in a CUDA graph after `warmup()`. FC2 must follow its FC1 on one stream:
    it starts while FC1 ends.
    """

    def __init__(
        self,
        weights_format: str,
        *,
        hidden: int,
        intermediate: int,
        activation: Activation,
        num_local_experts: int,
        has_bias13: bool = False,
        has_bias2: bool = False,
        scatters_terms: bool = False,
        terms_are_fp32: bool = False,
        knobs: KernelKnobs | None = None,
        max_sms: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        for name, value in (("hidden", hidden), ("intermediate", intermediate)):
            if value % CHANNEL_MULTIPLE:
                raise MoEEpConfigError(
                    f"{name} must be a multiple of {CHANNEL_MULTIPLE} for this kernel, got {value}"
                )
        if not 1 <= num_local_experts <= MAX_LOCAL_EXPERTS:
            raise MoEEpConfigError(
                f"num_local_experts must be 1 to {MAX_LOCAL_EXPERTS}, got {num_local_experts}"
            )
        self.weights_format = weights_format
        self.hidden, self.intermediate = hidden, intermediate
        self.activation = activation
        self.num_local_experts = num_local_experts
        self.has_bias13, self.has_bias2 = has_bias13, has_bias2
        self.scatters_terms = scatters_terms
        self.terms_are_fp32 = terms_are_fp32
        self.knobs = knobs
        self.device = torch.device(device)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.num_ctas = min(num_sms, max_sms or num_sms)
        # Position in the list and CTAs that left, of FC1 and of FC2; the kernels set them back.
        self._counters = torch.zeros(2, 2, dtype=torch.int32, device=self.device)
        first = self._counters.data_ptr()
        self._counter_addresses = {"fc1": first, "fc2": first + self._counters.nbytes // 2}
        self._bound: dict[tuple[str, KernelKnobs], BoundCall] = {}  # no tensor is kept alive

    def spec(self, name: str, knobs: KernelKnobs) -> GemmSpec:
        is_fc1 = name == "fc1"
        return GemmSpec(
            name=name,
            weights_format=self.weights_format,
            num_cols=self.hidden if is_fc1 else self.intermediate,
            num_channels=self.intermediate if is_fc1 else self.hidden,
            activation=self.activation if is_fc1 else None,
            has_bias=self.has_bias13 if is_fc1 else self.has_bias2,
            num_experts=self.num_local_experts,
            scatters_rows=not is_fc1 and self.scatters_terms,
            is_fp32=not is_fc1 and self.terms_are_fp32,
            knobs=knobs,
        )

    def kernel_builds(self) -> list[KernelBuild]:
        """Every kernel that a call may launch."""
        rows = [row for row in KNOB_TABLE if self.weights_format in row.formats]
        choices = [self.knobs] if self.knobs else [row.knobs for row in rows]
        return [self.spec(name, k).kernel_build() for k in choices for name in ("fc1", "fc2")]

    def warmup(self) -> None:
        """Compile and load every kernel; afterwards calls neither compile nor allocate."""
        builds = self.kernel_builds()
        compile_all(builds)
        for kernel in builds:
            load(kernel)

    def fc1(
        self,
        x_pool: torch.Tensor,
        offsets: torch.Tensor,
        weights: PreparedWeights,
        out_hidden: torch.Tensor,
    ) -> None:
        """BF16 [P, H] -> `out_hidden` BF16 [P, I], on the current stream.

        offsets   int32 [e + 1] on the device: rows offsets[i] .. offsets[i + 1] are expert i's.
                  Rows from offsets[e] on are neither read as tokens nor written.
        """
        parts = (weights.w13, weights.w13_alpha, weights.b13)
        self._launch("fc1", x_pool, offsets, parts, out_hidden, None)

    def fc2(
        self,
        hidden: torch.Tensor,
        offsets: torch.Tensor,
        weights: PreparedWeights,
        out_terms: torch.Tensor,
        dst_rows: torch.Tensor | None = None,
    ) -> None:
        """BF16 [P, I] -> `out_terms` [.., H], on the current stream, right after `fc1`.

        out_terms  BF16, or FP32 with `terms_are_fp32`
        dst_rows   int32 [P], with `scatters_terms`: row of `out_terms` for each pool row
        """
        parts = (weights.w2, weights.w2_alpha, weights.b2)
        self._launch("fc2", hidden, offsets, parts, out_terms, dst_rows)

    def _launch(
        self,
        name: str,
        rows_in: torch.Tensor,
        offsets: torch.Tensor,
        weights: tuple[torch.Tensor | None, ...],
        rows_out: torch.Tensor,
        dst_rows: torch.Tensor | None,
    ) -> None:
        num_rows = len(rows_in)
        if num_rows == 0:
            return
        assert rows_in.is_contiguous() and rows_out.is_contiguous()
        assert offsets.dtype == torch.int32 and len(offsets) == self.num_local_experts + 1
        rows_per_expert = num_rows / self.num_local_experts
        knobs = self.knobs or choose_routed_knobs(self.weights_format, rows_per_expert)
        self._bound_call(name, knobs)(
            *map(_address, (*weights, rows_in, rows_out, offsets, dst_rows)),
            self._counter_addresses[name],
            num_rows,
            0,
            self.num_ctas,
            stream_handle(rows_in.device),
        )

    def _bound_call(self, name: str, knobs: KernelKnobs) -> BoundCall:
        call = self._bound.get((name, knobs))
        if call is None:
            cells = [*(Int64() for _ in range(8)), *(Int32() for _ in range(3)), Int64()]
            call = BoundCall(load(self.spec(name, knobs).kernel_build()), cells)
            self._bound[name, knobs] = call
        return call


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()

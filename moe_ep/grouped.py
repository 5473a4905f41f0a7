"""The split path on Hopper with the grouped GEMM kernel.

    one rank        `OneRankGrouped`: permute -> FC1 -> FC2 -> combine, four launches on the current
                    stream; the host reads nothing back and allocates nothing
    several ranks   `GroupedExperts` is the expert kernel of `SplitBackend`

Both compute the same bits: those of a row depend on the row and the weights alone. Letters: T
tokens, K slots, H hidden, I intermediate, e local experts, P pool rows.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.device_backend import ID_DTYPES, DeviceBackend
from moe_ep.grouped_memory import shared_workspace, workspace_bytes, workspace_regions
from moe_ep.megakernel.combine_sm90 import Combine, CombineConfig, combine_build
from moe_ep.megakernel.compile_cache import KernelBuild, compile_all
from moe_ep.megakernel.formats import PreparedWeights, prepare
from moe_ep.megakernel.grouped_gemm import GroupedGemm
from moe_ep.megakernel.knobs import KNOB_TABLE, KernelKnobs, usual_rows
from moe_ep.megakernel.permute_sm90 import Permute, PermuteConfig, permute_build
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.workspace_memory import free_bytes
from moe_ep.prepared import prepare_weights
from moe_ep.weights import MoEWeights

_log = logging.getLogger(__name__)


class GroupedExperts:
    """FC1 and FC2 of a rank's experts. Holds prepared weights, not the `weights` given.

    Raises `MoEEpConfigError` naming the bytes where they do not fit, and for the values that
    `prepare` refuses.
    """

    def __init__(self, shape: MoEShape, weights: MoEWeights, knobs: KernelKnobs | None) -> None:
        self.device = weights.device
        self._term_dtype = torch.float32 if weights.parallel == "tp" else torch.bfloat16
        shape = replace(shape, intermediate=weights.local_intermediate)
        self.prepared = prepare_weights(shape, weights)
        self._gemm = None
        if weights.num_local_experts:
            self._gemm = GroupedGemm(
                weights.weights_format,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                activation=shape.activation,
                num_local_experts=weights.num_local_experts,
                has_bias13=weights.b13 is not None,
                has_bias2=weights.b2 is not None,
                terms_are_fp32=weights.parallel == "tp",
                knobs=knobs,
                device=weights.device,
            )

    @property
    def held(self) -> PreparedWeights:
        return self.prepared

    @property
    def memory(self) -> dict[str, int]:
        return {"prepared weights": self.prepared.num_bytes}

    def __call__(
        self, x_PH: torch.Tensor, rows_per_expert: Sequence[int], offsets: torch.Tensor
    ) -> torch.Tensor:
        """`SplitBackend`'s expert kernel: BF16 [P, H] -> fresh terms [P, H], FP32 under tp."""
        terms_PH = torch.empty_like(x_PH, dtype=self._term_dtype)
        hidden_PI = x_PH.new_empty(len(x_PH), self.prepared.intermediate)
        with torch.cuda.device(self.device):
            self.run(x_PH, offsets, hidden_PI, terms_PH)
        return terms_PH

    def run(
        self,
        x_PH: torch.Tensor,
        offsets: torch.Tensor,
        out_hidden_PI: torch.Tensor,
        out_terms_PH: torch.Tensor,
    ) -> None:
        """FC1 and FC2 into the caller's tensors. BF16 terms may take the place of `x_PH`."""
        if self._gemm is not None:
            self._gemm.fc1(x_PH, offsets, self.prepared, out_hidden_PI)
            self._gemm.fc2(out_hidden_PI, offsets, self.prepared, out_terms_PH)

    def kernel_builds(self) -> list[KernelBuild]:
        return [] if self._gemm is None else self._gemm.kernel_builds()

    def rows_of_builds(self, max_rows: int) -> list[int]:
        """Numbers of pool rows, up to `max_rows`, that between them take every build of the GEMMs
        which such numbers take."""
        limits = [r.max_rows for r in KNOB_TABLE if self.prepared.weights_format in r.formats]
        num_experts = self.prepared.num_local_experts
        rows = {int(min(usual_rows(limit) * num_experts, max_rows)) for limit in limits}
        return sorted(rows - {0})

    def warmup(self) -> None:
        """Compile and load the GEMMs in every build of the knob table."""
        if self._gemm is not None:
            self._gemm.warmup()

    def update(self, weights: MoEWeights) -> None:
        """Prepare other weights into the same addresses."""
        prepare(weights, out=self.prepared)


class OneRankGrouped(DeviceBackend):
    """The whole layer of one rank, for up to `max_tokens` tokens a call.

    Raises `MoEEpConfigError` naming the bytes where the workspace does not fit.
    """

    def __init__(self, shape: MoEShape, experts: GroupedExperts, max_tokens: int) -> None:
        super().__init__(experts.device)
        self._shape, self._experts = shape, experts
        self._max_rows = max_tokens * shape.top_k
        regions = workspace_regions(shape, shape.num_experts, max_tokens)
        num_bytes = workspace_bytes(regions)
        _log.info("workspace: %d bytes on %s, one for layers alike", num_bytes, self.device)
        try:
            self._workspace = shared_workspace(regions, self.device)
        except torch.OutOfMemoryError as error:
            raise MoEEpConfigError(
                f"max_tokens_per_rank {max_tokens} needs {num_bytes} bytes of workspace on "
                f"{self.device}, where {free_bytes(self.device)} are free; allowed: fewer tokens"
            ) from error
        # 1 + slot of an id that is not an expert. The GPU writes pinned memory directly.
        self._bad_slot = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())

    @property
    def held(self) -> PreparedWeights:
        return self._experts.held

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the device. Layers of one geometry share the workspace."""
        return self._experts.memory | {"shared workspace": self._workspace.num_bytes}

    def load(self) -> None:
        shape, device = self._shape, self.device
        around = permute_and_combine_builds(shape, shape.num_experts)
        compile_all(around + self._experts.kernel_builds())  # several at a time
        self._experts.warmup()
        x_TH = torch.zeros(1, shape.hidden, dtype=torch.bfloat16, device=device)
        weights_TK = torch.zeros(1, shape.top_k, dtype=torch.float32, device=device)
        with self.on_device():
            self._combine = Combine(_combine_config(shape))
            self._permutes = {
                dtype: Permute(_permute_config(shape, shape.num_experts, dtype))
                for dtype in ID_DTYPES
            }
            for dtype in ID_DTYPES:
                masked_TK = torch.full((1, shape.top_k), -1, dtype=dtype, device=device)
                self.launch(x_TH, masked_TK, weights_TK, torch.empty_like(x_TH), 1)
            # No row is routed now, so that the GEMMs end at once.
            for num_rows in self._experts.rows_of_builds(self._max_rows):
                self._launch_experts(num_rows)
            torch.cuda.synchronize()
        self.is_warm = True

    def update_weights(self, weights: MoEWeights) -> None:
        self._experts.update(weights)

    def destroy(self) -> None:
        """Nothing is held beyond this object; work on other streams than the current has ended."""

    def launch(
        self,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        bound: int,
    ) -> None:
        num_tokens, num_rows = len(x_TH), ids_TK.numel()
        if num_tokens == 0:
            return
        workspace = self._workspace
        workspace.order.enter()
        pool_row_TK = workspace["pool_row"][:num_tokens]
        self._permutes[ids_TK.dtype](
            ids_TK,
            num_experts=self._shape.num_experts,
            first_expert=0,
            out_counts=workspace["counts"],
            out_offsets=workspace["offsets"],
            out_src_slot=workspace["src_slot"],
            out_pool_row=pool_row_TK,
            status=self._bad_slot,
            hidden_states=x_TH,
            out_pool=workspace["pool"],
        )
        self._launch_experts(num_rows)
        self._combine(workspace["pool"], pool_row_TK, weights_TK, out_TH)

    def _launch_experts(self, num_rows: int) -> None:
        """FC1 and FC2 on the first rows of the pool, which the terms replace."""
        workspace = self._workspace
        pool_PH, hidden_PI = workspace["pool"][:num_rows], workspace["hidden"][:num_rows]
        self._experts.run(pool_PH, workspace["offsets"], hidden_PI, pool_PH)

    def raise_found(self) -> None:
        bad_slot = int(self._bad_slot)
        if bad_slot:
            self._bad_slot.zero_()
            token_idx, slot_idx = divmod(bad_slot - 1, self._shape.top_k)
            raise MoEEpConfigError(
                f"topk_ids[{token_idx}, {slot_idx}] of an earlier call was not an expert; that "
                "slot was masked; allowed: negative (masked) or below num_experts "
                f"{self._shape.num_experts}"
            )


def permute_and_combine_builds(shape: MoEShape, num_local_experts: int) -> list[KernelBuild]:
    """The kernels around the GEMMs: permute for both dtypes of ids, combine."""
    permutes = [permute_build(_permute_config(shape, num_local_experts, d)) for d in ID_DTYPES]
    return [*permutes, combine_build(_combine_config(shape))]


def _combine_config(shape: MoEShape) -> CombineConfig:
    return CombineConfig(top_k=shape.top_k, hidden=shape.hidden)


def _permute_config(
    shape: MoEShape, num_local_experts: int, id_dtype: torch.dtype
) -> PermuteConfig:
    return PermuteConfig(
        num_local_experts=num_local_experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        ids_are_int64=id_dtype == torch.int64,
    )

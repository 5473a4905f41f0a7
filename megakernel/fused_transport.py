"""Host side of `transport_sm90.py`: dispatch, scale by expert, combine, in one launch."""

import cuda.bindings.driver as cuda
import torch

from moe_ep.comm.group import EpGroup
from moe_ep.megakernel import workspace_memory
from moe_ep.megakernel.compile_cache import load
from moe_ep.megakernel.protocol import Moment
from moe_ep.megakernel.transport_sm90 import TransportSpec, transport_build
from moe_ep.megakernel.workspace import Workspace


def transport_spec(
    num_ranks: int,
    *,
    is_virtual: bool,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens_per_rank: int,
    max_tile_width: int = 32,
    **options: bool,
) -> TransportSpec:
    """Of the kernel for this geometry; `options` as in `TransportSpec`, from `ids_are_int64` on."""
    layout = Workspace(
        num_ranks=num_ranks,
        num_local_experts=-(-num_experts // num_ranks),
        top_k=top_k,
        hidden=hidden,
        intermediate=0,
        max_tokens_per_rank=max_tokens_per_rank,
        max_tile_width=max_tile_width,
    )
    num_launched = num_ranks if is_virtual else 1
    return TransportSpec(
        layout=layout, num_experts=num_experts, num_launched=num_launched, **options
    )


class FusedTransport:
    """The compiled kernel and its workspace, for one rank or a virtual group. Collective.

    ctas_per_rank   default: all SMs, divided between the virtual ranks
    options         of `transport_spec`
    """

    def __init__(
        self,
        group: EpGroup,
        *,
        ctas_per_rank: int | None = None,
        timeout_s: float = 60.0,
        **options: object,
    ) -> None:
        spec = transport_spec(group.num_ranks, is_virtual=group.is_virtual, **options)
        self.memory = workspace_memory.acquire(group, spec.layout)
        num_launched = spec.num_launched
        num_sms = torch.cuda.get_device_properties(group.device).multi_processor_count
        self._ctas_per_rank = ctas_per_rank or num_sms // num_launched
        # [CTAs, moments] nanoseconds of the GPU's global timer, see `protocol.Moment`
        self.stamps = torch.zeros(
            *(self._ctas_per_rank * num_launched, len(Moment)),
            dtype=torch.int64,
            device=group.device,
        )
        self._timeout_ns = int(timeout_s * 1e9)
        self._first_rank = 0 if group.is_virtual else group.rank
        self._function = load(transport_build(spec))

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: torch.Tensor,
        scale: torch.Tensor,
        out: torch.Tensor,
        *,
        late_rank: int = -1,
        late_s: float = 0.0,
    ) -> None:
        """Launch on the current stream; n = launched ranks, C capacity.

        x, out        [n, C, H] BF16
        topk_ids      [n, C, K] int32 or int64 as built
        topk_weights  [n, C, K] FP32
        num_tokens    [n] int32: T of each rank, or -1 - code for one that refuses
        scale         [E] FP32
        All contiguous, on the group's GPU. `late_rank` starts `late_s` seconds
        late, or if that is negative never, for tests.
        """
        self._function(
            *(tensor.data_ptr() for tensor in (x, topk_ids, topk_weights, out)),
            *(num_tokens.data_ptr(), scale.data_ptr()),
            *(self.memory.heaps.data_ptr(), self.memory.local.data_ptr()),
            *(self.memory.post_mortem.address, self._timeout_ns, self.stamps.data_ptr()),
            *(self._first_rank, self._ctas_per_rank, late_rank, int(late_s * 1e9)),
            cuda.CUstream(torch.cuda.current_stream(x.device).cuda_stream),
        )

    def check(self) -> None:
        """Raise what earlier launches have found; see `WorkspaceMemory.check`."""
        self.memory.check()

    def destroy(self) -> None:
        workspace_memory.release(self.memory)

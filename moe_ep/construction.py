"""What builds a layer: its group, its arguments checked, its experts, its backend."""

import socket

import torch

from moe_ep.arguments import check_device, check_kind
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.comm.transport import LocalTransport, Transport
from moe_ep.config import Backend, GroupedGemmConfig, MegaConfig, NcclEpConfig
from moe_ep.megakernel.problem import MoEShape, owned_experts
from moe_ep.placement import ExpertMap, check_placed, slots_shape
from moe_ep.split import SplitBackend, TorchExperts
from moe_ep.weights import MoEWeights


def resolve_group(
    group: EpGroup | torch.distributed.ProcessGroup | None, device: torch.device | str
) -> EpGroup:
    if group is None:
        return EpGroup.default(check_device(device))
    if not isinstance(group, EpGroup):
        return EpGroup.from_process_group(group, check_device(device))
    if group.is_virtual:
        raise MoEEpConfigError(
            f"group is virtual: its {group.num_ranks} ranks share one launch, a layer is one rank; "
            "allowed: EpGroup.single, EpGroup.from_process_group or a ProcessGroup"
        )
    return group


def check_timeout(timeout_s: float) -> None:
    """Seconds that the process group, threads and the GPU's clock of nanoseconds can all count."""
    check_kind("timeout_s", timeout_s, (int, float), "a number")
    if not 1e-3 <= timeout_s <= 1e6:
        raise MoEEpConfigError(f"timeout_s must be from 0.001 to 1e6 seconds, got {timeout_s!r}")


def check_arguments(
    shape: MoEShape,
    weights: MoEWeights,
    max_tokens_per_rank: int,
    group: EpGroup,
    expert_map: ExpertMap | None,
    device: torch.device | str | None = None,
) -> None:
    """What one rank can see by itself. `device`: as asked for, None where it was left open."""
    if not isinstance(shape, MoEShape):
        raise MoEEpConfigError(f"shape must be a MoEShape, got {shape!r}")
    if not isinstance(weights, MoEWeights):
        raise MoEEpConfigError(f"weights must be MoEWeights, got {type(weights).__name__}")
    if isinstance(max_tokens_per_rank, bool) or not isinstance(max_tokens_per_rank, int):
        raise MoEEpConfigError(f"max_tokens_per_rank must be an int, got {max_tokens_per_rank!r}")
    if not 1 <= max_tokens_per_rank < 2**31:
        raise MoEEpConfigError(
            f"max_tokens_per_rank must be from 1 to {2**31 - 1}, got {max_tokens_per_rank}"
        )
    if device is not None:
        asked = check_device(device)
        if asked.type != group.device.type or asked.index not in (None, group.device.index):
            raise MoEEpConfigError(
                f"device is {asked}; allowed: {group.device}, the group's, or None"
            )
    if expert_map is not None and weights.parallel != "ep":
        raise MoEEpConfigError(
            "expert_map needs parallel 'ep': under tp all ranks hold all experts"
        )
    shape = slots_shape(shape, expert_map)
    for name, wanted in (
        ("num_experts", shape.num_experts),
        ("hidden", shape.hidden),
        ("intermediate", shape.intermediate),
        ("is_gated", shape.activation.is_gated),
    ):
        value = getattr(weights, name)
        if value != wanted:
            raise MoEEpConfigError(f"{name} of the weights is {value}, the shape has {wanted}")
    check_placed(weights, expert_map)
    if (weights.rank, weights.num_ranks) != (group.rank, group.num_ranks):
        raise MoEEpConfigError(
            f"weights are those of rank {weights.rank} of {weights.num_ranks}, the group has rank "
            f"{group.rank} of {group.num_ranks}; use weights.shard(parallel, {group.rank}, "
            f"{group.num_ranks}) on the full weights"
        )
    owned = range(shape.num_experts)
    if weights.parallel == "ep":
        owned = owned_experts(shape.num_experts, group.num_ranks, group.rank)
    if tuple(weights.expert_ids) != tuple(owned):
        raise MoEEpConfigError(
            f"weights hold experts {list(weights.expert_ids)}; allowed for rank {group.rank}: "
            f"{list(owned)} in this order"
        )
    if weights.device != group.device:
        raise MoEEpConfigError(f"weights are on {weights.device}, the layer on {group.device}")


def why_apart(group: EpGroup, timeout_s: float) -> str | None:
    """Why the ranks' GPUs are not of one NVLink domain, None where they are or have no GPU.
    Collective, the same on all ranks.

    Raises `MoEEpTimeoutError` naming ranks that did not come.
    """
    if group.num_ranks == 1 or group.device.type != "cuda":
        return None
    gpu = [socket.gethostname(), str(torch.cuda.get_device_properties(group.device).uuid)]
    _, gpus = exchange_records(group, "gpu", gpu, timeout_s)
    hosts = sorted({host for host, _ in gpus})
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts ({', '.join(hosts)})"
    visible = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    cut = [
        rank
        for rank, (_, uuid) in enumerate(gpus)
        if rank != group.rank
        and uuid in visible
        and not torch.cuda.can_device_access_peer(group.device, visible[uuid])
    ]
    _, cuts = exchange_records(group, "gpu/cut", cut, timeout_s)
    pairs = [f"rank {rank} from rank {peer}" for rank, cut in enumerate(cuts) for peer in cut]
    return f"GPUs do not reach each other's memory: {', '.join(pairs)}" if pairs else None


def make_experts(shape: MoEShape, weights: MoEWeights, backend: Backend):
    """The weights as the backend reads them: prepared ones (mega), or the split path's kernel.

    Raises `MoEEpConfigError` for what does not fit, and for values that a kernel refuses.
    """
    if isinstance(backend, MegaConfig):
        from moe_ep.prepared import prepare_weights  # needs CuTe DSL, as the next

        return prepare_weights(shape, weights)
    if isinstance(backend.kernel, GroupedGemmConfig):
        from moe_ep.grouped import GroupedExperts

        return GroupedExperts(shape, weights, backend.kernel.knobs)
    return TorchExperts(weights, shape.activation)


def make_backend(
    backend: Backend,
    experts,
    shape: MoEShape,
    weights: MoEWeights,
    group: EpGroup,
    max_tokens: int,
    liveness: Liveness | None,
    layer_id: int,
    timeout_s: float,
):
    """The backend that runs `experts` of `make_experts`. Collective."""
    if isinstance(backend, MegaConfig):
        from moe_ep.mega import MegaBackend

        return MegaBackend(
            *(shape, experts, group, max_tokens, backend.megakernel, liveness, timeout_s),
            parallel=weights.parallel,
        )
    is_alone = group.num_ranks == 1 and weights.parallel == "ep"
    if is_alone and isinstance(backend.kernel, GroupedGemmConfig):
        from moe_ep.grouped import OneRankGrouped

        return OneRankGrouped(shape, experts, max_tokens)
    transport = make_transport(group, liveness, layer_id, shape, weights.parallel, timeout_s)
    if group.num_ranks > 1 and isinstance(backend.comm, NcclEpConfig):
        from moe_ep.split_nccl_ep import make_nccl_ep_split

        return make_nccl_ep_split(
            *(backend.comm, experts, shape, weights, group, max_tokens),
            *(transport, liveness, timeout_s),
        )
    return SplitBackend(weights, transport, experts)


def make_transport(
    group: EpGroup,
    liveness: Liveness | None,
    layer_id: int,
    shape: MoEShape,
    parallel: str,
    timeout_s: float,
) -> Transport:
    if group.num_ranks == 1:
        return LocalTransport(parallel)
    owner_E = None
    if parallel == "ep":
        owners = [
            rank
            for rank in range(group.num_ranks)
            for _ in owned_experts(shape.num_experts, group.num_ranks, rank)
        ]
        owner_E = torch.tensor(owners, device=group.device)
    return TorchTransport(
        group,
        liveness,
        layer_id=layer_id,
        hidden=shape.hidden,
        top_k=shape.top_k,
        owner_E=owner_E,
        timeout_s=timeout_s,
    )

"""The ranks that share one layer: any subset of the job's processes, or one process alone."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class EpGroup:
    """One rank's view of its group.

    rank, num_ranks   position in the group, not in the job
    device            where this rank's tensors live
    process_group     moves the bytes; None for one rank without torch.distributed
    store             keys and values of this group alone; None as above
    global_ranks      rank in the job of each rank of the group
    is_virtual        all ranks live in this process, see `virtual`
    """

    rank: int
    num_ranks: int
    device: torch.device
    process_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    global_ranks: tuple[int, ...] = (0,)
    is_virtual: bool = False

    @classmethod
    def single(cls, device: torch.device | str) -> "EpGroup":
        """One rank without a process group: plain `python`."""
        return cls(rank=0, num_ranks=1, device=_with_index(torch.device(device)))

    @classmethod
    def virtual(cls, num_ranks: int, device: torch.device | str = "cuda") -> "EpGroup":
        """`num_ranks` ranks of one launch on one GPU, each with some of its SMs.

        For tests: the protocols of 2, 4 or 8 ranks run without a second GPU. Inputs and outputs of
        the ranks are stacked. Raises `MoEEpConfigError` for less than 2 ranks.
        """
        if num_ranks < 2:
            raise MoEEpConfigError(f"num_ranks must be at least 2, got {num_ranks}")
        return cls(
            rank=0,
            num_ranks=num_ranks,
            device=_with_index(torch.device(device)),
            global_ranks=tuple(range(num_ranks)),
            is_virtual=True,
        )

    @classmethod
    def from_process_group(
        cls, process_group: dist.ProcessGroup, device: torch.device | str
    ) -> "EpGroup":
        """The ranks of `process_group`, which may be any subset of the job, e.g. ranks 1 and 3.

        Raises `MoEEpConfigError` if this process is not one of them, or if the group's backend
        moves no tensors of `device`.
        """
        if not isinstance(process_group, dist.ProcessGroup):
            raise MoEEpConfigError(
                "group must be a torch.distributed ProcessGroup that this process belongs to, "
                f"got {process_group!r}"
            )
        device = _with_index(torch.device(device))
        backends = _backends(process_group)
        if device.type not in backends:
            raise MoEEpConfigError(
                f"group moves tensors of {', '.join(backends)}, not of device {device}; "
                "initialise the process group with backend 'nccl' for GPUs, 'gloo' for the CPU"
            )
        return cls(
            rank=process_group.rank(),
            num_ranks=process_group.size(),
            device=device,
            process_group=process_group,
            store=process_group.get_group_store(),
            global_ranks=tuple(dist.get_process_group_ranks(process_group)),
        )

    @classmethod
    def default(cls, device: torch.device | str) -> "EpGroup":
        """Every rank of the job if torch.distributed is initialised, else one rank alone.

        Raises `MoEEpConfigError` in a process that torchrun started beside others and that did
        not initialise torch.distributed: it would silently run as one rank of many.
        """
        if dist.is_available() and dist.is_initialized():
            return cls.from_process_group(dist.group.WORLD, device)
        world_size = os.environ.get("WORLD_SIZE", "1")
        if world_size != "1":
            raise MoEEpConfigError(
                f"WORLD_SIZE is {world_size} but torch.distributed is not initialised; call "
                "moe_ep.launch.bootstrap.init() or torch.distributed.init_process_group() first, "
                "or give group=EpGroup.single(device) for a layer of this process alone"
            )
        return cls.single(device)

    @property
    def backend(self) -> str | None:
        """What moves this device's tensors: "gloo", "nccl", ...; None without a process group."""
        return _backends(self.process_group)[self.device.type] if self.process_group else None

    def rank_name(self, rank: int) -> str:
        """`rank 1`, with the rank in the job where that differs: `rank 1 (global rank 3)`."""
        global_rank = self.global_ranks[rank]
        return f"rank {rank}" if global_rank == rank else f"rank {rank} (global rank {global_rank})"


def _with_index(device: torch.device) -> torch.device:
    """`cuda` is the current GPU, so that devices compare equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend, from torch's `cpu:gloo,cuda:nccl`."""
    pairs = dist.get_backend_config(process_group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)

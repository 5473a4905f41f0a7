"""From a bare process to an `EpGroup`, and back, each in one order.

    init       torchrun's environment -> device -> process group -> EpGroup
    shutdown   device idle -> every rank here -> NVSHMEM -> process group

Under torchrun every process is one rank; plain `python` is one rank without a process group.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTransportError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.comm.symmetric import finish_nvshmem
from moe_ep.launch import log

# torchrun sets all five. A cluster may export the address everywhere, so it alone says nothing.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_QUIET_S = 10.0
_log = logging.getLogger(__name__)


@contextmanager
def session(device: str | None = None, *, timeout_s: float = 600.0) -> Iterator[EpGroup]:
    """`init`, and `shutdown` of what it started. After an exception no other rank is waited for:
    NCCL would, so that on GPUs the process group is left to the end of the process."""
    is_ours = not dist.is_initialized()
    group = init(device, timeout_s=timeout_s)
    try:
        yield group
    except BaseException:
        if is_ours and dist.is_initialized() and group.device.type == "cpu":
            dist.destroy_process_group()
        raise
    if is_ours:
        shutdown(group, timeout_s=timeout_s)


def init(device: str | None = None, *, timeout_s: float = 600.0) -> EpGroup:
    """The group of all ranks of this job. Collective under torchrun.

    device     "cpu" or "cuda"; None takes a GPU where torch sees one. On "cuda" the rank's GPU is
               LOCAL_RANK, made current before NCCL starts
    timeout_s  limit of the process group's own collectives, long enough for ranks that load
               checkpoints at different speeds; a layer has a shorter one of its own

    A process group that is initialised already is taken as it is, with the current GPU. Logging
    gets the rank prefix. Raises `MoEEpConfigError` naming the variable that is missing or wrong,
    or the device that is not there.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_initialized():
        bound = bind_device(device, torch.cuda.current_device() if device == "cuda" else 0)
    elif _is_launched():
        rank, num_ranks, local_rank = (_integer(name) for name in _RANK_VARIABLES)
        if rank >= num_ranks:
            raise MoEEpConfigError(f"RANK is {rank}; allowed: below WORLD_SIZE, {num_ranks}")
        bound = bind_device(device, local_rank)
        with _reported_wait(rank, num_ranks):
            start_process_group(bound, timeout_s, init_method="env://")
    else:
        bound = bind_device(device, 0)
    group = EpGroup.default(bound)
    log.setup(group.rank, group.num_ranks)
    return group


def shutdown(group: EpGroup, *, timeout_s: float = 600.0) -> None:
    """End what `init` started, once every rank has come here. Destroy the layers before.

    Waits for the others, on GPUs at most `timeout_s`, on CPUs that of `init`: a rank that leaves
    early closes connections that the last call of another may still use. Raises
    `MoEEpTransportError` or, naming the ranks that did not come, `MoEEpTimeoutError`.
    """
    if group.process_group is None:
        return
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    try:
        if group.device.type == "cpu":
            dist.barrier(group.process_group)
        else:  # through the store: NCCL would wait for a lost rank and then end the process
            exchange_records(group, "shutdown", None, timeout_s)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise MoEEpTransportError(
            f"the ranks cannot end together, one of them is lost or still busy: {reason}"
        ) from None
    finish_nvshmem()
    dist.destroy_process_group()


def bind_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank, made current. Raises `MoEEpConfigError` if it is not there."""
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise MoEEpConfigError(f"device {device!r} is not known; allowed: 'cpu', 'cuda'")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise MoEEpConfigError(
            f"local rank {local_rank} has no GPU: torch sees {num_gpus} here; start at most "
            f"{num_gpus} ranks on this host, or ask for device 'cpu'"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def start_process_group(device: torch.device, timeout_s: float, **rendezvous: Any) -> None:
    """`init_process_group` with gloo, and NCCL beside it on a GPU (objects still travel by gloo).

    rendezvous  how the ranks meet: `init_method`, or `store` with `rank` and `world_size`
    """
    if device.type == "cuda":
        backend, rendezvous = "cpu:gloo,cuda:nccl", rendezvous | {"device_id": device}
    else:
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **rendezvous)


@contextmanager
def _reported_wait(rank: int, num_ranks: int) -> Iterator[None]:
    """Say what a start waits for that takes longer than `_QUIET_S`."""
    address = ":".join(os.environ[name] for name in _ADDRESS_VARIABLES)
    text = "rank %d waits at %s for the other ranks of %d"
    timer = threading.Timer(_QUIET_S, _log.warning, args=(text, rank, address, num_ranks))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_launched() -> bool:
    """Whether torchrun started this process; an environment with gaps is an error."""
    given = [name for name in _RANK_VARIABLES if name in os.environ]
    if not given:
        return False
    needed = _RANK_VARIABLES + _ADDRESS_VARIABLES
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise MoEEpConfigError(
            f"{', '.join(given)} set but {', '.join(missing)} missing: start ranks with torchrun, "
            "which sets all of them, or unset the given ones to run as one rank"
        )
    return True


def _integer(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise MoEEpConfigError(f"{name} is {text!r}; allowed: an integer from 0 up")
    return int(text)

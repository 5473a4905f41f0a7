"""Memory that lies at the same offset on every rank of a group and that peers read and write.

    one rank          plain GPU memory, no NVSHMEM
    virtual ranks     plain GPU memory, one part after another
    several ranks     NVSHMEM through nvshmem4py's host API; kernels see mapped peer addresses

NVSHMEM starts with the first buffer of the first group of several ranks; that group is the world,
and every later one must be it or a part of it. Regions are taken from NVSHMEM one at a time, each
collectively by the whole world, and cut into named buffers. Where NVSHMEM_SYMMETRIC_SIZE is set
there is one region of that size and no other.
"""

import base64
import os
import pickle
import socket
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_ep.comm.errors import (
    MoEEpConfigError,
    MoEEpError,
    MoEEpStateError,
    MoEEpTransportError,
    MoEEpUnavailableError,
)
from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records

SIZE_VARIABLE = "NVSHMEM_SYMMETRIC_SIZE"
ALIGNMENT = 1024
EXCHANGE_S = 60.0  # that ranks wait for each other where a layer is built
_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Region:
    """Memory of every rank: this process's own as bytes, each rank's address as seen from here."""

    memory: torch.Tensor
    addresses: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of one rank."""
        return self.memory.shape[-1]


@dataclass(frozen=True, eq=False)
class SymmetricBuffer:
    """A named part of a region, the same on every rank of its group.

    memory     uint8, this rank's bytes, zero at first; of virtual ranks [ranks, bytes]
    addresses  of each rank of the group, as seen from this process
    """

    name: str
    memory: torch.Tensor
    addresses: tuple[int, ...]
    region_idx: int
    offset: int


class MemorySource(Protocol):
    """Where regions come from. `size_limit`: bytes of the only region, None for any number."""

    size_limit: int | None

    def free_bytes(self) -> int | None:
        """Most bytes of a new region; None: not known beforehand."""
        ...

    def open_region(self, num_bytes: int) -> Region: ...

    def close_region(self, region: Region) -> None: ...


class PlainMemory:
    """One rank, or all ranks of a virtual group, in this process."""

    size_limit = None

    def __init__(self, group: EpGroup) -> None:
        self._group = group

    def free_bytes(self) -> None:
        return None

    def open_region(self, num_bytes: int) -> Region:
        shape = (self._group.num_ranks, num_bytes)
        memory = torch.zeros(shape, dtype=torch.uint8, device=self._group.device)
        first = memory.data_ptr()
        return Region(memory, tuple(first + i * num_bytes for i in range(shape[0])))

    def close_region(self, region: Region) -> None:
        pass  # torch frees it with its last tensor


class NvshmemMemory:
    """Regions of NVSHMEM's symmetric heap; every rank of `world` opens and closes the same ones."""

    def __init__(self, world: EpGroup) -> None:
        self.world = world
        size = os.environ.get(SIZE_VARIABLE)
        self.size_limit = None if size is None else parse_size(size)
        start_nvshmem(world)

    def free_bytes(self) -> int | None:
        if self.world.device.type != "cuda":
            return None
        torch.cuda.empty_cache()  # NVSHMEM cannot take what torch keeps
        return torch.cuda.mem_get_info(self.world.device)[0]

    def open_region(self, num_bytes: int) -> Region:
        import nvshmem.core as nvshmem

        try:
            memory = nvshmem.tensor((num_bytes,), dtype=torch.uint8)
        except Exception as error:  # nvshmem4py raises its own, and Exception itself
            raise MoEEpConfigError(
                f"NVSHMEM cannot give {num_bytes} bytes of symmetric memory ({error}); set "
                f"{SIZE_VARIABLE} to at least {num_bytes} before the first layer is built, or free "
                "GPU memory"
            ) from error
        peers = [r for r in range(self.world.num_ranks) if r != self.world.rank]
        try:
            addresses = {r: nvshmem.get_peer_tensor(memory, r).data_ptr() for r in peers}
        except Exception as error:
            raise MoEEpUnavailableError(
                "a peer's symmetric memory cannot be mapped here; all ranks must be GPUs of one "
                f"NVLink domain ({error})"
            ) from error
        addresses[self.world.rank] = memory.data_ptr()
        return Region(memory, tuple(addresses[r] for r in range(self.world.num_ranks)))

    def close_region(self, region: Region) -> None:
        import nvshmem.core as nvshmem

        nvshmem.free_tensor(region.memory)


class SymmetricHeap:
    """Named buffers of the groups of one process."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self._regions: list[Region] = []
        self._buffers: dict[str, SymmetricBuffer] = {}

    def allocate(self, group: EpGroup, name: str, num_bytes: int) -> SymmetricBuffer:
        """A new buffer of zeros. Collective over `group`.

        Raises `MoEEpStateError` for a name that is in use, or where ranks disagree on its place,
        and `MoEEpConfigError` with variable and size where it does not fit.
        """
        is_shared = group.num_ranks > 1 and not group.is_virtual
        num_bytes = _aligned(num_bytes)
        place = refusal = None
        try:
            place = self._find(group, name, num_bytes)
        except (MoEEpConfigError, MoEEpStateError) as error:
            refusal = error
        if is_shared:
            # Launches of this GPU have ended before any rank clears its memory, or stands in
            # NVSHMEM's barrier, for which a kernel that fills a GPU would leave no room.
            torch.cuda.synchronize(group.device)
            self._agree(group, name, num_bytes, place, refusal)
        elif refusal is not None:
            raise refusal
        region_idx, offset, new_bytes = place
        if new_bytes:
            self._regions.append(self._source.open_region(new_bytes))
        region = self._regions[region_idx]
        memory = region.memory[..., offset : offset + num_bytes]
        memory.zero_()
        if is_shared:
            # No peer may signal into memory that is still to be cleared.
            torch.cuda.synchronize(group.device)
            exchange_records(group, "symmetric/cleared", None, EXCHANGE_S)
        ranks = range(group.num_ranks) if group.is_virtual else _world_ranks(self._source, group)
        addresses = tuple(region.addresses[rank] + offset for rank in ranks)
        buffer = SymmetricBuffer(name, memory, addresses, region_idx, offset)
        self._buffers[name] = buffer
        return buffer

    def free(self, buffer: SymmetricBuffer) -> None:
        """Give the bytes back; its region stays for the next buffer. Idempotent."""
        if self._buffers.get(buffer.name) is buffer:
            del self._buffers[buffer.name]

    def close(self) -> None:
        """Return every region. Collective over the world; kernels that use them have ended."""
        self._buffers.clear()
        while self._regions:
            self._source.close_region(self._regions.pop())

    def _find(self, group: EpGroup, name: str, num_bytes: int) -> tuple[int, int, int]:
        """Region and offset of the first gap that is large enough; bytes of the region that is to
        be opened for it, 0 for one that is there."""
        if name in self._buffers:
            raise MoEEpStateError(f"symmetric buffer {name!r} is allocated already")
        for region_idx, region in enumerate(self._regions):
            offset = 0
            for used in self._used(region_idx):
                if used.offset - offset >= num_bytes:
                    break
                offset = used.offset + used.memory.shape[-1]
            if offset + num_bytes <= region.num_bytes:
                return region_idx, offset, 0
        return len(self._regions), 0, self._new_bytes(group, num_bytes)

    def _used(self, region_idx: int) -> list[SymmetricBuffer]:
        buffers = (b for b in self._buffers.values() if b.region_idx == region_idx)
        return sorted(buffers, key=lambda buffer: buffer.offset)

    def _new_bytes(self, group: EpGroup, num_bytes: int) -> int:
        """Bytes of a new region that holds `num_bytes`."""
        limit = self._source.size_limit
        if limit is not None and (self._regions or num_bytes > limit):
            used = sum(buffer.memory.shape[-1] for buffer in self._buffers.values())
            raise MoEEpConfigError(
                f"{num_bytes} bytes of symmetric memory do not fit beside {used} in use: "
                f"{SIZE_VARIABLE} is {limit}; set it to at least {used + num_bytes}"
            )
        world = getattr(self._source, "world", group)
        if group.num_ranks != world.num_ranks:
            raise MoEEpConfigError(
                f"{num_bytes} bytes of symmetric memory for {group.num_ranks} ranks do not fit in "
                f"what all {world.num_ranks} have taken together; set {SIZE_VARIABLE} to the sum "
                "of all layers before the first one is built"
            )
        new_bytes = num_bytes if limit is None else limit
        free = self._source.free_bytes()
        if free is not None and new_bytes > free:
            raise MoEEpConfigError(
                f"{new_bytes} bytes of symmetric memory are needed on {group.device}, where {free} "
                "are free; lower max_tokens_per_rank, or free GPU memory"
            )
        return new_bytes

    def _agree(
        self,
        group: EpGroup,
        name: str,
        num_bytes: int,
        place: tuple[int, int, int] | None,
        refusal: MoEEpError | None,
    ) -> None:
        """All ranks raise or none, before any of them waits for the others in NVSHMEM."""
        record = [name, num_bytes, place, None if refusal is None else str(refusal)]
        _, records = exchange_records(group, "symmetric", record, EXCHANGE_S)
        if refusal is not None:
            raise refusal
        for rank, (*_, text) in enumerate(records):
            if text is not None:
                raise MoEEpConfigError(f"{group.rank_name(rank)}: {text}")
        if any(other != records[group.rank] for other in records):
            raise MoEEpStateError(
                "ranks place a symmetric buffer (name, bytes, [region, offset, bytes of a new "
                f"region]) differently: { ({r: other[:3] for r, other in enumerate(records)}) }; "
                "build and destroy layers in the same order on every rank"
            )


_nvshmem_heap: SymmetricHeap | None = None


def heap_of(group: EpGroup) -> SymmetricHeap:
    """The process's heap for groups of several ranks, started by the first; a new one for one rank
    and for virtual ranks, which share nothing.

    Raises `MoEEpConfigError` for a group that is not part of the first.
    """
    global _nvshmem_heap
    if group.num_ranks == 1 or group.is_virtual:
        return SymmetricHeap(PlainMemory(group))
    if _nvshmem_heap is None:
        _nvshmem_heap = SymmetricHeap(NvshmemMemory(group))
    _world_ranks(_nvshmem_heap._source, group)
    return _nvshmem_heap


def finish_nvshmem() -> None:
    """Return all symmetric memory and end NVSHMEM. Collective over the first group; once per
    process, after the last layer, before the process group is destroyed."""
    global _nvshmem_heap
    if _nvshmem_heap is None:
        return
    import nvshmem.core as nvshmem

    torch.cuda.synchronize()
    _nvshmem_heap.close()
    _nvshmem_heap = None
    nvshmem.finalize()


def start_nvshmem(group: EpGroup) -> None:
    """NVSHMEM of the ranks of `group`, each bound to its GPU first. Collective.

    Raises `MoEEpUnavailableError` without nvshmem4py, `MoEEpConfigError` naming ranks that share a
    GPU, `MoEEpTransportError` where NVSHMEM itself does not start.
    """
    try:
        import nvshmem.core as nvshmem

        device_class = _device_class()
    except ImportError as error:
        raise MoEEpUnavailableError(
            f"several ranks need nvshmem4py (pip install 'moe-ep[gpu]'): {error}"
        ) from error
    torch.cuda.set_device(group.device)
    gpu = [socket.gethostname(), str(torch.cuda.get_device_properties(group.device).uuid)]
    _, gpus = exchange_records(group, "nvshmem/gpu", gpu, EXCHANGE_S)
    check_distinct_gpus(gpus)
    device = device_class(group.device.index)
    device.set_current()
    unique_id = nvshmem.get_unique_id() if group.rank == 0 else None
    # Pickled as torch would to broadcast it; the store is the job's own.
    text = base64.b64encode(pickle.dumps(unique_id)).decode()
    _, texts = exchange_records(group, "nvshmem/unique_id", text, EXCHANGE_S)
    try:
        nvshmem.init(
            device=device,
            uid=pickle.loads(base64.b64decode(texts[0])),
            rank=group.rank,
            nranks=group.num_ranks,
            initializer_method="uid",
        )
    except Exception as error:
        raise MoEEpTransportError(f"NVSHMEM does not start: {error}") from error


def _device_class() -> type:
    """cuda.core's `Device`, which stood elsewhere in what nvshmem4py needed for NVSHMEM 3.4."""
    try:
        from cuda.core import Device
    except ImportError:
        from cuda.core.experimental import Device
    return Device


def check_distinct_gpus(gpus: list[list[str]]) -> None:
    """`gpus`: (host, GPU) of each rank. Raises `MoEEpConfigError` naming ranks that share one."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        ranks_of.setdefault(tuple(gpu), []).append(rank)
    for (host, gpu), ranks in ranks_of.items():
        if len(ranks) > 1:
            raise MoEEpConfigError(
                f"ranks {', '.join(map(str, ranks))} share GPU {gpu} of {host}; allowed: one rank "
                "per GPU"
            )


def parse_size(text: str) -> int:
    """Bytes of NVSHMEM_SYMMETRIC_SIZE: a number, with K, M, G or T for powers of 1024.

    Raises `MoEEpConfigError` for anything else.
    """
    number, suffix = text.strip(), 1
    if number[-1:].upper() in _SUFFIXES:
        number, suffix = number[:-1], _SUFFIXES[number[-1].upper()]
    try:
        size = int(float(number) * suffix)
    except ValueError:
        size = 0
    if size <= 0:
        raise MoEEpConfigError(
            f"{SIZE_VARIABLE} is {text!r}; allowed: a positive number of bytes, K, M, G or T behind"
        )
    return size


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT


def _world_ranks(source: MemorySource, group: EpGroup) -> list[int]:
    """Rank in the world of each rank of `group`."""
    world = getattr(source, "world", group)
    outside = [rank for rank in group.global_ranks if rank not in world.global_ranks]
    if outside:
        raise MoEEpConfigError(
            f"NVSHMEM was started by global ranks {list(world.global_ranks)}; a later group must "
            f"be a part of it, but has {outside} too"
        )
    return [world.global_ranks.index(rank) for rank in group.global_ranks]

"""The regions of `workspace.py` in a GPU's memory, shared by all layers of one geometry."""

from collections.abc import Sequence

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.post_mortem import PostMortem
from moe_ep.comm.symmetric import heap_of
from moe_ep.megakernel.bound_call import stream_handle
from moe_ep.megakernel.protocol import Phase
from moe_ep.megakernel.workspace import Workspace

_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
PHASE_NAMES = {int(phase): phase.name.lower() for phase in Phase}


class WorkspaceMemory:
    """One rank's memory, or that of all ranks of a virtual group ("launched" ranks).

    heaps        [R] int64 on the GPU, address of each rank's symmetric regions
    local        [launched, bytes] uint8, local regions
    post_mortem  what waits that ran out of time leave behind

    Collective over `group`. Raises `MoEEpConfigError` naming the bytes where they do not fit.
    """

    def __init__(self, group: EpGroup, layout: Workspace, name: str = "workspace") -> None:
        self.group, self.layout = group, layout
        self.num_launched = group.num_ranks if group.is_virtual else 1
        num_symmetric, num_local = layout.num_bytes("symmetric"), layout.num_bytes("local")
        self._heap = heap_of(group)
        self._symmetric = None
        try:
            self._symmetric = self._heap.allocate(group, name, num_symmetric)
            self.local = torch.zeros(
                self.num_launched, num_local, dtype=torch.uint8, device=group.device
            )
        except torch.OutOfMemoryError as error:
            self.destroy()
            raise MoEEpConfigError(
                f"the workspace needs {num_symmetric} bytes of symmetric and {num_local} of local "
                f"memory for each rank on {group.device}, where {free_bytes(group.device)} are "
                f"free; lower max_tokens_per_rank, {layout.max_tokens_per_rank}"
            ) from error
        self.heaps = torch.tensor(self._symmetric.addresses, dtype=torch.int64, device=group.device)
        self.post_mortem = PostMortem(self.num_launched)
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle: int | None = None

    def region(self, name: str) -> torch.Tensor:
        """[launched, *shape] view of a region."""
        region = next(r for r in self.layout.regions if r.name == name)
        memory = self.local if region.scope == "local" else self._symmetric.memory
        memory = memory.view(self.num_launched, -1)
        first = self.layout.offsets[name]
        part = memory[:, first : first + region.num_bytes]
        return part.view(_DTYPES[region.dtype]).view(self.num_launched, *region.shape)

    def enter(self) -> int:
        """Before a launch on the current stream, whose handle it gives: that stream waits for the
        last launch's, if that was another one.

        What a CUDA graph replays is ordered by whoever replays it.
        """
        handle = stream_handle(self.group.device)
        if handle != self._last_handle and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.group.device)
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream, self._last_handle = stream, handle
        return handle

    def check(self, refusals: Sequence[str] = ()) -> None:
        """Raise what earlier launches have found, see `PostMortem.check`. Does not wait."""
        own_rank = None if self.group.is_virtual else self.group.rank
        top_k = self.layout.top_k
        self.post_mortem.check(PHASE_NAMES, top_k, refusals=refusals, own_rank=own_rank)

    def destroy(self) -> None:
        """Give the symmetric part back; kernels that use it have ended. Idempotent."""
        if self._symmetric is not None:
            self._heap.free(self._symmetric)


def free_bytes(device: torch.device) -> int:
    """What a tensor may still take of a GPU: within this process's limit, cached bytes included."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, limit - reserved) + reserved - torch.cuda.memory_allocated(device)


_shared: dict[tuple, tuple[WorkspaceMemory, int]] = {}


def acquire(group: EpGroup, layout: Workspace) -> WorkspaceMemory:
    """The memory of this geometry, which the layers of a process share. Collective."""
    key = (group.global_ranks, group.device, group.is_virtual, layout)
    memory, num_users = _shared.get(key, (None, 0))
    if memory is None:
        # The same on every rank, whatever else each of them holds.
        memory = WorkspaceMemory(group, layout, name=f"workspace of {group.global_ranks}: {layout}")
    _shared[key] = memory, num_users + 1
    return memory


def release(memory: WorkspaceMemory) -> None:
    """Undo one `acquire`; the last user's frees the memory."""
    key = (memory.group.global_ranks, memory.group.device, memory.group.is_virtual, memory.layout)
    shared, num_users = _shared.get(key, (None, 0))
    if shared is not memory:
        return
    if num_users > 1:
        _shared[key] = memory, num_users - 1
    else:
        del _shared[key]
        memory.destroy()

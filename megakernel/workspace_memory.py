"""The regions of `workspace.py` in a GPU's memory, shared by all layers of one geometry."""

import functools
from collections import Counter
from collections.abc import Sequence

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.post_mortem import PostMortem
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.comm.symmetric import EXCHANGE_S, heap_of
from moe_ep.megakernel.launch_order import LaunchOrder
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
        if group.device.type == "cuda":  # the first launch may be on another stream
            torch.cuda.synchronize(group.device)
        self.post_mortem = PostMortem(self.num_launched)
        self.num_users = 0  # see `acquire`
        is_one_of_several = group.num_ranks > 1 and not group.is_virtual
        if is_one_of_several:
            _post_mortems.append(self.post_mortem)
        self.order = (
            _order_of_ranks(group.device) if is_one_of_several else LaunchOrder(group.device)
        )

    def region(self, name: str) -> torch.Tensor:
        """[launched, *shape] view of a region."""
        region = next(r for r in self.layout.regions if r.name == name)
        memory = self.local if region.scope == "local" else self._symmetric.memory
        memory = memory.view(self.num_launched, -1)
        first = self.layout.offsets[name]
        part = memory[:, first : first + region.num_bytes]
        return part.view(_DTYPES[region.dtype]).view(self.num_launched, *region.shape)

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


# A launch that waits for a lost peer writes its record even after the layer is destroyed.
_post_mortems: list[PostMortem] = []


@functools.cache
def _order_of_ranks(device: torch.device) -> LaunchOrder:
    """Of all launches that wait for other ranks. One fills the GPU: were two on two streams, a rank
    could begin with the one and its peer with the other, and both would wait for ever."""
    return LaunchOrder(device)


_shared: dict[tuple, WorkspaceMemory] = {}
_num_made: Counter[tuple] = Counter()


def acquire(group: EpGroup, layout: Workspace) -> WorkspaceMemory:
    """The memory of this geometry, which the layers of a process share; another one once a wait in
    it has run out of time, on whichever rank. Collective."""
    key = (group.global_ranks, group.device, group.is_virtual, layout)
    memory, number = _shared.get(key), _num_made[key]
    is_usable = memory is not None and not memory.post_mortem.records()
    if not group.is_virtual:
        _, states = exchange_records(group, "workspace/shared", [is_usable, number], EXCHANGE_S)
        is_usable = all(usable for usable, _ in states)
        number = max(number for _, number in states)
    if not is_usable:
        # The same name on every rank, whatever else each of them holds.
        name = f"workspace {number} of {group.global_ranks}: {layout}"
        _num_made[key] = number + 1
        memory = _shared[key] = WorkspaceMemory(group, layout, name)
    memory.num_users += 1
    return memory


def release(memory: WorkspaceMemory) -> None:
    """Undo one `acquire`; the last user's frees the memory."""
    memory.num_users -= 1
    if memory.num_users == 0:
        key = (memory.group.global_ranks, memory.group.device, memory.group.is_virtual)
        if _shared.get((*key, memory.layout)) is memory:
            del _shared[*key, memory.layout]
        memory.destroy()

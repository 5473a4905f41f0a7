"""Symmetric heap without a GPU: places, limits, sharing, teardown order; NVSHMEM is imitated."""

import sys
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moe_ep.comm import symmetric
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.comm.symmetric import ALIGNMENT, PlainMemory, SymmetricHeap, heap_of
from moe_ep.megakernel import workspace_memory
from moe_ep.megakernel.workspace import Workspace

ONE_RANK = EpGroup.single("cpu")
LAYOUT = Workspace(
    num_ranks=2,
    num_local_experts=2,
    top_k=2,
    hidden=16,
    intermediate=8,
    max_tokens_per_rank=3,
    max_tile_width=8,
)


class CountedMemory(PlainMemory):
    """Plain memory that knows which regions are open and has a limit."""

    def __init__(self, group: EpGroup, size_limit: int | None = None) -> None:
        super().__init__(group)
        self.size_limit = size_limit
        self.opened: list[int] = []
        self.num_closed = 0

    def open_region(self, num_bytes):
        self.opened.append(num_bytes)
        return super().open_region(num_bytes)

    def close_region(self, region):
        self.num_closed += 1


def test_buffers_are_aligned_disjoint_and_zero():
    heap = SymmetricHeap(CountedMemory(ONE_RANK, size_limit=8 * ALIGNMENT))
    buffers = [heap.allocate(ONE_RANK, name, size) for name, size in (("a", 5), ("b", 1025))]
    assert [buffer.offset for buffer in buffers] == [0, ALIGNMENT]
    assert [buffer.memory.numel() for buffer in buffers] == [ALIGNMENT, 2 * ALIGNMENT]
    for buffer in buffers:
        assert buffer.memory.data_ptr() == buffer.addresses[0]
        assert not buffer.memory.any()


def test_freed_bytes_are_used_again_and_cleared():
    source = CountedMemory(ONE_RANK, size_limit=3 * ALIGNMENT)
    heap = SymmetricHeap(source)
    buffers = [heap.allocate(ONE_RANK, name, ALIGNMENT) for name in "abc"]
    buffers[1].memory.fill_(7)
    heap.free(buffers[1])
    again = heap.allocate(ONE_RANK, "d", ALIGNMENT)
    assert again.offset == ALIGNMENT and not again.memory.any()
    assert source.opened == [3 * ALIGNMENT]


def test_what_does_not_fit_names_the_variable_and_the_size_needed():
    heap = SymmetricHeap(CountedMemory(ONE_RANK, size_limit=4 * ALIGNMENT))
    heap.allocate(ONE_RANK, "a", 3 * ALIGNMENT)
    with pytest.raises(MoEEpConfigError, match="NVSHMEM_SYMMETRIC_SIZE is 4096; set it to at leas"):
        heap.allocate(ONE_RANK, "b", 2 * ALIGNMENT)
    heap.allocate(ONE_RANK, "c", ALIGNMENT)


def test_without_a_size_every_buffer_that_does_not_fit_opens_a_region():
    source = CountedMemory(ONE_RANK)
    heap = SymmetricHeap(source)
    for name in "ab":
        heap.allocate(ONE_RANK, name, ALIGNMENT)
    heap.close()
    assert source.opened == [ALIGNMENT, ALIGNMENT] and source.num_closed == 2


def test_a_name_in_use_is_refused():
    heap = SymmetricHeap(PlainMemory(ONE_RANK))
    heap.allocate(ONE_RANK, "a", 1)
    with pytest.raises(MoEEpStateError, match="'a' is allocated already"):
        heap.allocate(ONE_RANK, "a", 1)


def test_virtual_ranks_have_parts_of_their_own():
    group = EpGroup.virtual(4, "cpu")
    buffer = heap_of(group).allocate(group, "a", 100)
    for rank in range(4):
        buffer.memory[rank].fill_(rank)
    assert buffer.memory.shape == (4, ALIGNMENT)
    assert buffer.addresses == tuple(buffer.memory[rank].data_ptr() for rank in range(4))


def test_a_virtual_group_has_at_least_two_ranks():
    with pytest.raises(MoEEpConfigError, match="num_ranks must be at least 2, got 1"):
        EpGroup.virtual(1, "cpu")


@pytest.mark.parametrize(
    "text, size", [("4096", 4096), ("1g", 2**30), (" 1.5G ", 3 * 2**29), ("2K", 2048)]
)
def test_sizes_are_read_as_nvshmem_reads_them(text, size):
    assert symmetric.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "ten", "1GB"])
def test_a_size_that_is_none_is_named(text):
    with pytest.raises(MoEEpConfigError, match="NVSHMEM_SYMMETRIC_SIZE is"):
        symmetric.parse_size(text)


def test_ranks_that_share_a_gpu_are_named():
    symmetric.check_distinct_gpus([["host", "A"], ["host", "B"], ["other", "A"]])
    with pytest.raises(MoEEpConfigError, match="ranks 0, 2 share GPU A of host"):
        symmetric.check_distinct_gpus([["host", "A"], ["host", "B"], ["host", "A"]])


def test_regions_of_a_workspace_are_views_that_do_not_overlap():
    memory = workspace_memory.WorkspaceMemory(EpGroup.virtual(2, "cpu"), LAYOUT)
    views = {region.name: memory.region(region.name) for region in LAYOUT.regions}
    for number, region in enumerate(LAYOUT.regions):
        assert views[region.name].shape == (2, *region.shape)
        views[region.name].fill_(number)
    for number, region in enumerate(LAYOUT.regions):
        assert (views[region.name] == number).all()


def test_layers_of_one_geometry_share_one_workspace_until_the_last_leaves():
    group = EpGroup.virtual(2, "cpu")
    first = workspace_memory.acquire(group, LAYOUT)
    assert workspace_memory.acquire(EpGroup.virtual(2, "cpu"), LAYOUT) is first
    workspace_memory.release(first)
    assert workspace_memory.acquire(group, LAYOUT) is first
    workspace_memory.release(first)
    workspace_memory.release(first)
    again = workspace_memory.acquire(group, LAYOUT)
    assert again is not first
    workspace_memory.release(again)


def test_a_workspace_that_does_not_fit_says_what_is_free_and_leaves_nothing(monkeypatch):
    """The symmetric part has its place when the local one does not fit."""
    group = EpGroup.virtual(2, "cpu")
    monkeypatch.setattr(workspace_memory, "free_bytes", lambda device: 12345)
    with monkeypatch.context() as full:
        zeros = torch.zeros

        def no_room(*args, **options):
            if args[-1] == LAYOUT.num_bytes("local"):
                raise torch.OutOfMemoryError
            return zeros(*args, **options)

        full.setattr(torch, "zeros", no_room)
        needed = f"{LAYOUT.num_bytes('symmetric')} bytes of symmetric"
        with pytest.raises(MoEEpConfigError, match=f"{needed}.* 12345 are free.*rank, 3"):
            workspace_memory.acquire(group, LAYOUT)
    workspace_memory.release(workspace_memory.acquire(group, LAYOUT))


class FakeNvshmem(types.ModuleType):
    """Records the order of calls; one rank of two, whose peer's memory is another tensor."""

    def __init__(self) -> None:
        super().__init__("nvshmem.core")
        self.calls: list[str] = []
        self.free_bytes = 2**39
        # Record of rank 1 by the exchange's topic; elsewhere it says what rank 0 says.
        self.said_by_rank_1: dict[str, list] = {"nvshmem/gpu": ["host", "GPU-1"]}

    def get_unique_id(self):
        return "unique"

    def init(self, *, device, uid, rank, nranks, initializer_method):
        assert (uid, rank, nranks, initializer_method) == ("unique", 0, 2, "uid")
        self.calls.append(f"init on {device}")

    def tensor(self, shape, dtype):
        self.calls.append(f"tensor {shape[0]}")
        self.peer = torch.ones(shape, dtype=dtype)
        return torch.ones(shape, dtype=dtype)

    def get_peer_tensor(self, tensor, peer_pe):
        assert peer_pe == 1
        return self.peer

    def free_tensor(self, tensor):
        self.calls.append("free")

    def finalize(self):
        self.calls.append("finalize")


@pytest.fixture
def nvshmem(monkeypatch):
    fake = FakeNvshmem()
    package = types.ModuleType("nvshmem")
    package.core = fake
    core = types.ModuleType("cuda.core")

    class Device:
        def __init__(self, index):
            self.index = index

        def set_current(self):
            fake.calls.append(f"current {self.index}")

        def __str__(self):
            return f"GPU {self.index}"

    core.Device = Device
    for name, module in (("nvshmem", package), ("nvshmem.core", fake), ("cuda.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: fake.calls.append("set_device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: fake.calls.append("sync"))
    properties = types.SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def exchange_beside_rank_1(group, topic, record, timeout_s):
        other = fake.said_by_rank_1.get(topic, record)
        with ThreadPoolExecutor(1) as rank_1:
            rank_1.submit(exchange_records, replace(group, rank=1), topic, other, timeout_s)
            return exchange_records(group, topic, record, timeout_s)

    for module in (symmetric, workspace_memory):
        monkeypatch.setattr(module, "exchange_records", exchange_beside_rank_1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake.free_bytes, 2**40))
    monkeypatch.setattr(symmetric, "_nvshmem_heap", None)
    return fake


TWO_RANKS = EpGroup(
    rank=0,
    num_ranks=2,
    device=torch.device("cuda", 0),
    store=dist.HashStore(),
    global_ranks=(0, 1),
)


def test_nvshmem_starts_after_the_gpu_is_bound_and_ends_after_its_memory_is_freed(nvshmem):
    heap = heap_of(TWO_RANKS)
    buffer = heap.allocate(TWO_RANKS, "a", 10)
    assert heap_of(TWO_RANKS) is heap
    assert buffer.addresses == (buffer.memory.data_ptr(), nvshmem.peer.data_ptr())
    assert not buffer.memory.any()
    symmetric.finish_nvshmem()
    symmetric.finish_nvshmem()
    assert nvshmem.calls == [
        *("set_device", "current 0", "init on GPU 0", "sync", "tensor 1024", "sync"),
        *("sync", "free", "finalize"),
    ]


def test_nvshmem_of_before_starts_too(nvshmem, monkeypatch):
    """nvshmem4py of NVSHMEM 3.4 comes with a cuda.core that calls its classes experimental."""
    now = sys.modules["cuda.core"]
    before, experimental = types.ModuleType("cuda.core"), types.ModuleType("cuda.core.experimental")
    experimental.Device = now.Device
    monkeypatch.setitem(sys.modules, "cuda.core", before)
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", experimental)
    heap_of(TWO_RANKS)
    assert nvshmem.calls == ["set_device", "current 0", "init on GPU 0"]


def test_a_group_outside_the_first_is_refused(nvshmem):
    heap_of(TWO_RANKS)
    other = replace(TWO_RANKS, global_ranks=(0, 2))
    with pytest.raises(MoEEpConfigError, match=r"must be a part of it, but has \[2\] too"):
        heap_of(other)


def test_ranks_may_hold_other_workspaces_besides(nvshmem, monkeypatch):
    """What a workspace is called is exchanged: a rank may have a layer of its own too."""
    group = replace(TWO_RANKS, device=torch.device("cpu"))
    names = set()
    monkeypatch.setattr(workspace_memory, "_num_made", Counter())
    for others in ([], [EpGroup.single("cpu"), EpGroup.virtual(2, "cpu")]):
        held = [workspace_memory.acquire(other, LAYOUT) for other in others]
        held.append(workspace_memory.acquire(group, LAYOUT))
        names |= set(heap_of(group)._buffers)
        for memory in held:
            workspace_memory.release(memory)
        workspace_memory._num_made.clear()
    assert len(names) == 1


def test_a_part_of_the_first_group_takes_from_what_all_have(nvshmem):
    heap = heap_of(replace(TWO_RANKS))
    part = EpGroup(rank=0, num_ranks=1, device=torch.device("cuda", 0), global_ranks=(1,))
    with pytest.raises(MoEEpConfigError, match="do not fit in what all 2 have taken together"):
        heap.allocate(part, "part", 10)


def test_nvshmem_without_room_names_variable_and_bytes(nvshmem, monkeypatch):
    def tensor(shape, dtype):
        raise RuntimeError("malloc failed")

    monkeypatch.setattr(nvshmem, "tensor", tensor)
    with pytest.raises(MoEEpConfigError, match="set NVSHMEM_SYMMETRIC_SIZE to at least 2048"):
        heap_of(TWO_RANKS).allocate(TWO_RANKS, "a", 2000)


def test_the_heap_has_the_size_that_the_variable_names(nvshmem, monkeypatch):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1M")
    heap_of(TWO_RANKS).allocate(TWO_RANKS, "a", 10)
    assert "tensor 1048576" in nvshmem.calls


PLACE = ["a", 1024, [0, 0, 1024]]  # of the buffer below: name, bytes, [region, offset, new bytes]


@pytest.mark.parametrize(
    "of_rank_1, error, said",
    [
        ([*PLACE, None], None, None),
        (["b", 1024, [0, 0, 1024], None], MoEEpStateError, "differently.*same order on every rank"),
        (["a", 1024, [0, 512, 0], None], MoEEpStateError, "differently.*same order on every rank"),
        (["a", 1024, None, "no room"], MoEEpConfigError, "rank 1: no room"),
    ],
)
def test_ranks_agree_before_they_wait_for_each_other_in_nvshmem(nvshmem, of_rank_1, error, said):
    """Its malloc is collective: a rank that came alone would never return."""
    nvshmem.said_by_rank_1["symmetric"] = of_rank_1
    heap = heap_of(TWO_RANKS)
    if error is None:
        heap.allocate(TWO_RANKS, "a", 10)
        return
    with pytest.raises(error, match=said):
        heap.allocate(TWO_RANKS, "a", 10)
    assert not any(call.startswith("tensor") for call in nvshmem.calls)
    del nvshmem.said_by_rank_1["symmetric"]
    heap.allocate(TWO_RANKS, "a", 10)


def test_memory_that_a_gpu_lacks_is_asked_of_nobody(nvshmem):
    nvshmem.free_bytes = 1000
    with pytest.raises(MoEEpConfigError, match="1024 bytes of symmetric.*cuda:0, where 1000 are"):
        heap_of(TWO_RANKS).allocate(TWO_RANKS, "a", 10)
    assert not any(call.startswith("tensor") for call in nvshmem.calls)


def test_a_workspace_in_which_time_ran_out_is_shared_no_longer():
    group = EpGroup.virtual(2, "cpu")
    broken = [workspace_memory.acquire(group, LAYOUT) for _ in range(2)]
    broken[0].post_mortem._words[1, 0] = 1  # what the device writes as it gives up
    fresh = workspace_memory.acquire(group, LAYOUT)
    assert broken[0] is broken[1] is not fresh
    for memory in broken:
        workspace_memory.release(memory)
    assert workspace_memory.acquire(group, LAYOUT) is fresh
    for _ in range(2):
        workspace_memory.release(fresh)
    assert fresh.num_users == 0 and not workspace_memory._shared


def test_a_workspace_broken_on_one_rank_is_replaced_on_all(nvshmem):
    group = replace(TWO_RANKS, device=torch.device("cpu"))
    first = workspace_memory.acquire(group, LAYOUT)
    assert workspace_memory.acquire(group, LAYOUT) is first
    nvshmem.said_by_rank_1["workspace/shared"] = [False, 4]
    again = workspace_memory.acquire(group, LAYOUT)
    assert again is not first and again._symmetric.name.startswith("workspace 4 of (0, 1)")
    for memory in (first, first, again):
        workspace_memory.release(memory)
    assert not heap_of(group)._buffers


def test_launches_that_wait_for_other_ranks_stand_in_one_line_the_others_do_not(nvshmem):
    def orders(group: EpGroup) -> set[int]:
        layouts = (LAYOUT, replace(LAYOUT, max_tokens_per_rank=5))
        held = [workspace_memory.acquire(group, layout) for layout in layouts]
        for memory in held:
            workspace_memory.release(memory)
        return {id(memory.order) for memory in held}

    assert len(orders(replace(TWO_RANKS, device=torch.device("cpu")))) == 1
    assert len(orders(EpGroup.virtual(2, "cpu"))) == 2

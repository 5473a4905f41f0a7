"""Expert-sorted order of a rank's routed slots in one launch, without host synchronisation.

    topk_ids [T, K]  ->  counts [e], offsets [e + 1], src_slot [T * K], pool_row [T, K]
    hidden_states [T, H]  ->  pool [P, H], each token copied to the rows of its slots

as `moe_ep.dispatch_plan.DispatchPlan` specifies. Every CTA reads all ids and builds in shared
memory two histograms over the local experts: of the slots before its own and of all others. Their
prefix sum gives it the first row of each of its experts, a warp match the order among its own
slots, so that no CTA waits for another and no atomic decides an order (integer counts do not
depend on theirs).

    grid    groups x chunks: a group of consecutive tokens, a chunk of their columns
    smem    before[e], rest[e], next_row[e], row_of_slot[MAX_SLOTS_PER_CTA], first bad slot

    all warps   zero the histograms | count all slots, keep the experts of the own ones
    warp 0      prefix sum, rows of the own slots; group 0 writes counts and offsets
    all warps   copy the own tokens' columns to their rows, 16 bytes a thread

The launch is programmatic: it waits for the kernel before it only after its shared memory is
cleared, and lets the next one start at once.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr

from moe_ep.comm import ptx
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel import bound_call
from moe_ep.megakernel.compile_cache import CompiledFunction, KernelBuild, compile_for_sm90, load

NUM_THREADS = 256
MAX_SLOTS_PER_CTA = 512
# Loads that a thread has in flight before it uses the first: ids, and 16-byte vectors of a token.
NUM_IDS_IN_FLIGHT = 8
NUM_VECTORS_IN_FLIGHT = 4
VECTOR_BYTES = 16
# Of an H200. Few tokens are cut into columns as long as that leaves SMs idle, many tokens into
# groups that keep two CTAs on each SM.
NUM_SMS = 132
MAX_CHUNKS = 4


@dataclass(frozen=True, kw_only=True)
class PermuteConfig:
    """What one compiled permutation depends on.

    `hidden` is the width of the rows that are copied to the pool, a multiple of 8 (16 bytes), or
    None for a permutation without a copy.
    """

    num_local_experts: int
    top_k: int
    hidden: int | None
    ids_are_int64: bool

    def __post_init__(self) -> None:
        if self.hidden is not None and (self.hidden < 8 or self.hidden % 8):
            raise MoEEpConfigError(f"hidden must be a multiple of 8, got {self.hidden}")
        if not 1 <= self.top_k <= MAX_SLOTS_PER_CTA:
            raise MoEEpConfigError(
                f"top_k must be between 1 and {MAX_SLOTS_PER_CTA}, got {self.top_k}"
            )

    @property
    def num_vectors(self) -> int:
        """16-byte vectors of a row."""
        return (self.hidden or 0) // 8

    def grid(self, num_tokens: int) -> tuple[int, int]:
        """(tokens of a CTA, vectors of a CTA): how a launch over `num_tokens` > 0 is cut."""
        num_groups = max(1, min(num_tokens, 2 * NUM_SMS))
        tokens_per_group = min(-(-num_tokens // num_groups), MAX_SLOTS_PER_CTA // self.top_k)
        num_groups = -(-num_tokens // tokens_per_group)
        min_chunks = -(-self.num_vectors // (NUM_THREADS * NUM_VECTORS_IN_FLIGHT))
        num_chunks = max(1, min_chunks, min(MAX_CHUNKS, NUM_SMS // num_groups))
        return tokens_per_group, max(1, -(-self.num_vectors // num_chunks))


class PermuteKernel:
    """The launch and the kernel; see the module's text."""

    def __init__(self, config: PermuteConfig) -> None:
        self.top_k = config.top_k
        self.num_vectors = config.num_vectors
        self.has_copy = config.hidden is not None
        self.num_local_experts = config.num_local_experts
        self.num_experts_per_lane = -(-config.num_local_experts // 32)
        self.num_bins = 32 * self.num_experts_per_lane
        self.id_type = Int64 if config.ids_are_int64 else Int32

    @cute.jit
    def __call__(
        self,
        topk_ids: Int64,
        counts: Int64,
        offsets: Int64,
        src_slot: Int64,
        pool_row: Int64,
        status: Int64,
        hidden_states: Int64,
        pool: Int64,
        num_tokens: Int32,
        tokens_per_group: Int32,
        vectors_per_chunk: Int32,
        num_experts: Int32,
        first_expert: Int32,
        stream: cuda.CUstream,
    ):
        """Eight addresses, then sizes; the grid is `PermuteConfig.grid`'s."""
        num_groups = cute.ceil_div(num_tokens, tokens_per_group)
        num_chunks = cute.ceil_div(max(1, self.num_vectors), vectors_per_chunk)

        @cute.struct
        class SharedStorage:
            before: cute.struct.MemRange[Int32, self.num_bins]
            rest: cute.struct.MemRange[Int32, self.num_bins]
            next_row: cute.struct.MemRange[Int32, self.num_bins]
            row_of_slot: cute.struct.MemRange[Int32, MAX_SLOTS_PER_CTA]
            first_bad: cute.struct.MemRange[Int32, 1]

        self.shared_storage = SharedStorage
        self.kernel(
            *(topk_ids, counts, offsets, src_slot, pool_row, status, hidden_states, pool),
            *(num_tokens, tokens_per_group, vectors_per_chunk, num_experts, first_expert),
        ).launch(
            grid=[num_groups, num_chunks, 1],
            block=[NUM_THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        topk_ids: Int64,
        counts: Int64,
        offsets: Int64,
        src_slot: Int64,
        pool_row: Int64,
        status: Int64,
        hidden_states: Int64,
        pool: Int64,
        num_tokens: Int32,
        tokens_per_group: Int32,
        vectors_per_chunk: Int32,
        num_experts: Int32,
        first_expert: Int32,
    ):
        thread_idx, _, _ = cute.arch.thread_idx()
        group_idx, chunk_idx, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        storage = cutlass.memory.SmemAllocator().allocate(self.shared_storage)
        s_before = storage.before.get_tensor(cute.make_layout(self.num_bins))
        s_rest = storage.rest.get_tensor(cute.make_layout(self.num_bins))
        s_next_row = storage.next_row.get_tensor(cute.make_layout(self.num_bins))
        s_row_of_slot = storage.row_of_slot.get_tensor(cute.make_layout(MAX_SLOTS_PER_CTA))
        s_first_bad = storage.first_bad.get_tensor(cute.make_layout(1))

        num_slots = num_tokens * self.top_k
        first_token = group_idx * tokens_per_group
        last_token = cutlass.min(first_token + tokens_per_group, num_tokens)
        first_slot = first_token * self.top_k
        last_slot = last_token * self.top_k
        first_vector = chunk_idx * vectors_per_chunk
        last_vector = cutlass.min(first_vector + vectors_per_chunk, Int32(self.num_vectors))

        cute.arch.griddepcontrol_launch_dependents()
        for i in range(thread_idx, self.num_bins, NUM_THREADS):
            s_before[i] = Int32(0)
            s_rest[i] = Int32(0)
        if thread_idx == 0:
            s_first_bad[0] = num_slots
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        # Which token is read is known before where it goes: the load covers the counting.
        if const_expr(self.has_copy):
            first_columns = self.load_columns(hidden_states, first_token, first_vector, last_vector)
        self.count(
            *(topk_ids, num_slots, first_slot, last_slot, num_experts, first_expert),
            *(s_before, s_rest, s_row_of_slot, s_first_bad),
        )
        cute.arch.sync_threads()
        if warp_idx == 0:
            is_first_cta = (group_idx == 0) & (chunk_idx == 0)
            self.scan(s_before, s_rest, s_next_row, counts, offsets, is_first_cta)
            self.place(
                *(s_next_row, s_row_of_slot, first_slot, last_slot),
                *(src_slot, pool_row, chunk_idx == 0),
            )
            if is_first_cta & (s_first_bad[0] < num_slots):
                words(status).store(s_first_bad[0] + 1)
        if const_expr(self.has_copy):
            cute.arch.sync_threads()
            self.store_columns(first_columns, pool, s_row_of_slot, 0, first_vector, last_vector)
            for token_idx in range(first_token + 1, last_token):
                columns = self.load_columns(hidden_states, token_idx, first_vector, last_vector)
                own_slot = (token_idx - first_token) * self.top_k
                self.store_columns(
                    columns, pool, s_row_of_slot, own_slot, first_vector, last_vector
                )

    @cute.jit
    def count(
        self,
        topk_ids: Int64,
        num_slots: Int32,
        first_slot: Int32,
        last_slot: Int32,
        num_experts: Int32,
        first_expert: Int32,
        s_before: cute.Tensor,
        s_rest: cute.Tensor,
        s_row_of_slot: cute.Tensor,
        s_first_bad: cute.Tensor,
    ):
        """All slots into the histograms; local experts of the own slots into s_row_of_slot."""
        thread_idx, _, _ = cute.arch.thread_idx()
        ids = cute.make_ptr(self.id_type, topk_ids, cute.AddressSpace.gmem)
        for base in range(0, num_slots, NUM_THREADS * NUM_IDS_IN_FLIGHT):
            loaded = []
            for i in cutlass.range_constexpr(NUM_IDS_IN_FLIGHT):
                slot = base + i * NUM_THREADS + thread_idx
                expert = self.id_type(-1)
                if slot < num_slots:
                    expert = (ids + slot).load()
                loaded.append(expert)
            for i in cutlass.range_constexpr(NUM_IDS_IN_FLIGHT):
                if base + i * NUM_THREADS < num_slots:
                    slot = base + i * NUM_THREADS + thread_idx
                    # Compared in the ids' own width: 2**32 + 1 is not expert 1.
                    local_expert = Int32(-1)
                    if loaded[i] >= first_expert:
                        if loaded[i] < first_expert + self.num_local_experts:
                            local_expert = Int32(loaded[i] - first_expert)
                    if loaded[i] >= num_experts:
                        cute.arch.atomic_min(s_first_bad.iterator, slot, sem="relaxed", scope="cta")
                    if local_expert >= 0:
                        if slot < first_slot:
                            increment(s_before.iterator + local_expert)
                        else:
                            increment(s_rest.iterator + local_expert)
                    if (slot >= first_slot) & (slot < last_slot):
                        s_row_of_slot[slot - first_slot] = local_expert

    @cute.jit
    def scan(
        self,
        s_before: cute.Tensor,
        s_rest: cute.Tensor,
        s_next_row: cute.Tensor,
        counts: Int64,
        offsets: Int64,
        is_first_cta: cutlass.Boolean,
    ):
        """One warp: first pool row of each expert, and the first one free for the own slots.

        Lane l holds the experts l * num_experts_per_lane and on.
        """
        lane_idx = cute.arch.lane_idx()
        first = lane_idx * self.num_experts_per_lane
        before = [s_before[first + i] for i in range(self.num_experts_per_lane)]
        totals = [before[i] + s_rest[first + i] for i in range(self.num_experts_per_lane)]
        lane_total = totals[0]
        for i in cutlass.range_constexpr(1, self.num_experts_per_lane):
            lane_total = lane_total + totals[i]
        inclusive = lane_total
        for step in cutlass.range_constexpr(5):
            from_below = cute.arch.shuffle_sync_up(inclusive, 1 << step)
            if lane_idx >= 1 << step:
                inclusive = inclusive + from_below
        row = inclusive - lane_total
        for i in cutlass.range_constexpr(self.num_experts_per_lane):
            s_next_row[first + i] = row + before[i]
            if is_first_cta & (first + i < self.num_local_experts):
                (words(counts) + first + i).store(totals[i])
                (words(offsets) + first + i).store(row)
            row = row + totals[i]
        if is_first_cta & (lane_idx == 31):
            (words(offsets) + self.num_local_experts).store(row)
        cute.arch.sync_warp()

    @cute.jit
    def place(
        self,
        s_next_row: cute.Tensor,
        s_row_of_slot: cute.Tensor,
        first_slot: Int32,
        last_slot: Int32,
        src_slot: Int64,
        pool_row: Int64,
        is_writer: cutlass.Boolean,
    ):
        """One warp: a pool row for each own slot, 32 slots at a time, in slot order."""
        lane_idx = cute.arch.lane_idx()
        for base in range(first_slot, last_slot, 32):
            slot = base + lane_idx
            local_expert = Int32(-1)
            if slot < last_slot:
                local_expert = s_row_of_slot[slot - first_slot]
            same_expert = cute.arch.match_sync(0xFFFFFFFF, local_expert)
            num_below = Int32(cute.arch.popc(same_expert & cute.arch.lanemask_lt()))
            row = Int32(-1)
            if local_expert >= 0:
                row = s_next_row[local_expert] + num_below
            cute.arch.sync_warp()
            if (local_expert >= 0) & (num_below == 0):
                s_next_row[local_expert] = row + Int32(cute.arch.popc(same_expert))
            if slot < last_slot:
                s_row_of_slot[slot - first_slot] = row
                if is_writer:
                    (words(pool_row) + slot).store(row)
                    if row >= 0:
                        (words(src_slot) + row).store(slot)
            cute.arch.sync_warp()

    @cute.jit
    def load_columns(
        self, hidden_states: Int64, token_idx: Int32, first_vector: Int32, last_vector: Int32
    ):
        """This thread's vectors of a token's columns; past the end the last one again."""
        thread_idx, _, _ = cute.arch.thread_idx()
        columns = []
        for i in cutlass.range_constexpr(NUM_VECTORS_IN_FLIGHT):
            vector_idx = first_vector + i * NUM_THREADS + thread_idx
            vector_idx = cutlass.min(vector_idx, last_vector - 1)
            columns.append(ptx.ld_global_v4(self.address(hidden_states, token_idx, vector_idx)))
        return columns

    @cute.jit
    def store_columns(
        self,
        columns: list,
        pool: Int64,
        s_row_of_slot: cute.Tensor,
        own_slot: Int32,
        first_vector: Int32,
        last_vector: Int32,
    ):
        """The vectors to each of the token's pool rows."""
        thread_idx, _, _ = cute.arch.thread_idx()
        for k in cutlass.range_constexpr(self.top_k):
            row = s_row_of_slot[own_slot + k]
            if row >= 0:
                for i in cutlass.range_constexpr(NUM_VECTORS_IN_FLIGHT):
                    vector_idx = first_vector + i * NUM_THREADS + thread_idx
                    if vector_idx < last_vector:
                        ptx.st_global(self.address(pool, row, vector_idx), columns[i])

    def address(self, matrix: Int64, row: Int32, vector_idx: Int32) -> Int64:
        return matrix + (Int64(row) * self.num_vectors + vector_idx) * VECTOR_BYTES


def words(address: Int64) -> cute.Pointer:
    """Int32 words in global memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem)


def increment(pointer: cute.Pointer) -> None:
    cute.arch.atomic_add(pointer, Int32(1), sem="relaxed", scope="cta")


def compile_permute(config: PermuteConfig) -> CompiledFunction:
    addresses, sizes = [Int64(0)] * 8, [Int32(1)] * 5
    stream = cute.runtime.make_fake_stream()
    return compile_for_sm90(PermuteKernel(config), *addresses, *sizes, stream)


def permute_build(config: PermuteConfig) -> KernelBuild:
    return KernelBuild("permute", config, compile_permute)


class Permute:
    """The compiled kernel, launched on torch tensors in the current stream.

    Built with the GPU current that it launches on. Raises `MoEEpUnavailableError` where it is not
    cached and CuTe DSL is not installed.
    """

    def __init__(self, config: PermuteConfig) -> None:
        self._config = config
        addresses = [bound_call.Int64() for _ in range(8)]
        sizes = [bound_call.Int32() for _ in range(5)]
        function, stream = load(permute_build(config)), bound_call.Int64()
        self._launch = bound_call.BoundCall(function, [*addresses, *sizes, stream])

    def __call__(
        self,
        topk_ids: torch.Tensor,
        *,
        num_experts: int,
        first_expert: int,
        out_counts: torch.Tensor,
        out_offsets: torch.Tensor,
        out_src_slot: torch.Tensor,
        out_pool_row: torch.Tensor,
        status: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        out_pool: torch.Tensor | None = None,
    ) -> None:
        """Writes the fields of a `DispatchPlan` and, with a copy, the rows of the pool.

        topk_ids [T, K]; hidden_states [T, H] and out_pool [T * K or more, H] BF16, aligned to 16
        bytes; the others int32. All contiguous, on one GPU. `out_src_slot` and `out_pool` are
        written up to row P alone. `status` is written when an id is not below `num_experts`, and
        otherwise left as it is: the caller clears it after having read it.
        """
        num_tokens = len(topk_ids)
        if num_tokens == 0:
            out_counts.zero_()
            out_offsets.zero_()
            return
        has_copy = self._config.hidden is not None
        self._launch(
            topk_ids.data_ptr(),
            out_counts.data_ptr(),
            out_offsets.data_ptr(),
            out_src_slot.data_ptr(),
            out_pool_row.data_ptr(),
            status.data_ptr(),
            hidden_states.data_ptr() if has_copy else 0,
            out_pool.data_ptr() if has_copy else 0,
            num_tokens,
            *self._config.grid(num_tokens),
            num_experts,
            first_expert,
            bound_call.stream_handle(topk_ids.device),
        )

"""Tokens to the ranks that hold their experts: phases A to D of `protocol.py`, as device functions.

    stage   own ids (under tp routing weights too) and x to where peers find them, then
            routed[rank], arrived[rank] at every peer
    wait    for all ranks' routing
    scan    all routes to this rank's experts: rows, first_row, first_tile, order in shared memory
    bring   tokens into the pool, by whole rows. Either
            bring_few   few tokens to a CTA: all threads copy them, source -> registers -> pool; or
            bring_many  one warp: first `place`, the own share of slots into src_meta and pool_row,
                        then `pull`, pool rows in their order, source -> shared memory -> pool
            bring_first before that, each of the other warps the first row that it can find

The pool holds the experts in the order of `schedule.expert_order` (most rows first), and in each
its rows by (source position, token, slot): the rank's own tokens first. The place of a row is a
function of the routing alone: counts are sums, and a warp match orders the rows of a share.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from moe_ep.comm import ptx
from moe_ep.comm.device import arrive, count, int32_ptr, int64_ptr, signal_peers
from moe_ep.megakernel import protocol, schedule
from moe_ep.megakernel.protocol import WARP_SIZE, Phase
from moe_ep.megakernel.rank_view import RankInputs, RankView, Threads
from moe_ep.megakernel.routing import Routing, float32_ptr
from moe_ep.megakernel.workspace import Workspace

FULL_MASK = 0xFFFFFFFF
NUM_LOADS_IN_FLIGHT = 8
VECTOR_BYTES = 16
NUM_ROW_BUFFERS = 2
MOST_FEW_TOKENS = 2
# Loads of a thread, of a row that several warps copy, and of one that a warp copies alone.
SHARED_ROW_LOADS, LONE_ROW_LOADS = 4, 14
NO_ROW = 2**31 - 1


@dataclass(frozen=True)
class Dispatch:
    """The phases for the layout of `routing`.

    most_few     tokens of a CTA that its threads bring at once
    """

    routing: Routing
    most_few: int = MOST_FEW_TOKENS

    @property
    def layout(self) -> Workspace:
        return self.routing.layout

    @property
    def row_bytes(self) -> int:
        return self.layout.hidden * 2

    def storage(self):
        """Shared memory of the scan, of the pull, and the peers' addresses."""
        experts, ranks = self.layout.num_local_experts, self.layout.num_ranks

        @cute.struct
        class DispatchStorage:
            copied: cute.struct.MemRange[Int64, NUM_ROW_BUFFERS]  # mbarriers
            peers: cute.struct.MemRange[Int64, ranks]
            rows: cute.struct.MemRange[Int32, experts]  # pool rows of each local expert
            before: cute.struct.MemRange[Int32, experts]  # those of earlier shares
            tokens: cute.struct.MemRange[Int32, experts]  # sum of 1 << token, see `first_stages`
            first_row: cute.struct.MemRange[Int32, experts]
            first_tile: cute.struct.MemRange[Int32, experts]
            next_row: cute.struct.MemRange[Int32, experts]
            order: cute.struct.MemRange[Int32, experts]  # experts by falling rows
            keys: cute.struct.MemRange[Int64, experts]  # of those with rows, see `sort_experts`
            num_used: cute.struct.MemRange[Int32, 2]  # experts with rows, and without
            num_rows: cute.struct.MemRange[Int32, 1]
            token_base: cute.struct.MemRange[Int32, ranks + 1]  # tokens of earlier sources
            alive: cute.struct.MemRange[Int32, 1]
            gave_up: cute.struct.MemRange[Int32, 1]  # see `Watch`

        return DispatchStorage

    @cute.jit
    def init(self, storage):
        """One thread, before the CTA's first barrier."""
        storage.gave_up.data_ptr().store(Int32(0))
        for i in cutlass.range_constexpr(NUM_ROW_BUFFERS):
            cute.arch.mbarrier_init(storage.copied.data_ptr() + i, 1)
        cute.arch.mbarrier_init_fence()

    # ---- A, B

    @cute.jit
    def stage(self, view: RankView, inputs: RankInputs, threads: Threads):
        """All threads: publish this rank's routing and tokens. Nothing to do for one rank."""
        num_tokens = cutlass.max(inputs.num_tokens, Int32(0))
        for peer in range(view.cta, self.layout.num_ranks, view.num_ctas):
            self.stage_routing(view, inputs, threads, peer, num_tokens)
        stager = view.num_ctas - 1 - view.cta
        num_stagers = protocol.num_stagers(num_tokens, view.num_ctas)
        if stager < num_stagers:
            first, end = protocol.share_bounds(num_tokens, view.num_ctas, stager)
            self.stage_tokens(view, inputs, threads, first, cutlass.min(end, num_tokens))
            threads.sync()
            if threads.idx < WARP_SIZE:
                is_last = Int32(0)
                if threads.idx == 0:
                    staged = view.counter(self.layout.counters.staged)
                    is_last, _ = arrive(staged, num_stagers)
                is_last = cute.arch.shuffle_sync(is_last, 0)
                cute.arch.sync_warp()
                if is_last == 1:
                    self.signal(view, "arrived")

    @cute.jit
    def stage_routing(self, view, inputs, threads: Threads, peer: Int32, num_tokens: Int32):
        """All threads: ids and number of tokens of this rank to one peer, who is told."""
        ids = int32_ptr(view.peer_address(peer, "ids") + self.routing.ids_offset(view.rank))
        for index in range(threads.idx, num_tokens * self.layout.top_k, threads.num_threads):
            loaded = self.routing.load_id(inputs.topk_ids, index)
            self.routing.note_bad_id(view, index, loaded)
            (ids + index).store(self.routing.known_expert(loaded))
        if const_expr(self.layout.is_tp):
            self.stage_weights(view, inputs, threads, peer, num_tokens)
        threads.sync()
        if threads.idx == 0:
            (int32_ptr(view.peer_address(peer, "num_tokens")) + view.rank).store(inputs.num_tokens)
            flag = int32_ptr(view.peer_address(peer, "routed")) + view.rank
            cute.arch.store(flag, view.step, sem="release", scope="sys")

    @cute.jit
    def stage_weights(self, view, inputs, threads: Threads, peer: Int32, num_tokens: Int32):
        """All threads: routing weights of this rank to one peer."""
        weights = view.peer_address(peer, "weights") + self.routing.ids_offset(view.rank)
        weights = float32_ptr(weights)
        own = float32_ptr(inputs.topk_weights)
        for index in range(threads.idx, num_tokens * self.layout.top_k, threads.num_threads):
            (weights + index).store((own + index).load())

    @cute.jit
    def stage_tokens(self, view, inputs, threads: Threads, first_token: Int32, end_token: Int32):
        """All threads: own rows to x_stage."""
        vectors_per_token = self.row_bytes // VECTOR_BYTES
        stage = view.address("x_stage")
        first, end = first_token * vectors_per_token, end_token * vectors_per_token
        stride = threads.num_threads
        for base in range(first + threads.idx, end, stride * NUM_LOADS_IN_FLIGHT):
            vectors = []
            for i in cutlass.range_constexpr(NUM_LOADS_IN_FLIGHT):
                # Past the end the last vector is read again and not stored.
                position = cutlass.min(base + i * stride, end - 1)
                vectors.append(ptx.ld_global_v4(inputs.x + Int64(position) * VECTOR_BYTES))
            for i in cutlass.range_constexpr(NUM_LOADS_IN_FLIGHT):
                position = base + i * stride
                if position < end:
                    ptx.st_global(stage + Int64(position) * VECTOR_BYTES, vectors[i])
        # Peers read x_stage by bulk copy, which is another proxy than the stores above.
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def signal(self, view: RankView, region: cutlass.Constexpr):
        """One warp: this rank's epoch flag at every rank."""

        def flag(peer):
            return view.peer_address(peer, region) + Int64(view.rank) * 4

        signal_peers(flag, self.layout.num_ranks, view.step)

    @cute.jit
    def wait(self, view: RankView, storage, threads: Threads):
        """All threads: until every rank's routing is there, or time is up."""
        if threads.idx < WARP_SIZE:
            alive = Int32(1)
            if const_expr(self.layout.num_ranks > 1):
                alive = view.watch.wait_peers(
                    view.address("routed"), self.layout.num_ranks, Phase.ROUTED
                )
            if threads.idx == 0:
                storage.alive.data_ptr().store(alive)
        threads.sync()

    # ---- C

    @cute.jit
    def scan(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads: what this rank's experts receive, into shared memory."""
        experts, ranks = self.layout.num_local_experts, self.layout.num_ranks
        for expert in range(threads.idx, experts, threads.num_threads):
            (storage.rows.data_ptr() + expert).store(Int32(0))
            (storage.before.data_ptr() + expert).store(Int32(0))
            (storage.tokens.data_ptr() + expert).store(Int32(0))
        if threads.idx == 0:
            storage.num_rows.data_ptr().store(Int32(0))
            storage.num_used.data_ptr().store(Int32(0))
            (storage.num_used.data_ptr() + 1).store(Int32(0))
        if threads.idx < WARP_SIZE:
            self.load_token_counts(view, inputs, storage)
        threads.sync()
        first, _, _, _ = self.share(view, storage)
        # Some warps for each source, so that sources are not waited for one after the other.
        num_teams = min(ranks, threads.num_threads // WARP_SIZE)
        team_size = threads.num_threads // WARP_SIZE // num_teams * WARP_SIZE
        for position in range(threads.idx // team_size, ranks, num_teams):
            base = (storage.token_base.data_ptr() + position).load()
            num_tokens = (storage.token_base.data_ptr() + position + 1).load() - base
            source = protocol.source_rank(view.rank, position, ranks)
            team = Threads(threads.idx % team_size, team_size, threads.barrier_id)
            self.count_source(view, inputs, storage, team, source, num_tokens, first - base)
        threads.sync()
        self.list_used_experts(storage, threads)
        threads.sync()
        self.sort_experts(storage, threads)
        threads.sync()

    @cute.jit
    def load_token_counts(self, view: RankView, inputs: RankInputs, storage):
        """One warp: tokens of the sources before each; none at all where a rank refused."""
        lane, ranks = cute.arch.lane_idx(), self.layout.num_ranks
        is_on = storage.alive.data_ptr().load()
        counts = []
        for first in cutlass.range_constexpr(0, ranks, WARP_SIZE):
            num_tokens = Int32(0)
            if first + lane < ranks:
                source = protocol.source_rank(view.rank, first + lane, ranks)
                num_tokens = self.token_count(view, inputs, source)
                if num_tokens < 0:
                    self.routing.note(view, "status", num_tokens, "status_rank", source)
            is_on = is_on & Int32(cute.arch.vote_all_sync(num_tokens >= 0))
            counts.append(num_tokens)
        base = Int32(0)
        if lane == 0:
            storage.token_base.data_ptr().store(base)
        for i in cutlass.range_constexpr(len(counts)):
            sums = counts[i] * is_on
            for step in cutlass.range_constexpr(5):
                from_below = cute.arch.shuffle_sync_up(sums, 1 << step)
                if lane >= 1 << step:
                    sums = sums + from_below
            if i * WARP_SIZE + lane < ranks:
                (storage.token_base.data_ptr() + i * WARP_SIZE + lane + 1).store(base + sums)
            base = base + cute.arch.shuffle_sync(sums, WARP_SIZE - 1)

    def token_count(self, view: RankView, inputs: RankInputs, source: Int32) -> Int32:
        """Tokens of a rank, or -1 - code."""
        if self.layout.num_ranks == 1:
            return inputs.num_tokens
        return (int32_ptr(view.address("num_tokens")) + source).load()

    def share(self, view: RankView, storage):
        """Tokens, counted over all sources, that this CTA routes: first and one past the last.
        Third, how many CTAs each of them has (`protocol.ctas_per_token`), 0 for less than one;
        fourth, whether they are few (`protocol.are_few`)."""
        num_tokens = (storage.token_base.data_ptr() + self.layout.num_ranks).load()
        ctas = protocol.ctas_per_token(num_tokens, view.num_ctas, self.layout.top_k)
        first, end = protocol.share_bounds(num_tokens, view.num_ctas, view.cta)
        has_some = ctas > 0
        own = view.cta // protocol.at_least_one(ctas)
        first = schedule.select(has_some, own, first)
        end = schedule.select(has_some, own + 1, end)
        are_few = protocol.are_few(num_tokens, view.num_ctas, self.layout.top_k, self.most_few)
        return first, cutlass.min(end, num_tokens), ctas, are_few

    @cute.jit
    def count_source(
        self, view, inputs, storage, team: Threads, source: Int32, num_tokens: Int32, first_own
    ):
        """All slots of one source into the histograms. `first_own`: first token of the share."""
        num_slots = num_tokens * self.layout.top_k
        own_slot = first_own * self.layout.top_k
        for base in range(team.idx, num_slots, team.num_threads * NUM_LOADS_IN_FLIGHT):
            loaded = []
            for i in cutlass.range_constexpr(NUM_LOADS_IN_FLIGHT):
                # Past the end the last slot is read again and not counted.
                index = cutlass.min(base + i * team.num_threads, num_slots - 1)
                loaded.append(self.routing.routed_id(view, inputs, source, index))
            for i in cutlass.range_constexpr(NUM_LOADS_IN_FLIGHT):
                index = base + i * team.num_threads
                expert = self.routing.local_expert(view, loaded[i])
                if (expert >= 0) & (index < num_slots):
                    _add(storage.rows.data_ptr() + expert, Int32(1))
                    if const_expr(self.layout.num_ranks == 1):
                        if num_tokens <= WARP_SIZE:
                            bit = Int32(1) << (index // self.layout.top_k)
                            _add(storage.tokens.data_ptr() + expert, bit)
                    if index < own_slot:
                        _add(storage.before.data_ptr() + expert, Int32(1))

    @cute.jit
    def list_used_experts(self, storage, threads: Threads):
        """Keys of the experts with rows, in any order; a larger key is an earlier place. The
        others follow them, in any order."""
        experts = self.layout.num_local_experts
        lane = cute.arch.lane_idx()
        below = cute.arch.lanemask_lt()
        for base in range(threads.idx - lane, experts, threads.num_threads):
            expert = base + lane
            rows = Int32(-1)
            if expert < experts:
                rows = (storage.rows.data_ptr() + expert).load()
            used = cute.arch.vote_ballot_sync(rows > 0)
            unused = cute.arch.vote_ballot_sync(rows == 0)
            first_used, first_unused = Int32(0), Int32(0)
            if lane == 0:
                num_used = storage.num_used.data_ptr()
                first_used = _add(num_used, Int32(cute.arch.popc(used)))
                first_unused = _add(num_used + 1, Int32(cute.arch.popc(unused)))
            first_used = cute.arch.shuffle_sync(first_used, 0)
            first_unused = cute.arch.shuffle_sync(first_unused, 0)
            if rows > 0:
                i = first_used + Int32(cute.arch.popc(used & below))
                (storage.keys.data_ptr() + i).store(Int64(rows) << 32 | Int64(NO_ROW - expert))
            if rows == 0:
                i = experts - 1 - first_unused - Int32(cute.arch.popc(unused & below))
                (storage.order.data_ptr() + i).store(expert)

    @cute.jit
    def sort_experts(self, storage, threads: Threads):
        """Each expert's place, first row and first tile: sums over the experts before it."""
        experts, width = self.layout.num_local_experts, self.layout.max_tile_width
        num_used = storage.num_used.data_ptr().load()
        for i in range(threads.idx, experts, threads.num_threads):
            mine = Int64(0)  # behind all that are used
            expert = Int32(0)
            if i < num_used:
                mine = (storage.keys.data_ptr() + i).load()
                expert = NO_ROW - Int32(mine)
            else:
                expert = (storage.order.data_ptr() + i).load()
            place, first_row, first_tile = Int32(0), Int32(0), Int32(0)
            for other in cutlass.range(num_used, unroll=8):
                theirs = (storage.keys.data_ptr() + other).load()
                # No branch, so that the loads of several experts are in flight; unsigned, so that
                # the division by a power of two is a shift.
                is_before = Int32(theirs > mine)
                rows = Uint32(Int32(theirs >> 32) * is_before)
                place += is_before
                first_row += Int32(rows)
                first_tile += Int32(schedule.num_token_tiles(rows, width))
            if i < num_used:
                (storage.order.data_ptr() + place).store(expert)
                if place == num_used - 1:
                    storage.num_rows.data_ptr().store(first_row + Int32(mine >> 32))
            (storage.first_row.data_ptr() + expert).store(first_row)
            (storage.first_tile.data_ptr() + expert).store(first_tile)
            before = (storage.before.data_ptr() + expert).load()
            (storage.next_row.data_ptr() + expert).store(first_row + before)

    @cute.jit
    def place(self, view: RankView, inputs: RankInputs, storage):
        """One warp, after `scan`: pool rows for the slots of this CTA's tokens, in order."""
        top_k, capacity = self.layout.top_k, self.layout.max_tokens_per_rank
        tokens_per_batch = WARP_SIZE // top_k
        lane = cute.arch.lane_idx()
        first, end, _, _ = self.share(view, storage)
        pool_row, src_meta = view.address("pool_row"), view.address("src_meta")
        for base in range(first, end, tokens_per_batch):
            source, token, expert, row, same_expert = self.find_batch(
                view, inputs, storage, base, end
            )
            self.move_on(storage, expert, row, same_expert)
            is_lead = Int32(1)
            if const_expr(self.layout.num_ranks > 1):
                first_row_of_token = row
                if expert < 0:
                    first_row_of_token = Int32(NO_ROW)
                for k in cutlass.range_constexpr(top_k):
                    other = cute.arch.shuffle_sync(row, lane // top_k * top_k + k)
                    if other >= 0:
                        first_row_of_token = cutlass.min(first_row_of_token, other)
                is_lead = Int32((source == view.rank) | (row == first_row_of_token))
            index = protocol.slot_index(source, token, lane % top_k, capacity, top_k)
            meta = Int64(view.step) << 32 | Int64(index) | Int64(is_lead) << 31
            entry = int64_ptr(src_meta) + row
            if const_expr(self.layout.num_ranks > 1):
                if (lane < tokens_per_batch * top_k) & (base + lane // top_k < end):
                    (int32_ptr(pool_row) + index).store(row)
                if (expert >= 0) & (is_lead == 0):
                    cute.arch.store(entry, meta, sem="relaxed", scope="gpu")
                cute.arch.sync_warp()
            if (expert >= 0) & (is_lead == 1):
                # Whoever pulls the row relies on all that the warp has written for its token; of
                # an own one that is the row's entry alone.
                cute.arch.store(entry, meta, sem="release", scope="gpu")

    @cute.jit
    def find_batch(self, view, inputs, storage, base: Int32, end: Int32):
        """One warp, a lane for each slot of as many tokens as it holds from `base` on: source rank,
        its token, local expert and pool row, both -1 without one, and the lanes of that expert."""
        top_k = self.layout.top_k
        lane = cute.arch.lane_idx()
        token = base + lane // top_k
        is_slot = (lane < WARP_SIZE // top_k * top_k) & (token < end)
        # A lane without a slot reads one of the first token.
        source, token = self.find_source(view, storage, schedule.select(is_slot, token, base))
        index = token * top_k + lane % top_k
        loaded = self.routing.routed_id(view, inputs, source, index)
        expert = self.routing.local_expert(view, loaded)
        if is_slot:
            if const_expr(self.layout.num_ranks == 1):
                self.routing.note_bad_id(view, index, loaded)
        else:
            expert = Int32(-1)
        same_expert = cute.arch.match_sync(FULL_MASK, expert)
        row = Int32(-1)
        if expert >= 0:
            num_below = Int32(cute.arch.popc(same_expert & cute.arch.lanemask_lt()))
            row = (storage.next_row.data_ptr() + expert).load() + num_below
        return source, token, expert, row, same_expert

    @cute.jit
    def move_on(self, storage, expert: Int32, row: Int32, same_expert):
        """The warp of `find_batch`: the next batch's rows lie behind."""
        cute.arch.sync_warp()
        if (expert >= 0) & ((same_expert & cute.arch.lanemask_lt()) == 0):
            next_row = row + Int32(cute.arch.popc(same_expert))
            (storage.next_row.data_ptr() + expert).store(next_row)
        cute.arch.sync_warp()

    @cute.jit
    def find_source(self, view: RankView, storage, token: Int32):
        """(source rank, its token) of a token counted over all sources."""
        position = Int32(0)
        for other in cutlass.range(1, self.layout.num_ranks, unroll=1):
            if token >= (storage.token_base.data_ptr() + other).load():
                position = Int32(other)
        source = protocol.source_rank(view.rank, position, self.layout.num_ranks)
        return source, token - (storage.token_base.data_ptr() + position).load()

    # ---- D

    @cute.jit
    def bring_few(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads, after `scan`: this CTA's tokens into the pool, where they are few.

        By loads and stores: bulk copies of a CTA queue up behind those of its weights.
        """
        layout, top_k = self.layout, self.layout.top_k
        first, end, ctas_per_token, are_few = self.share(view, storage)
        if are_few & (first < end):
            lane, warp = cute.arch.lane_idx(), threads.idx // WARP_SIZE
            num_parts = protocol.at_least_one(ctas_per_token)
            num_tokens = end - first
            warps_per_token = threads.num_threads // WARP_SIZE // num_tokens
            mine = warp // warps_per_token  # of the share; left-over warps have none
            team = Threads(
                threads.idx - mine * warps_per_token * WARP_SIZE, warps_per_token * WARP_SIZE, 0
            )
            source, token, expert, row, _ = self.find_batch(view, inputs, storage, first, end)
            if (lane // top_k != mine) | (lane % num_parts != view.cta % num_parts):
                row = Int32(-1)
            alive, tile = Int32(1), Int32(0)
            if cute.arch.vote_any_sync(row >= 0):
                source = cute.arch.shuffle_sync(source, mine * top_k)
                token = cute.arch.shuffle_sync(token, mine * top_k)
                if const_expr(layout.num_ranks > 1):
                    if source != view.rank:
                        arrived = view.address("arrived") + Int64(source) * 4
                        alive = view.watch.wait_reached(
                            arrived, view.step, Phase.ARRIVED, source, scope="sys"
                        )
                alive = Int32(cute.arch.vote_all_sync(alive == 1))
                if alive == 1:
                    address = self.token_address(view, inputs, source, token)
                    self.copy_row(view, address, row, mine * top_k, team, SHARED_ROW_LOADS)
                if row >= 0:
                    tile, _ = self.tile_of(storage, expert, row)
                    if team.idx < WARP_SIZE:
                        index = protocol.slot_index(
                            source, token, lane % top_k, layout.max_tokens_per_rank, top_k
                        )
                        entry = int64_ptr(view.address("src_meta")) + row
                        meta = Int64(view.step) << 32 | Int64(index)
                        cute.arch.store(entry, meta, sem="relaxed", scope="gpu")
            # FC1 reads the pool by tensor copies, another proxy than the stores.
            cute.arch.fence_proxy("async.global")
            threads.sync()
            if (row >= 0) & (team.idx < WARP_SIZE):
                count(view.counter(layout.counters.tokens_arrived + tile), 1)

    @cute.jit
    def copy_row(
        self,
        view: RankView,
        source: Int64,
        row: Int32,
        first_lane: Int32,
        team: Threads,
        num_in_flight: cutlass.Constexpr,
    ):
        """Some warps: one token's row to the pool rows of the lanes from `first_lane` on."""
        num_vectors = self.row_bytes // VECTOR_BYTES
        lane = cute.arch.lane_idx()
        # A warp's lanes go on together, also past the end of a row: the shuffles want them all.
        for base in range(team.idx - lane, num_vectors, team.num_threads * num_in_flight):
            vectors = []
            for i in cutlass.range_constexpr(num_in_flight):
                # Past the end the first vector is read again and not stored.
                position = base + lane + i * team.num_threads
                position = schedule.select(position < num_vectors, position, base)
                vectors.append(ptx.ld_global_v4(source + Int64(position) * VECTOR_BYTES))
            for slot in cutlass.range(self.layout.top_k, unroll=1):
                target_row = cute.arch.shuffle_sync(row, first_lane + slot)
                if target_row >= 0:
                    target = view.address("pool") + Int64(target_row) * self.row_bytes
                    for i in cutlass.range_constexpr(num_in_flight):
                        position = base + lane + i * team.num_threads
                        if position < num_vectors:
                            ptx.st_global(target + Int64(position) * VECTOR_BYTES, vectors[i])

    @cute.jit
    def bring_many(
        self, view: RankView, inputs: RankInputs, storage, buffers: Int32, first_row: Int32 = 0
    ):
        """One warp, after `scan`: this CTA's part in filling the pool, where tokens are many.

        buffers    shared memory address of NUM_ROW_BUFFERS rows, aligned to 16 bytes
        first_row  of the pool that `bring_first` leaves to this warp
        """
        _, _, _, are_few = self.share(view, storage)
        if are_few == 0:
            self.place(view, inputs, storage)
            self.pull(view, inputs, storage, buffers, first_row + view.cta, view.num_ctas)

    @cute.jit
    def bring_first(self, view: RankView, inputs: RankInputs, storage, threads: Threads):
        """All threads, after `scan`, where tokens are many: one of the pool's first rows each warp.

        They are those of the first items: one warp would be as long over them as over any others,
        and nothing is computed meanwhile.
        """
        _, _, _, are_few = self.share(view, storage)
        if are_few == 0:
            lane = cute.arch.lane_idx()
            warp = cute.arch.make_warp_uniform(threads.idx // WARP_SIZE)
            row = warp * view.num_ctas + view.cta
            meta = Int32(0)
            if row < storage.num_rows.data_ptr().load():
                alive = Int32(1)
                if const_expr(self.layout.num_ranks > 1):
                    alive = view.watch.wait_peers(
                        view.address("arrived"), self.layout.num_ranks, Phase.ARRIVED
                    )
                entry = view.address("src_meta") + Int64(row) * 8
                has_route, low = view.watch.wait_tag(entry, view.step, Phase.ROUTE, view.rank)
                meta = low * has_route * alive
            # One lane may have given up before another.
            if cute.arch.vote_all_sync(meta < 0):
                own_row, loaded, address = self.find_rows(
                    view, inputs, lane, row, meta & protocol.SLOT_MASK
                )
                team = Threads(lane, WARP_SIZE, 0)
                self.copy_row(view, address, own_row, Int32(0), team, LONE_ROW_LOADS)
                # FC1 reads the pool by tensor copies, another proxy than the stores.
                cute.arch.fence_proxy("async.global")
                cute.arch.sync_warp()
                if own_row >= 0:
                    expert = self.routing.local_expert(view, loaded)
                    tile, _ = self.tile_of(storage, expert, own_row)
                    count(view.counter(self.layout.counters.tokens_arrived + tile), 1)
            # Also for ptxas, which would take the warps for diverged in all that follows.
            threads.sync()

    @cute.jit
    def token_address(self, view: RankView, inputs: RankInputs, source: Int32, token: Int32):
        """Of a token's row: own ones lie where the caller has them."""
        address = inputs.x
        if const_expr(self.layout.num_ranks > 1):
            if source != view.rank:
                address = view.peer_address(source, "x_stage")
        return address + Int64(token) * self.row_bytes

    @cute.jit
    def pull(self, view, inputs, storage, buffers: Int32, first_row: Int32, num_workers: Int32):
        """One warp: every `num_workers`-th row from `first_row` on, from its source into the pool.

        Load of a row, store of the one before and arrival of the one before that overlap.
        """
        lane = cute.arch.lane_idx()
        num_rows = storage.num_rows.data_ptr().load()
        # Of the token being loaded, and of the one being stored: the lane's row and its tile.
        loaded_row, loaded_tile = Int32(-1), Int32(0)
        stored_row, stored_tile = Int32(-1), Int32(0)
        num_loaded = Int32(0)
        alive = Int32(1)
        if const_expr(self.layout.num_ranks > 1):
            alive = view.watch.wait_peers(
                view.address("arrived"), self.layout.num_ranks, Phase.ARRIVED
            )
        # Sources were written by the generic proxy and are read by bulk copies.
        cute.arch.fence_proxy("async.global")
        for base in range(first_row, num_rows, num_workers * WARP_SIZE):
            row = base + lane * num_workers
            meta = Int32(0)
            if row < num_rows:
                entry = view.address("src_meta") + Int64(row) * 8
                has_route, low = view.watch.wait_tag(entry, view.step, Phase.ROUTE, view.rank)
                meta = low * has_route
                alive = alive & has_route
            alive = Int32(cute.arch.vote_all_sync(alive == 1))
            cute.arch.sync_warp()
            leads = Uint32(cute.arch.vote_ballot_sync((meta < 0) & (alive == 1)))
            while leads != 0:
                lead = Int32(cute.arch.popc((leads & (0 - leads)) - 1))
                leads = leads & (leads - 1)
                next_row, loaded, address = self.find_rows(
                    *(view, inputs, lane),
                    cute.arch.shuffle_sync(row, lead),
                    cute.arch.shuffle_sync(meta, lead) & protocol.SLOT_MASK,
                )
                next_tile = Int32(0)
                if next_row >= 0:
                    expert = self.routing.local_expert(view, loaded)
                    next_tile, _ = self.tile_of(storage, expert, next_row)
                self.publish(view, stored_row, stored_tile)
                self.load_row(storage, buffers, address, num_loaded, lane)
                if num_loaded > 0:
                    alive = alive & self.store_row(
                        view, storage, buffers, loaded_row, num_loaded - 1
                    )
                stored_row, stored_tile = loaded_row, loaded_tile
                loaded_row, loaded_tile = next_row, next_tile
                num_loaded += 1
        self.publish(view, stored_row, stored_tile)
        if num_loaded > 0:
            self.store_row(view, storage, buffers, loaded_row, num_loaded - 1)
        self.publish(view, loaded_row, loaded_tile)

    @cute.jit
    def find_rows(self, view, inputs, lane: Int32, row: Int32, index: Int32):
        """Pool row (or -1) of each lane for the token of a lead row, that slot's id as it was
        loaded, and the token's address."""
        layout = self.layout
        source, token, slot = protocol.slot_source(index, layout.max_tokens_per_rank, layout.top_k)
        own_row = Int32(-1)
        if source == view.rank:
            if lane == 0:
                own_row = row
        elif lane < layout.top_k:
            slots = view.address("pool_row")
            own_row = (int32_ptr(slots) + (index - slot) + lane).load()
            slot = lane
        loaded = self.routing.routed_id(view, inputs, source, token * layout.top_k + slot)
        return own_row, loaded, self.token_address(view, inputs, source, token)

    @cute.jit
    def tile_of(self, storage, expert: Int32, row: Int32):
        """Counter index of a pool row's token tile, and rows of that tile."""
        num_rows = (storage.rows.data_ptr() + expert).load()
        num_tiles = schedule.num_token_tiles(num_rows, self.layout.max_tile_width)
        share, _ = schedule.tile_rows(1, num_rows, num_tiles)
        tile = (row - (storage.first_row.data_ptr() + expert).load()) // share
        _, tile_rows = schedule.tile_rows(tile, num_rows, num_tiles)
        return (storage.first_tile.data_ptr() + expert).load() + tile, tile_rows

    @cute.jit
    def load_row(self, storage, buffers: Int32, address: Int64, num_loaded: Int32, lane: Int32):
        """Lane 0: source row -> buffer."""
        buffer = num_loaded % NUM_ROW_BUFFERS
        if lane == 0:
            mbarrier = storage.copied.data_ptr() + buffer
            cute.arch.mbarrier_arrive_and_expect_tx(mbarrier, self.row_bytes)
            ptx.bulk_copy_g2s(
                *(buffers + buffer * self.row_bytes, address),
                *(Int32(self.row_bytes), mbarrier.toint()),
            )

    @cute.jit
    def store_row(self, view: RankView, storage, buffers: Int32, row: Int32, position: Int32):
        """Each lane: the row loaded at `position` of this worker -> its pool row. 0 if given up."""
        buffer = position % NUM_ROW_BUFFERS
        parity = (position // NUM_ROW_BUFFERS) & 1
        mbarrier = storage.copied.data_ptr() + buffer
        alive = view.watch.wait_mbarrier(mbarrier, parity, Phase.COPY, view.rank)
        if (row >= 0) & (alive == 1):
            target = view.address("pool") + Int64(row) * self.row_bytes
            ptx.bulk_copy_s2g(target, buffers + buffer * self.row_bytes, Int32(self.row_bytes))
        cute.arch.cp_async_bulk_commit_group()
        return alive

    @cute.jit
    def publish(self, view: RankView, row: Int32, tile: Int32):
        """Each lane: its stored row is in the pool; then the buffer may be filled again."""
        cute.arch.cp_async_bulk_wait_group(0)
        if row >= 0:
            # FC1 reads the pool by tensor copies, also an async proxy.
            cute.arch.fence_proxy("async.global")
            count(view.counter(self.layout.counters.tokens_arrived + tile), 1)
        cute.arch.sync_warp()


def _add(pointer: cute.Pointer, value: Int32) -> Int32:
    """To a number in shared memory; what stood there before."""
    return cute.arch.atomic_add(pointer, value, sem="relaxed", scope="cta")

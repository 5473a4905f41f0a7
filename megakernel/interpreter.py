"""The protocol run in Python: R ranks x C CTAs, several steps, any interleaving.

`run` executes the phases of `protocol.py` over the regions of `workspace.py` and the items of
`schedule.py` on a `memory_model.Machine`, which checks every access, and then checks the result:
each routed row was written once, each token that shares its CTA with others crossed the ranks once,
every output is the sum that its routing asks for, every counter holds what it must and the other
bank is zero.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ep.megakernel import interpreter_tp, protocol, schedule
from moe_ep.megakernel.memory_model import Fault, Machine, Op, Program, ProtocolError, Thread
from moe_ep.megakernel.problem import owned_experts
from moe_ep.megakernel.protocol import Phase
from moe_ep.megakernel.workspace import Workspace

# [rank][token][slot] -> expert, negative = masked; an int for a rank that refuses the step.
Routing = Sequence[Sequence[Sequence[int]] | int]
ROLES = ("dispatch", "gemm")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Geometry of a run. `fc1_slices`, `fc2_slices`: row slices of the two GEMMs of an expert,
    `slices_per_item` of which make an item. `most_few`: tokens that a CTA brings at once.
    `num_math_warps`: a row of the pool each that a CTA's GEMM brings first, where tokens are many.
    `tile_widths`: of the builds that the ranks launch by turns; empty: the workspace's alone.
    """

    workspace: Workspace
    num_experts: int
    num_ctas: int
    fc1_slices: int = 2
    fc2_slices: int = 2
    slices_per_item: int = 1
    most_few: int = 1
    num_math_warps: int = 1
    tile_widths: Sequence[int] = ()

    def max_tile_width(self, rank: int, step: int) -> int:
        widths = self.tile_widths or (self.workspace.max_tile_width,)
        return widths[(rank + step) % len(widths)]

    def grid(self, num_slices: int, max_tile_width: int) -> schedule.GemmGrid:
        return schedule.GemmGrid(num_slices, self.slices_per_item, max_tile_width, self.num_ctas)


@dataclass(frozen=True)
class Plan:
    """What a scan finds out for one rank: rows of its experts, and where they lie in the pool.

    rows        [e] pool rows of each local expert
    first_row   [e] first of them; the pool holds the experts in the order of their items
    first_tile  [e] index of the expert's first token tile among the counters
    row_of      (source rank, token, slot) -> pool row
    max_tile_width  of the build that this rank launches
    """

    rows: list[int]
    first_row: list[int]
    first_tile: list[int]
    row_of: dict[tuple[int, int, int], int]
    max_tile_width: int

    def tile_of(self, row: int) -> int:
        expert = max(
            (e for e in range(len(self.rows)) if self.rows[e] and self.first_row[e] <= row),
            key=lambda e: self.first_row[e],
        )
        num_tiles = schedule.num_token_tiles(self.rows[expert], self.max_tile_width)
        share, _ = schedule.tile_rows(1, self.rows[expert], num_tiles)
        return self.first_tile[expert] + (row - self.first_row[expert]) // share


def make_plan(ids_by_source: dict[int, list], experts: range, max_tile_width: int) -> Plan:
    """`ids_by_source`: [token][slot] of each rank, in the order in which this rank takes them."""
    slots = [
        (rank, token, slot, expert - experts.start)
        for rank, tokens in ids_by_source.items()
        for token, ids in enumerate(tokens)
        for slot, expert in enumerate(ids)
        if expert in experts
    ]
    count = Counter(expert for *_, expert in slots)
    rows = [count[e] for e in range(len(experts))]
    first_row, first_tile = [0] * len(rows), [0] * len(rows)
    num_rows = num_tiles = 0
    for expert in schedule.expert_order(rows):
        first_row[expert], first_tile[expert] = num_rows, num_tiles
        num_rows += rows[expert]
        num_tiles += schedule.num_token_tiles(rows[expert], max_tile_width)
    next_row, row_of = list(first_row), {}
    for rank, token, slot, expert in slots:
        row_of[rank, token, slot] = next_row[expert]
        next_row[expert] += 1
    return Plan(rows, first_row, first_tile, row_of, max_tile_width)


class Run:
    """The programs of all threads, one step for each routing.

    A rank whose entry in a routing is an int refuses the step with that status (-1 - code).
    """

    def __init__(
        self, setup: Setup, routings: Sequence[Routing], seed: int, fault: Fault | None = None
    ) -> None:
        self.setup, self.routings = setup, routings
        self.num_ranks = setup.workspace.num_ranks
        self.is_tp = setup.workspace.is_tp
        num_dividing = 1 if self.is_tp else self.num_ranks  # the experts
        self.experts = [
            owned_experts(setup.num_experts, num_dividing, 0 if self.is_tp else rank)
            for rank in range(self.num_ranks)
        ]
        self.counters = setup.workspace.counters
        self.machine = Machine(seed, fault)
        self.machine.add_threads(
            [
                (rank, cta, role)
                for rank in range(self.num_ranks)
                for cta in range(setup.num_ctas)
                for role in ROLES
            ]
        )
        self.steps = [0] * self.num_ranks
        self.num_running = [0] * self.num_ranks
        self.moved = Counter()

    def execute(self) -> None:
        for rank in range(self.num_ranks):
            self.machine.values[rank, "step", 0] = 0
            self._launch(rank)
        self.machine.run(self._ended)
        for rank, step in enumerate(self.steps):
            if step != len(self.routings):
                raise ProtocolError(f"rank {rank} ended in step {step} of {len(self.routings)}")

    # ---- launches of one rank, one after the other ---------------------------------------------

    def _launch(self, rank: int) -> None:
        threads = [t for t in self.machine.threads if t.rank == rank]
        self.num_running[rank] = len(threads)
        # A kernel starts when the one before it has ended.
        clock = [max(clocks) for clocks in zip(*(t.clock for t in threads), strict=True)]
        for thread in threads:
            thread.clock[:] = clock
            program = getattr(self, f"_{thread.role}")(thread)
            self.machine.start(thread, program)

    def _ended(self, thread: Thread) -> None:
        rank = thread.rank
        self.num_running[rank] -= 1
        if self.num_running[rank]:
            return
        self.steps[rank] += 1
        self._check_step(rank, self.steps[rank])
        if self.steps[rank] < len(self.routings):
            self._launch(rank)

    def _check_step(self, rank: int, step: int) -> None:
        routing = self.routings[step - 1]
        failed = any(isinstance(tokens, int) for tokens in routing)
        values = self.machine.values
        for token, ids in enumerate(() if failed else routing[rank]):
            terms = tuple((step, rank, token, expert) for expert in ids if expert >= 0)
            if self.is_tp:
                weights = (step, rank, token)
                terms = tuple((peer, weights, *terms) for peer in range(self.num_ranks))
            if values[rank, "out", token] != terms:
                raise ProtocolError(
                    f"rank {rank} step {step} token {token}: {values[rank, 'out', token]}, "
                    f"expected {terms}"
                )
        for (what, *where), times in self.moved.items():
            if times != 1 and where[:2] == [rank, step]:
                raise ProtocolError(f"{what} {where} moved {times} times")
        self._check_counters(rank, step)

    def _check_counters(self, rank: int, step: int) -> None:
        num_tokens, routing = 0, self.routings[step - 1]
        plan = self._plan(rank, step, routing)
        expected = {self.counters.finished: self.setup.num_ctas}
        if self.is_tp:
            expected[self.counters.summed] = self.setup.num_ctas
        if self.num_ranks > 1:
            tokens = routing[rank]
            own = 0 if isinstance(tokens, int) else len(tokens)
            expected[self.counters.staged] = protocol.num_stagers(own, self.setup.num_ctas)
        for row in plan.row_of.values():
            tile = plan.tile_of(row)
            counter = self.counters.tokens_arrived + tile
            expected[counter] = expected.get(counter, 0) + 1
            expected[self.counters.fc1_done + tile] = self.setup.fc1_slices
            num_tokens += 1
        for index in range(self.counters.num_counters):
            if index == self.counters.next_item:
                continue
            used = self.machine.values[rank, "counters", protocol.bank(step), index]
            other = self.machine.values[rank, "counters", 1 - protocol.bank(step), index]
            if used != expected.get(index, 0) or other != 0:
                raise ProtocolError(
                    f"rank {rank} step {step} counter {index}: {used}, expected "
                    f"{expected.get(index, 0)}; in the other bank {other}, expected 0"
                )

    def _plan(self, rank: int, step: int, routing: Routing) -> Plan:
        if any(isinstance(tokens, int) for tokens in routing):
            routing = [[] for _ in routing]
        order = [protocol.source_rank(rank, i, self.num_ranks) for i in range(self.num_ranks)]
        ids = {source: list(routing[source]) for source in order}
        return make_plan(ids, self.experts[rank], self.setup.max_tile_width(rank, step))

    # ---- programs --------------------------------------------------------------------------------

    def _dispatch(self, thread: Thread) -> Program:
        rank, cta = thread.rank, thread.cta
        step = (yield Op("read", (rank, "step", 0))) + 1
        bank = protocol.bank(step)
        for index in range(cta, self.counters.num_counters, self.setup.num_ctas):
            yield Op("write", (rank, "counters", 1 - bank, index), 0)
        if self.num_ranks > 1:
            yield from self._stage(rank, cta, step)
            for peer in range(self.num_ranks):
                yield _wait_flag(rank, "routed", peer, step, Phase.ROUTED)
        routing = yield from self.read_routing(rank, step)
        plan = self._plan(rank, step, routing)
        order = [protocol.source_rank(rank, i, self.num_ranks) for i in range(self.num_ranks)]
        failed = any(isinstance(tokens, int) for tokens in routing)
        tokens = [] if failed else [(r, t) for r in order for t in range(len(routing[r]))]
        top_k = self.setup.workspace.top_k
        ctas_per_token = protocol.ctas_per_token(len(tokens), self.setup.num_ctas, top_k)
        first, end = protocol.share_bounds(len(tokens), self.setup.num_ctas, cta)
        are_few = protocol.are_few(len(tokens), self.setup.num_ctas, top_k, self.setup.most_few)
        num_first = 0 if ctas_per_token or are_few else self.setup.num_math_warps
        yield Op("store", (rank, "plan", cta, step), (step, plan, num_first), scope="cta")
        if ctas_per_token:
            if cta // ctas_per_token < len(tokens):
                slots = range(cta % ctas_per_token, top_k, ctas_per_token)
                token = tokens[cta // ctas_per_token]
                yield from self._bring_token(rank, step, plan, *token, slots)
        elif are_few:
            for token in tokens[first:end]:
                yield from self._bring_token(rank, step, plan, *token, range(top_k))
        else:
            yield from self._place(rank, step, plan, tokens[first:end])
            first_row = num_first * self.setup.num_ctas + cta
            rows = range(first_row, len(plan.row_of), self.setup.num_ctas)
            yield from self._pull(rank, step, plan, rows, is_bulk=True)

    def _stage(self, rank: int, cta: int, step: int) -> Program:
        tokens, num_ctas = self.routings[step - 1][rank], self.setup.num_ctas
        is_refused = isinstance(tokens, int)
        num_tokens = 0 if is_refused else len(tokens)
        for peer in range(cta, self.num_ranks, num_ctas):
            for token in range(num_tokens):
                yield Op("write", (peer, "ids", rank, token), tuple(tokens[token]))
                if self.is_tp:
                    yield Op("write", (peer, "weights", rank, token), (step, rank, token))
            yield Op("write", (peer, "num_tokens", rank), tokens if is_refused else num_tokens)
            yield Op("store", (peer, "routed", rank), step, scope="sys")
        stager, num_stagers = num_ctas - 1 - cta, protocol.num_stagers(num_tokens, num_ctas)
        if stager < num_stagers:
            first, end = protocol.share_bounds(num_tokens, num_ctas, stager)
            for token in range(first, min(end, num_tokens)):
                yield Op("write", (rank, "x_stage", token), (step, rank, token))
            counter = (rank, "counters", protocol.bank(step), self.counters.staged)
            if (yield Op("add", counter, 1, acquire=True)) == num_stagers - 1:
                for peer in range(self.num_ranks):
                    yield Op("store", (peer, "arrived", rank), step, scope="sys")

    def read_routing(self, rank: int, step: int) -> Program:
        routing = list(self.routings[step - 1])
        if self.num_ranks > 1:
            for source in range(self.num_ranks):
                num_tokens = yield Op("read", (rank, "num_tokens", source))
                routing[source] = num_tokens if num_tokens < 0 else []
                for token in range(num_tokens):
                    routing[source].append((yield Op("read", (rank, "ids", source, token))))
        return routing

    def _place(
        self, rank: int, step: int, plan: Plan, tokens: Sequence[tuple[int, int]]
    ) -> Program:
        for source, token in tokens:
            slots = range(self.setup.workspace.top_k)
            rows = [plan.row_of.get((source, token, slot), -1) for slot in slots]
            if self.num_ranks > 1:
                yield Op("write", (rank, "pool_row", source, token), rows)
            local = [(row, slot) for slot, row in enumerate(rows) if row >= 0]
            # A peer's token is pulled for its first row: who sees that row's tag relies on the
            # entries of the others.
            leads = local if source == rank else [min(local)] if local else []
            for row, slot in sorted(local, key=lambda entry: entry in leads):
                is_lead = (row, slot) in leads
                index = self._slot_index(source, token, slot)
                meta = step << 32 | protocol.src_meta_low(index, is_lead)
                yield Op("store", (rank, "src_meta", row), meta, release=is_lead)

    def _slot_index(self, source: int, token: int, slot: int) -> int:
        workspace = self.setup.workspace
        capacity, top_k = workspace.max_tokens_per_rank, workspace.top_k
        return protocol.slot_index(source, token, slot, capacity, top_k)

    def _source(self, meta: int) -> tuple[int, int, int]:
        workspace = self.setup.workspace
        capacity, top_k = workspace.max_tokens_per_rank, workspace.top_k
        return protocol.slot_source(meta & protocol.SLOT_MASK, capacity, top_k)

    def _bring_token(
        self, rank: int, step: int, plan: Plan, source: int, token: int, slots: Sequence[int]
    ) -> Program:
        rows = [(plan.row_of.get((source, token, slot), -1), slot) for slot in slots]
        rows = [(row, slot) for row, slot in rows if row >= 0]
        for row, slot in rows:
            meta = step << 32 | self._slot_index(source, token, slot)
            yield Op("store", (rank, "src_meta", row), meta, release=False)
        if rows:
            if source != rank:
                yield _wait_flag(rank, "arrived", source, step, Phase.ARRIVED)
            yield from self._copy_token(
                rank, step, plan, source, token, [row for row, _ in rows], is_bulk=False
            )

    def _pull(
        self, rank: int, step: int, plan: Plan, pool_rows: Sequence[int], *, is_bulk: bool
    ) -> Program:
        for peer in range(self.num_ranks if self.num_ranks > 1 else 0):
            yield _wait_flag(rank, "arrived", peer, step, Phase.ARRIVED)
        for row in pool_rows:
            location = (rank, "src_meta", row)
            meta = yield Op(
                *("wait", location),
                ready=lambda meta: meta >> 32 == step,
                phase=Phase.ROUTE,
                peer=rank,
                expected=step,
            )
            source, token, _ = self._source(meta)
            if not meta & protocol.LEAD_BIT:
                continue
            rows = [row]
            if source != rank:
                rows = [r for r in (yield Op("read", (rank, "pool_row", source, token))) if r >= 0]
                self.moved["token", rank, step, source, token] += 1
            yield from self._copy_token(rank, step, plan, source, token, rows, is_bulk=is_bulk)

    def _copy_token(
        self,
        rank: int,
        step: int,
        plan: Plan,
        source: int,
        token: int,
        rows: Sequence[int],
        *,
        is_bulk: bool,
    ) -> Program:
        value = (step, rank, token)
        if source != rank:
            value = yield Op("read", (source, "x_stage", token))
        for row in rows:
            self.moved["row", rank, step, row] += 1
            yield Op("bulk_write" if is_bulk else "write", (rank, "pool", row), value)
        if is_bulk:
            yield Op("bulk_wait", (rank, "pool"))
        for row in rows:
            tile = plan.tile_of(row)
            yield self._count(rank, step, self.counters.tokens_arrived + tile, 1)

    def _count(self, rank: int, step: int, counter: int, value: int) -> Op:
        return Op("add", (rank, "counters", protocol.bank(step), counter), value)

    def _gemm(self, thread: Thread) -> Program:
        rank, cta = thread.rank, thread.cta
        step = self.steps[rank] + 1
        _, plan, num_first = yield Op(
            *("wait", (rank, "plan", cta, step)),
            scope="cta",
            ready=lambda plan: plan != 0,
            phase=Phase.ROUTE,
            peer=rank,
        )
        end = min(num_first * self.setup.num_ctas, len(plan.row_of))
        if num_first:
            pool_rows = range(cta, end, self.setup.num_ctas)
            yield from self._pull(rank, step, plan, pool_rows, is_bulk=False)
        items = list(self._items(plan))
        while True:
            counter = (rank, "counters", protocol.bank(step), self.counters.next_item)
            index = yield Op("add", counter, 1, release=False)
            if index >= len(items):
                break
            yield from self._item(rank, step, plan, *items[index])
        if self.is_tp:
            yield from interpreter_tp.send_parts(self, rank, cta, step)
        yield from self._drain(rank, step)
        reduce = interpreter_tp.reduce_parts if self.is_tp else Run._reduce
        yield from reduce(self, rank, cta, step)

    def _items(self, plan: Plan):
        """(GEMM, item, tile) in the order of the list: all of FC1, then all of FC2."""
        slices = (self.setup.fc1_slices, self.setup.fc2_slices)
        grids = (self.setup.grid(n, plan.max_tile_width) for n in slices)
        for gemm, item in schedule.fused_items(plan.rows, *grids):
            first = item.first_row - sum(plan.rows[: item.expert])
            row = plan.first_row[item.expert] + first
            tile = plan.tile_of(row)
            slices = range(item.first_slice, item.first_slice + item.num_slices)
            yield gemm + 1, item.expert, range(row, row + item.num_rows), tile, slices

    def _item(self, rank: int, step: int, plan: Plan, gemm, expert, rows, tile, slices) -> Program:
        counter, target, phase = self.counters.tokens_arrived + tile, len(rows), Phase.TOKENS
        if gemm == 2:
            counter, target = self.counters.fc1_done + tile, self.setup.fc1_slices
            phase = Phase.FC1
        yield Op(
            *("wait", (rank, "counters", protocol.bank(step), counter)),
            ready=lambda seen: seen >= target,
            phase=phase,
            peer=rank,
            expected=target,
        )
        for row in rows:
            if gemm == 1:
                value = yield Op("read", (rank, "pool", row))
                for s in slices:
                    yield Op("write", (rank, "hidden", row, s), value)
                continue
            for s in range(self.setup.fc1_slices):
                value = yield Op("read", (rank, "hidden", row, s))
            source, token, slot = self._source((yield Op("read", (rank, "src_meta", row))))
            for s in slices:
                term = (*value, expert + self.experts[rank].start)
                self.moved["term", rank, step, source, token, slot, s] += 1
                place = (rank, "terms", source) if self.is_tp else (source, "terms")
                yield Op("write", (*place, token, slot, s), term)
        if gemm == 1:
            yield self._count(rank, step, self.counters.fc1_done + tile, len(slices))

    def _drain(self, rank: int, step: int) -> Program:
        last = self.counters.summed if self.is_tp else self.counters.finished
        counter = (rank, "counters", protocol.bank(step), last)
        if (yield Op("add", counter, 1, acquire=True)) == self.setup.num_ctas - 1:
            yield Op("write", (rank, "step", 0), step)
            for peer in range(self.num_ranks if self.num_ranks > 1 else 0):
                yield Op("store", (peer, "drained", rank), step, scope="sys")
        for peer in range(self.num_ranks if self.num_ranks > 1 else 0):
            yield _wait_flag(rank, "drained", peer, step, Phase.DRAINED)
        if self.num_ranks == 1:
            num_ctas = self.setup.num_ctas
            yield Op(
                *("wait", counter),
                ready=lambda seen: seen >= num_ctas,
                phase=Phase.FINISHED,
                peer=rank,
                expected=num_ctas,
            )

    def _reduce(self, rank: int, cta: int, step: int) -> Program:
        routing = self.routings[step - 1]
        if any(isinstance(tokens, int) for tokens in routing):
            return
        for token in range(cta, len(routing[rank]), self.setup.num_ctas):
            terms = []
            for slot, expert in enumerate(routing[rank][token]):
                for s in range(self.setup.fc2_slices if expert >= 0 else 0):
                    term = yield Op("read", (rank, "terms", token, slot, s))
                    terms += [term] if s == 0 else []
            yield Op("write", (rank, "out", token), tuple(terms))


def _wait_flag(rank: int, region: str, peer: int, step: int, phase: Phase) -> Op:
    return Op(
        *("wait", (rank, region, peer)),
        scope="sys",
        ready=lambda seen: protocol.has_reached(seen, step),
        phase=phase,
        peer=peer,
        expected=step,
    )


def run(
    setup: Setup, routings: Sequence[Routing], seed: int, fault: Fault | None = None
) -> Machine:
    """Executes one step for each routing; raises `ProtocolError` for a broken promise."""
    run = Run(setup, routings, seed, fault)
    run.execute()
    return run.machine

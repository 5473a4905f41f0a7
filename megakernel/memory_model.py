"""Threads of several GPUs over one memory, in Python, with every access checked.

`Machine` steps threads (a role of a CTA) one memory operation at a time, in the order that a
seeded scheduler picks. It knows what the GPU's memory model promises and no more: vector clocks
grow along release -> acquire pairs whose scope covers both threads, and a data access that is not
ordered after the last conflicting one is an error even where this interleaving gave the right
value. So a missing wait, an early flag, a stale bank or too narrow a scope is found without luck.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from moe_ep.comm.errors import MoEEpError
from moe_ep.megakernel.protocol import Phase

Location = tuple  # (rank, region, index, ...)
Program = Generator["Op", object, None]


class ProtocolError(MoEEpError):
    """The protocol broke one of its promises; the text says where."""


@dataclass(frozen=True)
class Op:
    """One memory operation. `kind` and the fields it uses:

    read, write      plain data access
    bulk_write       written by the copy engine: nobody may rely on it before `bulk_wait`
    bulk_wait        this thread's bulk writes are complete
    add              atomic; `scope` and `release` / `acquire`; the value before it comes back
    store            of a flag, release
    wait             acquire, until `ready(value)`; phase, peer and expected go into the report
    """

    kind: str
    location: Location = ()
    value: object = None
    scope: str = "gpu"
    release: bool = True
    acquire: bool = False
    ready: Callable[[int], bool] | None = None
    phase: Phase | None = None
    peer: int = -1
    expected: int = 0

    @property
    def is_data(self) -> bool:
        return self.kind in ("read", "write", "bulk_write", "bulk_wait")


@dataclass(frozen=True)
class Fault:
    """Something done wrong on purpose, to the `nth` operation on `region` by `rank`.

    `index` narrows it to one entry, the last part of the location.

    drop    not done at all (lost signal, skipped wait, bank not cleared)
    double  done twice
    bank    done to the other bank, or, for a flag, with the step before
    early   a signal without its release: it may overtake the data before it
    narrow  a signal or wait at GPU scope instead of system scope
    """

    kind: str
    region: str
    op_kind: str
    rank: int = 0
    nth: int = 0
    index: int | None = None


@dataclass(eq=False)
class Thread:
    """A role of a CTA; `index` is its place in every vector clock."""

    rank: int
    cta: int
    role: str
    index: int
    clock: list[int]
    program: Program | None = None
    next_op: Op | None = None
    bulk: list[Location] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.rank} CTA {self.cta} {self.role}"


@dataclass(eq=False)
class Sync:
    """Clock that a flag or counter carries, and the rank that set it last."""

    clock: list[int]
    rank: int


class Machine:
    """Memory of all ranks and the threads that run on it."""

    def __init__(self, seed: int, fault: Fault | None = None) -> None:
        self.random = random.Random(seed)
        self.values: dict[Location, object] = defaultdict(int)
        self.threads: list[Thread] = []
        self.fault = fault
        self.num_faulty_ops = 0
        self._syncs: dict[Location, Sync] = {}
        self._writes: dict[Location, tuple[int, int]] = {}
        self._reads: dict[Location, dict[int, int]] = defaultdict(dict)
        self._signals: dict[Location, tuple[int, int]] = {}
        self._waiting: dict[Location, list[Thread]] = defaultdict(list)
        self._runnable: list[Thread] = []
        # Half of the seeds pick any thread; the other half keep to a priority that is redrawn
        # rarely, so that one rank, CTA or role races far ahead of the others.
        self._is_unfair = seed % 2 == 1
        self._priority: dict[tuple[int, int, str], float] = {}

    def add_threads(self, names: Sequence[tuple[int, int, str]]) -> None:
        for index, (rank, cta, role) in enumerate(names):
            self.threads.append(Thread(rank, cta, role, index, [0] * len(names)))

    def start(self, thread: Thread, program: Program) -> None:
        thread.program = program
        self._advance(thread, None)

    def run(self, on_end: Callable[[Thread], None]) -> None:
        """Until every thread has ended; `on_end` may start the next step's programs."""
        self._on_end = on_end
        while self._runnable:
            thread = self._pick()
            self._runnable.remove(thread)
            self._execute(thread)
            # Data accesses are checked against clocks, not against luck: only signals and waits
            # need other threads in between.
            while self._runnable and self._runnable[-1] is thread and thread.next_op.is_data:
                self._runnable.pop()
                self._execute(thread)
        if any(t.program for t in self.threads):
            raise ProtocolError(f"deadlock: {'; '.join(self._stuck())}")

    def _pick(self) -> Thread:
        if not self._is_unfair:
            return self.random.choice(self._runnable)
        if self.random.random() < 0.01:
            self._priority.clear()
        for thread in self._runnable:
            key = (thread.rank, thread.cta, thread.role)
            if key not in self._priority:
                self._priority[key] = self.random.random()
        return max(self._runnable, key=lambda t: self._priority[(t.rank, t.cta, t.role)])

    def _stuck(self) -> Iterator[str]:
        for location, threads in self._waiting.items():
            for thread in threads:
                op = thread.next_op
                yield (
                    f"{thread} waits in phase {op.phase.name} for rank {op.peer}: "
                    f"{location[1]} expected {op.expected}, seen {self.values[location]}"
                )

    def _advance(self, thread: Thread, result: object) -> None:
        try:
            thread.next_op = thread.program.send(result)
            self._runnable.append(thread)
        except StopIteration:
            if thread.bulk:
                raise ProtocolError(f"{thread} ended with bulk copies in flight") from None
            thread.program = None
            self._on_end(thread)

    def _execute(self, thread: Thread) -> None:
        thread.clock[thread.index] += 1
        for op in self._with_fault(thread.next_op, thread):
            if op.kind == "wait" and not op.ready(self.values[op.location]):
                self._waiting[op.location].append(thread)
                return
            result = getattr(self, f"_{op.kind}")(thread, op)
        self._advance(thread, result)

    def _with_fault(self, op: Op, thread: Thread) -> list[Op]:
        fault = self.fault
        if fault is None or not op.location or fault.rank != thread.rank:
            return [op]
        if (fault.region, fault.op_kind) != (op.location[1], op.kind):
            return [op]
        if fault.index not in (None, op.location[-1]):
            return [op]
        self.num_faulty_ops += 1
        if self.num_faulty_ops != fault.nth + 1:
            return [op]
        return _broken(op, fault.kind)

    # ---- operations -----------------------------------------------------------------------------

    def _peek(self, thread: Thread, op: Op) -> object:
        return self.values.get(op.location, 0)

    def _read(self, thread: Thread, op: Op) -> object:
        self._check_after_write(thread, op.location, "reads")
        writer, clock = self._signals.get(op.location, (thread.index, 0))
        if clock > thread.clock[writer]:
            raise ProtocolError(
                f"race: {thread} reads {op.location} not ordered after {self.threads[writer]}"
            )
        self._reads[op.location][thread.index] = thread.clock[thread.index]
        if op.location not in self.values:
            raise ProtocolError(f"{thread} reads {op.location} before anything was written there")
        return self.values[op.location]

    def _write(self, thread: Thread, op: Op) -> None:
        self._check_exclusive(thread, op.location)
        self._writes[op.location] = (thread.index, thread.clock[thread.index])
        self._syncs.pop(op.location, None)  # a counter is cleared by a plain store
        self.values[op.location] = op.value

    def _bulk_write(self, thread: Thread, op: Op) -> None:
        self._check_exclusive(thread, op.location)
        self._writes[op.location] = (thread.index, 2**62)  # later than anybody's clock
        self.values[op.location] = op.value
        thread.bulk.append(op.location)

    def _bulk_wait(self, thread: Thread, op: Op) -> None:
        for location in thread.bulk:
            self._writes[location] = (thread.index, thread.clock[thread.index])
        thread.bulk.clear()

    def _add(self, thread: Thread, op: Op) -> int:
        before = self.values[op.location]
        if op.acquire:
            self._acquire(thread, op)
        self._release(thread, op, before + op.value, keeps_clock=True)
        return before

    def _store(self, thread: Thread, op: Op) -> None:
        self._release(thread, op, op.value, keeps_clock=False)

    def _wait(self, thread: Thread, op: Op) -> int:
        self._acquire(thread, op)
        return self.values[op.location]

    def _release(self, thread: Thread, op: Op, value: int, *, keeps_clock: bool) -> None:
        self._check_sync(thread, op)
        no_clock = [0] * len(thread.clock)
        sync = self._syncs.setdefault(op.location, Sync(no_clock, thread.rank))
        if not keeps_clock:
            sync.clock = [0] * len(thread.clock)
        if op.release:
            _join(sync.clock, thread.clock)
        sync.rank = thread.rank
        self._signals[op.location] = (thread.index, thread.clock[thread.index])
        self.values[op.location] = value
        self._runnable += self._waiting.pop(op.location, [])

    def _acquire(self, thread: Thread, op: Op) -> None:
        self._check_sync(thread, op)
        sync = self._syncs.get(op.location)
        if sync is not None:
            _join(thread.clock, sync.clock)

    def _check_sync(self, thread: Thread, op: Op) -> None:
        self._check_after_write(thread, op.location, "signals")
        self._reads[op.location][thread.index] = thread.clock[thread.index]
        sync = self._syncs.get(op.location)
        crosses = op.location[0] != thread.rank or (sync and sync.rank != thread.rank)
        if crosses and op.scope != "sys":
            raise ProtocolError(f"{thread}: {op.location[1]} of another rank at scope {op.scope}")

    def _check_after_write(self, thread: Thread, location: Location, does: str) -> None:
        writer, clock = self._writes.get(location, (thread.index, 0))
        is_own = writer == thread.index and clock < 2**62
        if not is_own and clock > thread.clock[writer]:
            raise ProtocolError(
                f"race: {thread} {does} {location} not ordered after {self.threads[writer]}"
            )

    def _check_exclusive(self, thread: Thread, location: Location) -> None:
        self._check_after_write(thread, location, "writes")
        for reader, clock in self._reads.pop(location, {}).items():
            if clock > thread.clock[reader] and reader != thread.index:
                raise ProtocolError(
                    f"race: {thread} writes {location} that {self.threads[reader]} may still read"
                )


def _join(clock: list[int], other: list[int]) -> None:
    clock[:] = map(max, clock, other)


def _broken(op: Op, kind: str) -> list[Op]:
    other = dict(op.__dict__)
    if kind == "drop":
        return [Op(**other | {"kind": "peek"})]
    if kind == "double":
        return [op, op]
    if kind == "bank" and op.location[1] in ("routed", "arrived", "drained"):
        return [Op(**other | {"value": op.value - 1})]
    if kind == "bank":
        rank, region, bank, *rest = op.location
        return [Op(**other | {"location": (rank, region, 1 - bank, *rest)})]
    if kind == "early":
        return [Op(**other | {"release": False})]
    return [Op(**other | {"scope": "gpu"})]

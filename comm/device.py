"""Signals and waits between the CTAs of a GPU and between GPUs, none of which waits for ever.

A `Watch` bounds every wait of one rank. Where the time is up, the first waiter writes a record that
the host can read while the kernel still runs, sets the rank's abort word, and every other wait of
the rank, which polls that word, ends too. Waits then return 0 at once, so that each CTA reaches its
end and the GPU stays usable; what was computed is void and must not be published.

Memory order stands in each name: a signal releases what its thread did and saw before, a wait
acquires it. Scope is system where a peer GPU reads, GPU otherwise. Addresses are Int64, flags and
counters Int32; steps are compared by their difference, so that they may wrap.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from moe_ep.comm.post_mortem import FIELDS

WARP_SIZE = 32
NO_EXPERT = -1
LOOKS_PER_CHECK = 16  # at a flag, for one at the abort word and the clock
LOST = 1 << 16  # in a counter of arrivals: one of them had given up; more than there are CTAs


def int32_ptr(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem)


def int64_ptr(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)


def is_before(seen, expected):
    """Whether a flag or counter has still to reach `expected`; both wrap at 32 bits.

    The difference is taken unsigned: of signed numbers a compiler may assume that none wraps, and
    compare the two instead.
    """
    return Int32(Uint32(seen) - Uint32(expected)) < 0


@dataclass(frozen=True)
class Watch:
    """What bounds the waits of one rank.

    is_bounded  compile time: False leaves the bare loops
    rank        whose waits these are
    step        number of this launch
    abort       address of the rank's abort word, local
    record      address of the rank's record (`post_mortem.py`), pinned host memory
    timeout_ns  longest wait, in nanoseconds of the GPU's global timer
    gave_up     this CTA's word in shared memory, 0 before its first barrier: 1 once a wait of the
                CTA has ended too early

    A check must not keep a waiter from its flag: where all CTAs wait for one, the last to see it
    counts. So a look at the abort word is under way while the flag is looked at, not after it; and
    it is rare, as all CTAs look at the same word.
    """

    is_bounded: bool
    rank: Int32
    step: Int32
    abort: Int64
    record: Int64
    timeout_ns: Int64
    gave_up: cute.Pointer

    @cute.jit
    def begin_check(self, num_looks: Int32) -> Int32:
        """Ahead of a look at a flag: the abort word where it is time for a check, else 0."""
        aborted = Int32(0)
        if const_expr(self.is_bounded):
            if num_looks % LOOKS_PER_CHECK == 0:
                aborted = cute.arch.load(int32_ptr(self.abort), Int32, sem="relaxed", scope="gpu")
        return aborted

    def has_given_up(self) -> Int32:
        """1 once a wait of this CTA has ended too early, for threads ordered behind it."""
        return self.gave_up.load() if self.is_bounded else Int32(0)

    @cute.jit
    def end_check(
        self,
        aborted: Int32,
        start: Int64,
        num_looks: Int32,
        phase: cutlass.Constexpr,
        peer,
        expected,
        seen,
        expert=NO_EXPERT,
    ):
        """After a look in vain: (1, when the wait began), or 0 first when the rank has been given
        up, or is now because that is too long ago.

        start   0 until the wait has looked at the clock: most waits end without
        """
        alive = Int32(1)
        if num_looks % LOOKS_PER_CHECK == 0:
            now = Int64(cute.arch.globaltimer())
            if start == 0:
                start = now
            if aborted != 0:
                alive = Int32(0)
            elif now - start > self.timeout_ns:
                self.give_up(phase, peer, expected, seen, expert)
                alive = Int32(0)
            if alive == 0:
                self.gave_up.store(Int32(1))
        return alive, start

    @cute.jit
    def give_up(self, phase: cutlass.Constexpr, peer, expected, seen, expert):
        """Sets the abort word; whoever is first writes the record."""
        before = cute.arch.atomic_cas(
            int32_ptr(self.abort), cmp=Int32(0), val=Int32(1), sem="relaxed", scope="gpu"
        )
        if before == 0:
            record = int32_ptr(self.record)
            values = {
                "phase": Int32(int(phase)),
                "rank": self.rank,
                "step": self.step,
                "peer": Int32(peer),
                "expected": Int32(expected),
                "seen": Int32(seen),
                "expert": Int32(expert) + 1,
            }
            for name in values:
                cute.arch.store(
                    record + FIELDS.index(name), values[name], sem="relaxed", scope="sys"
                )
            # Last, so that a host that sees it sees the rest.
            cute.arch.store(record + FIELDS.index("is_set"), Int32(1), sem="release", scope="sys")

    # ---- waits of one thread; each returns 1, or 0 when the rank is given up

    @cute.jit
    def wait_reached(
        self,
        address: Int64,
        expected,
        phase: cutlass.Constexpr,
        peer,
        scope: cutlass.Constexpr = "gpu",
        expert=NO_EXPERT,
    ) -> Int32:
        """Until the counter or epoch flag at `address` is `expected` or later; acquires.

        expert   whose rows the counter counts, for the record
        """
        flag = int32_ptr(address)
        alive = Int32(1)
        seen = cute.arch.load(flag, Int32, sem="acquire", scope=scope)
        start, num_looks = Int64(0), Int32(0)
        while is_before(seen, expected) & (alive == 1):
            num_looks += 1
            aborted = self.begin_check(num_looks)
            seen = cute.arch.load(flag, Int32, sem="acquire", scope=scope)
            if const_expr(self.is_bounded):
                if is_before(seen, expected):
                    alive, start = self.end_check(
                        aborted, start, num_looks, phase, peer, expected, seen, expert
                    )
        return alive

    @cute.jit
    def wait_tag(self, address: Int64, tag, phase: cutlass.Constexpr, peer):
        """Until the high word of the Int64 at `address` is `tag`; acquires.

        Returns (alive, low word): low word -1 when the rank is given up.
        """
        entry = int64_ptr(address)
        alive = Int32(1)
        low = Int32(-1)
        seen = cute.arch.load(entry, Int64, sem="acquire", scope="gpu")
        start, num_looks = Int64(0), Int32(0)
        while (Int32(seen >> 32) != tag) & (alive == 1):
            num_looks += 1
            aborted = self.begin_check(num_looks)
            seen = cute.arch.load(entry, Int64, sem="acquire", scope="gpu")
            if const_expr(self.is_bounded):
                high = Int32(seen >> 32)
                if high != tag:
                    alive, start = self.end_check(aborted, start, num_looks, phase, peer, tag, high)
        if alive == 1:
            low = Int32(seen)
        return alive, low

    @cute.jit
    def wait_mbarrier(
        self, mbarrier: cute.Pointer, parity, phase: cutlass.Constexpr, peer
    ) -> Int32:
        """Until the phase of that parity has completed."""
        alive = Int32(1)
        if const_expr(self.is_bounded):
            is_done = Int32(cute.arch.mbarrier_try_wait(mbarrier, parity))
            start, num_looks = Int64(0), Int32(0)
            while (is_done == 0) & (alive == 1):
                num_looks += 1
                aborted = self.begin_check(num_looks)
                is_done = Int32(cute.arch.mbarrier_try_wait(mbarrier, parity))
                if is_done == 0:
                    alive, start = self.end_check(
                        aborted, start, num_looks, phase, peer, parity, 1 - parity
                    )
        else:
            cute.arch.mbarrier_wait(mbarrier, parity)
        return alive

    # ---- of one warp

    @cute.jit
    def wait_peers(self, flags: Int64, num_ranks: cutlass.Constexpr, phase: cutlass.Constexpr):
        """Whole warp: until every rank's epoch flag shows this step. 1 in all lanes, or 0.

        flags   address of [num_ranks] Int32 in this rank's own memory, any number of ranks
        """
        lane = cute.arch.lane_idx()
        alive = Int32(1)
        for first in cutlass.range_constexpr(0, num_ranks, WARP_SIZE):
            peer = first + lane
            if peer < num_ranks:
                reached = self.wait_reached(
                    flags + Int64(peer) * 4, self.step, phase, peer, scope="sys"
                )
                alive = alive & reached
        alive = Int32(cute.arch.vote_all_sync(alive == 1))
        # What one lane has acquired holds for all.
        cute.arch.sync_warp()
        return alive


@cute.jit
def signal_peers(peer_flags, num_ranks: cutlass.Constexpr, step):
    """Whole warp: sets a flag of every rank to `step`, releasing what the warp did and saw.

    peer_flags   function rank -> address of the flag that this rank sets there
    """
    lane = cute.arch.lane_idx()
    for first in cutlass.range_constexpr(0, num_ranks, WARP_SIZE):
        peer = first + lane
        if peer < num_ranks:
            cute.arch.store(int32_ptr(peer_flags(peer)), step, sem="release", scope="sys")


@cute.jit
def count(address: Int64, value):
    """One thread: adds to a counter of this GPU, releasing what it did and saw."""
    cute.arch.red(
        int32_ptr(address), Int32(value), op="add", dtype="s32", sem="release", scope="gpu"
    )


@cute.jit
def arrive(address: Int64, num_arrivals, is_lost=0):
    """One thread: counts itself, releasing what it did and saw.

    Returns (1 for the last of `num_arrivals`, who sees the others' work; 1 where one that came up
    to now, this one included, was `is_lost`).
    """
    one = Int32(1) + Int32(is_lost) * LOST
    before = cute.arch.atomic_add(int32_ptr(address), one, sem="acq_rel", scope="gpu")
    return Int32(before % LOST == num_arrivals - 1), Int32(before + one >= LOST)

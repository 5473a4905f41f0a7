"""Items of work between the warps of a CTA: one warp takes them, the others follow.

    publish   the weight warp writes a record of words to a ring of two
    next      every other warp waits for it, reads it and hands its place back

Full counts the publisher, empty one arrival of each reading warp. Word `EXPERT` of the record after
the last item is `END`. The CTA's storage has `bars` (mbarriers) and `records`.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

NUM_RECORDS = 2
NUM_BARS = 2 * NUM_RECORDS  # full, then empty
RECORD_WORDS = 8
EXPERT = 0
END = -1


@dataclass(frozen=True)
class ItemRing:
    """Static description.

    first_bar     of its NUM_BARS among the storage's
    num_words     of a record that are used
    num_readers   warps that follow
    """

    first_bar: int
    num_words: int
    num_readers: int

    @cute.jit
    def init(self, bars):
        """One thread; the caller fences."""
        full = bars + self.first_bar
        for i in cutlass.range_constexpr(NUM_RECORDS):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(full + NUM_RECORDS + i, self.num_readers)

    @cute.jit
    def publish(self, storage, record: Int32, phase: Int32, item):
        """Whole warp: waits for the place, then lane 0 writes `item`. The first phase is 1."""
        full = storage.bars.data_ptr() + self.first_bar
        cute.arch.mbarrier_wait(full + NUM_RECORDS + record, phase)
        if cute.arch.lane_idx() == 0:
            words = storage.records.data_ptr() + record * RECORD_WORDS
            for i in cutlass.range_constexpr(len(item)):
                (words + i).store(item[i])
            cute.arch.mbarrier_arrive(full + record)

    @cute.jit
    def next(self, storage, record: Int32, phase: Int32):
        """Whole warp: the words of the next record. The first phase is 0."""
        full = storage.bars.data_ptr() + self.first_bar
        cute.arch.mbarrier_wait(full + record, phase)
        words = storage.records.data_ptr() + record * RECORD_WORDS
        item = tuple((words + i).load() for i in range(self.num_words))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + NUM_RECORDS + record)
        return item

    @cute.jit
    def advance(self, record: Int32, phase: Int32):
        """Next place of the ring and its parity."""
        record = record ^ 1
        if record == 0:
            phase = phase ^ 1
        return record, phase

"""The fused layer's list of items as a CTA finds it: position -> record, from what the scan left.

The order is that of `schedule.fused_items`; every CTA knows each expert's rows, first row, first
tile and place, so that a position taken from one counter is all that CTAs share.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from moe_ep.megakernel import schedule
from moe_ep.megakernel.item_ring import EXPERT
from moe_ep.megakernel.mega_spec import MegaSpec
from moe_ep.megakernel.protocol import WARP_SIZE

# Words of an item record behind the expert. GEMM: 0 = FC1, 1 = FC2.
GEMM, FIRST_SLICE, NUM_SLICES, FIRST_ROW, NUM_ROWS, TILE = range(EXPERT + 1, EXPERT + 7)


@dataclass(frozen=True)
class Work:
    """How long the lists of FC1 and FC2 are: (items, how many of them are listed as two halves)."""

    fc1: tuple[Int32, Int32]
    fc2: tuple[Int32, Int32]

    @property
    def fc1_listed(self) -> Int32:
        return self.fc1[0] + self.fc1[1]

    @property
    def num_listed(self) -> Int32:
        return self.fc1_listed + self.fc2[0] + self.fc2[1]


class ItemList:
    """The list of one `MegaSpec`'s kernel. `storage` is the `DispatchStorage` after the scan."""

    def __init__(self, spec: MegaSpec) -> None:
        self.layout, self.knobs = spec.layout, spec.knobs
        self.num_slices = (spec.fc1.num_slices, spec.fc2.num_slices)
        self.row_items = (spec.fc1.grid(1).row_items, spec.fc2.grid(1).row_items)

    def measure(self, storage, num_ctas: Int32) -> Work:
        num_tiles = self.tiles_up_to(storage, self.layout.num_local_experts - 1)
        fc1_items, fc2_items = (num_tiles * row_items for row_items in self.row_items)
        fc1_halved, fc2_halved = schedule.num_halved_fused(
            fc1_items, fc2_items, num_ctas, self.knobs.slices_per_item
        )
        return Work((fc1_items, fc1_halved), (fc2_items, fc2_halved))

    @cute.jit
    def find(self, storage, work: Work, position: Int32, lane: Int32):
        """The record at a position; the whole warp computes it."""
        gemm = Int32(position >= work.fc1_listed)
        item, part = schedule.listed_item(
            position - gemm * work.fc1_listed,
            schedule.select(gemm, work.fc2[0], work.fc1[0]),
            schedule.select(gemm, work.fc2[1], work.fc1[1]),
        )
        row_items = schedule.select(gemm, Int32(self.row_items[1]), Int32(self.row_items[0]))
        num_slices = schedule.select(gemm, Int32(self.num_slices[1]), Int32(self.num_slices[0]))
        place = Int32(0)
        for first in cutlass.range_constexpr(0, self.layout.num_local_experts, WARP_SIZE):
            ends_before = False
            if first + lane < self.layout.num_local_experts:
                ends_before = self.tiles_up_to(storage, first + lane) * row_items <= item
            place += cute.arch.popc(cute.arch.vote_ballot_sync(ends_before))
        expert = (storage.order.data_ptr() + place).load()
        first_tile = (storage.first_tile.data_ptr() + expert).load()
        rows = (storage.rows.data_ptr() + expert).load()
        item -= first_tile * row_items
        num_tiles = schedule.num_token_tiles(rows, self.knobs.max_tile_width)
        first_slice, num_slices = schedule.item_slices(
            item // num_tiles, part, num_slices, self.knobs.slices_per_item
        )
        tile = item % num_tiles
        first, num_rows = schedule.tile_rows(tile, rows, num_tiles)
        first_row = (storage.first_row.data_ptr() + expert).load() + first
        return expert, gemm, first_slice, num_slices, first_row, num_rows, first_tile + tile

    @cute.jit
    def tiles_up_to(self, storage, place):
        """Token tiles of the experts up to and with the one at `place` of the order."""
        expert = (storage.order.data_ptr() + place).load()
        tiles = self.num_tiles(storage, expert)
        return (storage.first_tile.data_ptr() + expert).load() + tiles

    def num_tiles(self, storage, expert: Int32) -> Int32:
        rows = (storage.rows.data_ptr() + expert).load()
        return schedule.num_token_tiles(rows, self.knobs.max_tile_width)

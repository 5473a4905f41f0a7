"""The order of work, in plain integers.

A GEMM over one rank's experts is cut into items: the whole K of (expert, token tile, row slices).
A slice is the weight rows that the math warpgroups hold at once, one 64-row tile each; an item has
`slices_per_item` of them, one after the other on the same tokens. The list is

    experts with the most rows first (ties: lower expert first)
      row items of the expert in ascending order
        its token tiles

so that neighbours in time share weights in L2 and the longest work never starts last. CTAs take
items by a counter. The last `num_halved` items are listed as two half-height items each: they are
what evens out the end.

The fused layer walks two such lists, one after the other: all of FC1, then all of FC2 in the same
order of experts, so that an FC2 item stands behind everything it waits for, as far as can be.

The functions above `Item` take Python ints or device integers alike: no branches, so a kernel
traces the very functions that the CPU walks, and the two cannot disagree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN_STEP = 8


def select(condition, yes, no):
    """`yes` where `condition` (a bool, or a device one) holds, else `no`."""
    return no + (yes - no) * condition


def ceil_div(value, divisor):
    return (value + divisor - 1) // divisor


def num_token_tiles(num_rows, max_tile_width):
    """Token tiles of an expert: as few as the widest tile allows."""
    return ceil_div(num_rows, max_tile_width)


def tile_rows(tile, num_rows, num_tiles):
    """First row of a token tile within its expert, and its number of rows.

    All tiles but the last hold an equal share, rounded up to `TOKEN_STEP`.
    """
    share = ceil_div(ceil_div(num_rows, num_tiles), TOKEN_STEP) * TOKEN_STEP
    first = tile * share
    left = num_rows - first
    return first, select(left < share, left, share)


def num_halved_items(num_items, num_ctas, slices_per_item):
    """How many items at the end of the list are cut in half: a last wave that half fills the CTAs.

    Cut in two it takes half the time. A fuller wave gains nothing, and a half-height item pays the
    token traffic of a full one.
    """
    last_wave = num_items % num_ctas
    return last_wave * (2 * last_wave <= num_ctas) * (slices_per_item - 1)


def num_halved_fused(num_fc1_items, num_fc2_items, num_ctas, slices_per_item):
    """The same for both lists of the fused layer: (of FC1, of FC2).

    FC1 items that do not fill the CTAs are all halved, and FC2's with them: one CTA alone cannot
    draw its share of memory bandwidth twice. Else FC1 ends as a GEMM by itself does, as the FC2
    items of its last experts wait for it, and half a wave of FC2 items evens out the end.
    """
    is_short = (num_fc1_items < num_ctas) * (slices_per_item - 1)
    half_wave = num_ctas // 2 * (slices_per_item - 1)
    is_fewer = num_fc2_items < half_wave
    at_end = select(is_fewer, num_fc2_items, half_wave)
    fc1_at_end = num_halved_items(num_fc1_items, num_ctas, slices_per_item)
    return (
        select(is_short, num_fc1_items, fc1_at_end),
        select(is_short, num_fc2_items, at_end),
    )


def listed_item(index, num_items, num_halved):
    """Item behind position `index` of the list, and which part of it: 0 all, 1 or 2 a half."""
    first_halved = num_items - num_halved
    is_half = index >= first_halved
    past = (index - first_halved) * is_half
    return select(is_half, first_halved, index) + past // 2, (1 + past % 2) * is_half


def item_slices(row_item, part, num_slices, slices_per_item):
    """First slice of the item (or half of it), and how many there are: 0 for an empty half."""
    first = row_item * slices_per_item + (part > 1)
    count = select(part > 0, 1, slices_per_item)
    left = num_slices - first
    return first, select(left < count, left, count)


@dataclass(frozen=True)
class Item:
    """One unit of a CTA's work. Rows are pool rows: expert-sorted tokens of this rank."""

    expert: int
    first_slice: int
    num_slices: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class GemmGrid:
    """What cuts one GEMM into items.

    num_slices       slices of an expert's weight rows
    slices_per_item  slices that one item covers
    max_tile_width   widest token tile
    num_ctas         CTAs that share the list
    """

    num_slices: int
    slices_per_item: int
    max_tile_width: int
    num_ctas: int

    @property
    def row_items(self) -> int:
        return ceil_div(self.num_slices, self.slices_per_item)


def expert_order(rows_per_expert: Sequence[int]) -> list[int]:
    """Experts by falling number of rows; the lower expert first among equals."""
    return sorted(range(len(rows_per_expert)), key=lambda e: (-rows_per_expert[e], e))


def items(
    rows_per_expert: Sequence[int], grid: GemmGrid, num_halved: int | None = None
) -> Iterator[Item]:
    """The list that the kernels walk, empty halves left out.

    `num_halved`: default, that of a GEMM by itself.
    """
    first_rows = [sum(rows_per_expert[:e]) for e in range(len(rows_per_expert))]
    order = expert_order(rows_per_expert)
    tiles = [num_token_tiles(rows, grid.max_tile_width) for rows in rows_per_expert]
    num_items = grid.row_items * sum(tiles)
    if num_halved is None:
        num_halved = num_halved_items(num_items, grid.num_ctas, grid.slices_per_item)
    for index in range(num_items + num_halved):
        item, part = listed_item(index, num_items, num_halved)
        for expert in order:
            if item < grid.row_items * tiles[expert]:
                break
            item -= grid.row_items * tiles[expert]
        row_item, tile = divmod(item, tiles[expert])
        first_slice, num_slices = item_slices(row_item, part, grid.num_slices, grid.slices_per_item)
        first, count = tile_rows(tile, rows_per_expert[expert], tiles[expert])
        if num_slices:
            yield Item(expert, first_slice, num_slices, first_rows[expert] + first, count)


def fused_items(
    rows_per_expert: Sequence[int], fc1: GemmGrid, fc2: GemmGrid
) -> Iterator[tuple[int, Item]]:
    """(GEMM, item), GEMM 0 = FC1 and 1 = FC2: the list that the fused kernel walks."""
    num_tiles = sum(num_token_tiles(rows, fc1.max_tile_width) for rows in rows_per_expert)
    num_halved = num_halved_fused(
        num_tiles * fc1.row_items, num_tiles * fc2.row_items, fc1.num_ctas, fc1.slices_per_item
    )
    for gemm, grid in enumerate((fc1, fc2)):
        for item in items(rows_per_expert, grid, num_halved[gemm]):
            yield gemm, item

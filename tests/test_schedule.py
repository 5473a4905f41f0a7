"""The order of work of one GEMM: every tile once, the longest expert first. CPU, plain integers."""

import pytest
import torch

from moe_ep.megakernel import schedule

CASES = [[8] * 32, [0, 5, 0, 77, 300, 1], [1], [0, 0], [4096, 0, 1, 33], [64] * 3]


@pytest.mark.parametrize("slices_per_item, num_slices", [(2, 16), (2, 7), (1, 5)])
@pytest.mark.parametrize("rows", CASES)
def test_items_cover_every_row_and_slice_once(rows, slices_per_item, num_slices):
    grid = schedule.GemmGrid(num_slices, slices_per_item, max_tile_width=32, num_ctas=132)
    seen = torch.zeros(sum(rows), num_slices, dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    lengths = []
    for item in schedule.items(rows, grid):
        assert 0 < item.num_rows <= 32 and 0 < item.num_slices <= slices_per_item
        pool = slice(item.first_row, item.first_row + item.num_rows)
        assert torch.all(owner[pool] == item.expert)
        seen[pool, item.first_slice : item.first_slice + item.num_slices] += 1
        lengths.append(rows[item.expert])
    assert torch.all(seen == 1)
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    "num_items, expected",
    # None; all of fewer than half the CTAs; a last wave that half fills them; one that does more.
    [(0, 0), (1, 1), (66, 66), (67, 0), (132, 0), (256, 0), (448, 52), (330, 66), (331, 0)],
)
def test_a_last_wave_is_halved_only_where_that_ends_earlier(num_items, expected):
    assert schedule.num_halved_items(num_items, 132, 2) == expected
    assert schedule.num_halved_items(num_items, 132, 1) == 0

"""What the host makes of a device's record, written here as the GPU writes it."""

import ctypes

import pytest

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.comm.post_mortem import FIELDS, RECORD_WORDS, PostMortem

PHASES = {1: "arrived", 4: "fc1"}


def write(post_mortem: PostMortem, record: int, **values: int) -> None:
    words = (ctypes.c_int32 * RECORD_WORDS).from_address(post_mortem.address + 64 * record)
    for name, value in values.items():
        words[FIELDS.index(name)] = value


def test_nothing_found_is_nothing_raised():
    PostMortem(2).check(PHASES, top_k=4)


def test_a_wait_for_a_peer_is_named():
    post_mortem = PostMortem(2)
    write(post_mortem, 1, is_set=1, phase=1, rank=1, step=7, peer=3, expected=7, seen=6)
    for _ in range(2):  # it stays
        with pytest.raises(MoEEpTimeoutError, match="phase arrived for rank 3: expected 7"):
            post_mortem.check(PHASES, top_k=4)


def test_a_wait_for_rows_names_the_expert():
    post_mortem = PostMortem(1)
    fields = dict(phase=4, rank=0, step=2, peer=0, expected=256, seen=255, expert=0 + 1)
    write(post_mortem, 0, is_set=1, **fields)
    with pytest.raises(MoEEpTimeoutError, match="rank 0, expert 0: expected 256") as error:
        post_mortem.check(PHASES, top_k=4)
    found = error.value
    assert (found.phase, found.step, found.expert) == ("fc1", 2, 0)
    assert (found.expected, found.seen, found.ranks) == (256, 255, (0,))


def test_a_bad_id_is_named_once():
    post_mortem = PostMortem(1)
    write(post_mortem, 0, bad_slot=1 + 2 * 4 + 3, bad_id=99)
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[2, 3\] was 99"):
        post_mortem.check(PHASES, top_k=4)
    post_mortem.check(PHASES, top_k=4)


def test_a_refusal_is_named_once():
    post_mortem = PostMortem(3)
    write(post_mortem, 2, status=-1 - 5, status_rank=1)
    with pytest.raises(MoEEpConfigError, match=r"rank 1 refused its input \(code 5\)"):
        post_mortem.check(PHASES, top_k=4)
    post_mortem.check(PHASES, top_k=4)


def test_a_refusal_names_the_argument_and_is_dropped_where_it_was_raised_already():
    post_mortem, refusals = PostMortem(1), ("hidden_states", "topk_ids")
    write(post_mortem, 0, status=-1 - 1, status_rank=2, bad_slot=1)
    with pytest.raises(MoEEpConfigError, match="rank 2 refused its topk_ids"):
        post_mortem.check(PHASES, top_k=4, refusals=refusals, own_rank=0)
    write(post_mortem, 0, status=-1 - 1, status_rank=2)
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[0, 0\]"):  # a second finding is kept
        post_mortem.check(PHASES, top_k=4, refusals=refusals, own_rank=2)
    post_mortem.check(PHASES, top_k=4, refusals=refusals, own_rank=2)

"""Integer facts of dispatch and combine: who does what, and what a signal's value means.

The kernels trace these functions on device integers, `interpreter.py` runs them on Python's, so
that the protocol that is checked is the protocol that runs. One step (a launch) on each rank:

    A stage    a CTA for each peer writes ids (under tp weights too) and num_tokens there and
               signals routed[rank] = step (release, system); the CTAs that have tokens copy x to
               x_stage and count `staged`, and the last of them signals arrived[rank] = step at
               every peer
    B wait     until routed[r] >= step for all r (acquire, system)           first barrier of ranks
    C scan     every CTA counts all routes to its rank's experts and gives the slots of its own
               share of tokens their pool rows: src_meta (tagged with the step) and pool_row
    D pull     rows in pool order, CTA by CTA: peer's x_stage -> pool; tokens_arrived[tile] += rows.
               Tokens of a peer are read once arrived[peer] >= step, own ones where the caller has
               them
    E items    FC1 waits for tokens_arrived[tile], FC2 for fc1_done[tile]; FC2 writes BF16 terms to
               the source rank's [token, slot]
    F drain    count `finished`; the last CTA signals drained[rank] = step at every peer, unless a
               CTA has given up a wait; wait until drained[r] >= step for all r
                                                                             second barrier of ranks
    G reduce   own tokens, in slot order

Where tokens are few (`are_few`) each CTA keeps to its own share instead: it places their slots and
brings their rows at once, without a signal in between. Where they are no more than the CTAs, some
CTAs share a token (`ctas_per_token`).

Under tp every rank computes for every token, with its part of I. FC2 rows then stay on their rank:

    F drain    count `finished` and wait for all CTAs of the rank; every CTA sums its share of all
               ranks' tokens, in slot order, into the owner's parts[rank]; count `summed`, whose
               last CTA signals drained; wait as above
    G reduce   own tokens' parts, in rank order

Two barriers are enough. x_stage, ids, weights and num_tokens of step n + 1 are written after the
writer's step n ended, so after every peer drained step n. Terms (parts) of n + 1 are written after
their owner's routed = n + 1, so after its reduction of n. With one rank A and B are empty, ids are
read where the caller has them, and F is the count alone.
"""

from enum import IntEnum

from moe_ep.megakernel.schedule import ceil_div, select

WARP_SIZE = 32


class Phase(IntEnum):
    """What a bounded wait was for; the first word of its record."""

    ARRIVED = 1  # peer's tokens
    ROUTE = 2  # source of a pool row, from another CTA of this rank
    TOKENS = 3  # pool rows of a tile
    FC1 = 4  # hidden rows of a tile
    FINISHED = 5  # CTAs of this rank
    DRAINED = 6  # peer's terms
    COPY = 7  # a bulk copy
    ROUTED = 8  # peer's ids and number of tokens


class Moment(IntEnum):
    """Time stamps of a CTA, in the order of its launch."""

    STARTED = 0
    STAGED = 1
    ROUTED = 2
    SCANNED = 3
    BROUGHT = 4
    DRAINED = 5
    ENDED = 6
    # Of the whole layer: rows of the first item are there; the last item is done.
    FED = 7
    WORKED = 8


def bank(step):
    """Counters of this step; the other bank is cleared in it."""
    return step & 1


def has_reached(seen, step):
    """Whether an epoch flag shows `step` or later; the difference survives 32-bit wrapping."""
    return seen - step >= 0


def source_rank(rank, position, num_ranks):
    """Ranks in the order in which `rank` takes their tokens: its own first, then round robin, so
    that no two ranks pull from the same one at the same time."""
    return (rank + position) % num_ranks


def share_bounds(num_tokens, num_ctas, cta):
    """First and one past the last token that a CTA handles: equal shares, rounded up."""
    share = ceil_div(num_tokens, num_ctas)
    return cta * share, (cta + 1) * share


def num_stagers(num_tokens, num_ctas):
    """How many CTAs copy tokens to x_stage, in shares; where there are none, one still signals.

    They are the last CTAs of a rank, as the first ones write ids to the peers.
    """
    num_staged = at_least_one(num_tokens)
    return ceil_div(num_staged, ceil_div(num_staged, num_ctas))


def ctas_per_token(num_tokens, num_ctas, top_k):
    """CTAs that bring one token (counted over all ranks) into the pool; 0 where they are too few.

    CTA c brings token c // n, of its slots those with slot % n == c % n.
    """
    num_ctas = num_ctas // at_least_one(num_tokens)
    return select(num_ctas < top_k, num_ctas, top_k)


def are_few(num_tokens, num_ctas, top_k, most):
    """Whether the threads of a CTA bring its tokens (counted over all ranks) at once: at most
    `most`, and a lane of a warp for each of their slots."""
    share = ceil_div(num_tokens, num_ctas)
    return (share <= most) & (share * top_k <= WARP_SIZE)


def at_least_one(number):
    return select(number == 0, 1, number)


def slot_index(rank, token, slot, capacity, top_k):
    """A slot among those of all ranks: the index of pool_row, the low 31 bits of src_meta."""
    return (rank * capacity + token) * top_k + slot


def slot_source(index, capacity, top_k):
    """(rank, token, slot) of a slot index."""
    token = index // top_k
    return token // capacity, token % capacity, index % top_k


LEAD_BIT = 1 << 31
SLOT_MASK = LEAD_BIT - 1


def src_meta_low(index, is_lead):
    """Low word of a pool row's src_meta; the high word is the step in which it was written.

    The row is pulled by whoever sees a lead entry: each row of an own token, the first row of a
    peer's (the token crosses the ranks once and is written to all its rows). The entries of the
    token's other rows and its pool_row are written before the lead entry is released.
    """
    return index + is_lead * LEAD_BIT

"""What the interpreter runs under tp in place of the reduction: see `protocol.py` and
`combine_tp.py`. Functions of a `Run`, programs of one CTA of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_ep.megakernel import protocol
from moe_ep.megakernel.memory_model import Op, Program
from moe_ep.megakernel.protocol import Phase

if TYPE_CHECKING:
    from moe_ep.megakernel.interpreter import Run


def send_parts(run: Run, rank: int, cta: int, step: int) -> Program:
    """This CTA's share of the sums over the slots, for all ranks' tokens, to their owners."""
    num_ctas, num_ranks = run.setup.num_ctas, run.num_ranks
    finished = (rank, "counters", protocol.bank(step), run.counters.finished)
    yield Op("add", finished, 1)
    yield Op(
        *("wait", finished),
        ready=lambda seen: seen >= num_ctas,
        phase=Phase.FINISHED,
        peer=rank,
        expected=num_ctas,
    )
    routing = yield from run.read_routing(rank, step)
    if any(isinstance(tokens, int) for tokens in routing):
        return
    sources = [protocol.source_rank(rank, i, num_ranks) for i in range(num_ranks)]
    tokens = [(source, token) for source in sources for token in range(len(routing[source]))]
    for source, token in tokens[cta::num_ctas]:
        weights = (step, rank, token)
        if num_ranks > 1:
            weights = yield Op("read", (rank, "weights", source, token))
        terms = []
        for slot, expert in enumerate(routing[source][token]):
            for s in range(run.setup.fc2_slices if expert >= 0 else 0):
                term = yield Op("read", (rank, "terms", source, token, slot, s))
                terms += [term] if s == 0 else []
        yield Op("write", (source, "parts", rank, token), (rank, weights, *terms))
    # Counted in `summed` next, by the drain.


def reduce_parts(run: Run, rank: int, cta: int, step: int) -> Program:
    """This CTA's own tokens, from the parts of all ranks in rank order."""
    routing = run.routings[step - 1]
    if any(isinstance(tokens, int) for tokens in routing):
        return
    for token in range(cta, len(routing[rank]), run.setup.num_ctas):
        parts = []
        for peer in range(run.num_ranks):
            parts.append((yield Op("read", (rank, "parts", peer, token))))
        yield Op("write", (rank, "out", token), tuple(parts))

"""Where the time of the mega kernel, or of its transport alone, goes: time stamps of its CTAs.

    routing       until a rank knows what its experts receive
    first token   until the first GEMM item has its rows
    FC1 and FC2   until the last GEMM item of the last CTA
    drain         until every rank's terms are here
    reduce        until the last output row

Stamps need builds of their own, which are a few percent slower; spans are those of the rank that
takes longest, the one launch of several that is the median.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_ep.comm.group import EpGroup
from moe_ep.inputs import MoEInputs
from moe_ep.launch.timing import all_reduce, flush_buffer
from moe_ep.megakernel.problem import MoEShape
from moe_ep.weights import MoEWeights

NUM_LAUNCHES = 11


@dataclass(frozen=True)
class Stages:
    """spans_us    microseconds of each stage, one after the other
    moments_us  first, median and last CTA at each `protocol.Moment`, after the first CTA's start
    """

    spans_us: dict[str, float]
    moments_us: dict[str, list[float]]


class StampedLayer:
    """The mega kernel with stamps, beside a layer of the same geometry, whose workspace it shares.
    Collective over `group`."""

    def __init__(
        self, shape: MoEShape, weights: MoEWeights, group: EpGroup, max_tokens: int
    ) -> None:
        from moe_ep.megakernel.formats import prepare
        from moe_ep.megakernel.mega_moe import MegaMoE  # needs CuTe DSL

        self._group = group
        self._prepared = prepare(weights)
        self._mega = MegaMoE(
            group,
            shape,
            weights.weights_format,
            max_tokens_per_rank=max_tokens,
            parallel=weights.parallel,
            has_bias13=weights.b13 is not None,
            has_bias2=weights.b2 is not None,
            takes_stamps=True,
        )
        self._mega.warmup()

    def measure(self, inputs: MoEInputs) -> Stages:
        """Collective."""
        out = torch.empty_like(inputs.hidden_states)

        def launch() -> None:
            self._mega.forward(
                *(inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, self._prepared, out),
                max_tokens=len(out),
            )

        moments = median_launch(launch, self._mega.stamps, self._group)
        self._mega.check()
        spans = spans_us(moments)
        slowest = torch.tensor(list(spans.values()), device=self._group.device)
        all_reduce(slowest, dist.ReduceOp.MAX, self._group)
        return Stages(dict(zip(spans, slowest.tolist(), strict=True)), moments)

    def destroy(self) -> None:
        self._mega.destroy()


def median_launch(
    launch: Callable[[], None], stamps: torch.Tensor, group: EpGroup
) -> dict[str, list[float]]:
    """`Stages.moments_us` of the launch of several that is the median; `stamps` are what it
    writes. Collective: ranks start together, L2 holds nothing of the launch before."""
    flush, flag = flush_buffer(group.device), torch.zeros(1, device=group.device)
    launches = []
    for _ in range(NUM_LAUNCHES):
        stamps.zero_()
        flush.sum()
        all_reduce(flag, dist.ReduceOp.SUM, group)
        launch()
        torch.cuda.synchronize(group.device)
        launches.append(moments_us(stamps.cpu()))
    launches.sort(key=lambda moments: moments["ENDED"][-1])
    return launches[NUM_LAUNCHES // 2]


def moments_us(stamps: torch.Tensor) -> dict[str, list[float]]:
    """`stamps` int64 [CTAs, moments], nanoseconds, 0 where a CTA took none -> `Stages.moments_us`,
    without the moments that no CTA stamped."""
    from moe_ep.megakernel.protocol import Moment

    started = stamps[:, Moment.STARTED]
    stamps = stamps[started > 0]
    start = stamps[:, Moment.STARTED].min()
    found = {}
    for moment in Moment:
        times = stamps[:, moment]
        times = (times[times > 0] - start).sort().values
        if len(times):
            found[moment.name] = [float(times[i]) / 1e3 for i in (0, len(times) // 2, -1)]
    return found


def spans_us(moments: dict[str, list[float]]) -> dict[str, float]:
    """Each stage ends where the module says, and starts where the one before it ended."""
    ends = {
        "routing": moments["SCANNED"][-1],
        "first token": moments.get("FED", moments["SCANNED"][-1:])[0],
        "FC1 and FC2": moments["WORKED"][-1],
        "drain": moments["DRAINED"][-1],
        "reduce": moments["ENDED"][-1],
    }
    spans, before = {}, 0.0
    for name, end in ends.items():
        spans[name] = max(0.0, end - before)
        before = max(before, end)
    return spans

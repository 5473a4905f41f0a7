"""Time the builds of the mega kernel that fit a layer, on all ranks, and choose among them.

Ranks launch the same builds equally often; the slowest rank's time counts, and every rank comes to
the same choice. What a cache of one rank holds is asked of rank 0.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.fingerprint import COMPILE_TIMEOUT_S, agree
from moe_ep.megakernel import tune
from moe_ep.megakernel.compile_cache import compile_all
from moe_ep.megakernel.formats import PreparedWeights
from moe_ep.megakernel.knobs import KernelKnobs
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.mega_spec import Bucket
from moe_ep.megakernel.problem import MoEShape
from moe_ep.random_inputs import random_inputs

NUM_WARM_LAUNCHES = 2
NUM_TIMED_LAUNCHES = 9
NUM_L2_FLUSHED = 2  # times the L2 cache, read between launches

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """seconds   [candidate][number of tokens], of the slowest rank
    path      of the file that keeps `buckets`; None on other ranks than 0, or if there is none
    """

    buckets: tuple[Bucket, ...]
    knobs: tuple[KernelKnobs, ...]
    counts: tuple[int, ...]
    seconds: list[list[float]]
    path: Path | None


class Tuner:
    """The question of one layer: which builds for up to `max_tokens` tokens of a rank."""

    def __init__(
        self,
        group: EpGroup,
        shape: MoEShape,
        prepared: PreparedWeights,
        max_tokens: int,
        *,
        parallel: str = "ep",
        max_sms: int | None,
        timeout_s: float,
    ) -> None:
        self._group, self._shape, self._prepared = group, shape, prepared
        self._max_tokens, self._timeout_s = max_tokens, timeout_s
        self._options = {
            "max_tokens_per_rank": max_tokens,
            "parallel": parallel,
            "has_bias13": prepared.b13 is not None,
            "has_bias2": prepared.b2 is not None,
            "max_sms": max_sms,
        }
        self._key = tune.knob_key(
            device_name=torch.cuda.get_device_name(group.device),
            shape=shape,
            weights_format=prepared.weights_format,
            num_ranks=group.num_ranks,
            **self._options,
        )

    def known(self) -> tuple[Bucket, ...] | None:
        """What rank 0 has kept from an earlier `run`. Collective."""
        found = tune.find(self._key) if self._group.rank == 0 else None
        record = None if found is None else tune.to_json(found)
        _, records = exchange_records(self._group, "knobs", record, self._timeout_s)
        return None if records[0] is None else tune.from_json(records[0])

    def run(self, *, is_skewed: bool = False) -> Tuned:
        """Compile and time every candidate; rank 0 keeps the choice. Collective.

        is_skewed   every second token has expert 0 among its experts
        """
        group, shape = self._group, self._shape
        knobs = tune.candidates(
            *(self._prepared.weights_format, shape, self._max_tokens, group.num_ranks),
            self._options["parallel"],
        )
        counts = tune.token_counts(self._max_tokens)
        layers: list[MegaMoE] = []
        try:
            for one in knobs:  # each takes memory that all ranks take together
                self._together(lambda one=one: layers.append(self._layer(one)))
            self._together(lambda: compile_all([layer.kernel_builds()[0] for layer in layers]))
            seconds = self._sweep(layers, counts, is_skewed)
        finally:
            for layer in layers:
                layer.destroy()
        _, of_ranks = exchange_records(group, "tune/seconds", seconds, self._timeout_s)
        seconds = [
            [max(times) for times in zip(*rows, strict=True)]
            for rows in zip(*of_ranks, strict=True)
        ]
        buckets = tune.choose(knobs, counts, seconds)
        path = self._keep(buckets) if group.rank == 0 else None
        _log.info("tuned builds, by tokens: %s", describe(buckets))
        return Tuned(buckets=buckets, knobs=knobs, counts=counts, seconds=seconds, path=path)

    def _together(self, step: Callable[[], object]) -> None:
        """`step` on every rank; where one fails all raise, and none goes on alone."""
        refusal = None
        try:
            step()
        except Exception as error:  # told to the other ranks, then raised
            refusal = error
        agree(self._group, {}, refusal, max(self._timeout_s, COMPILE_TIMEOUT_S), "tune")

    def _keep(self, buckets: Sequence[Bucket]) -> Path | None:
        """The file; None where it cannot be written, as what was found serves this process."""
        try:
            return tune.store(self._key, buckets)
        except OSError as error:
            _log.warning("tuned builds are not kept for later processes: %s", error)
            return None

    def _layer(self, knobs: KernelKnobs) -> MegaMoE:
        return MegaMoE(
            self._group,
            self._shape,
            self._prepared.weights_format,
            knobs=knobs,
            timeout_s=self._timeout_s,
            **self._options,
        )

    def _sweep(
        self, layers: Sequence[MegaMoE], counts: Sequence[int], is_skewed: bool
    ) -> list[list[float]]:
        group = self._group
        inputs = {
            n: random_inputs(self._shape, n, group, is_skewed=is_skewed, id_dtype=torch.int32)
            for n in counts
        }
        l2_bytes = torch.cuda.get_device_properties(group.device).L2_cache_size
        flush = torch.zeros(
            NUM_L2_FLUSHED * l2_bytes // 4, dtype=torch.float32, device=group.device
        )

        def measure(layer_idx: int, num_tokens: int) -> float:
            layer, given = layers[layer_idx], inputs[num_tokens]
            tensors = (given.hidden_states, given.topk_ids, given.topk_weights)
            out = torch.empty_like(given.hidden_states)
            seconds = []
            for _ in range(NUM_WARM_LAUNCHES + NUM_TIMED_LAUNCHES):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.sum()
                start.record()
                layer.forward(*tensors, self._prepared, out, max_tokens=num_tokens)
                end.record()
                seconds.append((start, end))
            torch.cuda.synchronize(group.device)
            layer.check()
            timed = sorted(s.elapsed_time(e) for s, e in seconds[NUM_WARM_LAUNCHES:])
            return timed[NUM_TIMED_LAUNCHES // 2] / 1e3

        with torch.cuda.device(group.device), torch.inference_mode():
            return tune.sweep(measure, len(layers), counts, is_shown=group.rank == 0)


def describe(buckets: Sequence[Bucket]) -> str:
    """`up to 64: 4 warpgroups x 2 slices, tiles 8-32, 5 stages; ...`"""
    return "; ".join(f"up to {b.max_tokens}: {describe_knobs(b.knobs)}" for b in buckets)


def describe_knobs(knobs: KernelKnobs) -> str:
    widths = knobs.tile_widths
    return (
        f"{knobs.num_math_warpgroups} warpgroups x {knobs.slices_per_item} slices, tiles "
        f"{widths[0]}-{widths[-1]}, {knobs.stages} stages"
    )

"""Which builds of the mega kernel suit one layer on one kind of GPU, found by measuring.

    candidates    builds worth a try: the table's, with other slices, tiles and stages that fit
    token_counts  numbers of tokens to measure at
    sweep         seconds of every candidate at each of them, by a function that measures
    choose        from those, the buckets of a layer
    store, find   buckets in a file under the cache folder, written at once

Everything but `store` and `find` is pure. No choice changes a bit of the output.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import Progress

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.compile_cache import (
    SOURCE_DIGEST,
    cache_dir,
    writable_dir,
    write_atomically,
)
from moe_ep.megakernel.knobs import KNOB_TABLE, KernelKnobs
from moe_ep.megakernel.mega_spec import (
    MAX_LENDING_WIDTH,
    Bucket,
    fit_spec,
    make_buckets,
    make_layout,
)
from moe_ep.megakernel.problem import MoEShape

MAX_STAGES = 8
# A build that is this near to the best one is as good: times repeat to about one percent.
EQUAL_SHARE = 0.01

_log = logging.getLogger(__name__)


def candidates(
    weights_format: str,
    shape: MoEShape,
    max_tokens_per_rank: int,
    num_ranks: int,
    parallel: str = "ep",
) -> tuple[KernelKnobs, ...]:
    """Builds that fit a layer, those of the knob table first.

    Of each row of the table: one or two slices and the tiles of any row with as many math
    warpgroups, up to as many accumulator columns as one of these rows has; the stages of the row
    and as many as fit. Tiles more than twice as wide as the table's widest for this capacity are
    left out.
    """
    rows = [row.knobs for row in KNOB_TABLE if weights_format in row.formats]
    table = make_buckets(weights_format, shape, max_tokens_per_rank, num_ranks, parallel)
    widest = 2 * max(bucket.knobs.max_tile_width for bucket in table)
    found = {bucket.knobs: None for bucket in table}  # a set in order
    for row in rows:
        alike = [k for k in rows if k.num_math_warpgroups == row.num_math_warpgroups]
        most_columns = max(k.slices_per_item * k.max_tile_width for k in alike)
        for widths in dict.fromkeys(k.tile_widths for k in alike):
            for slices in (1, 2):
                if slices * widths[-1] > most_columns or widths[-1] > widest:
                    continue
                for stages in (row.stages, MAX_STAGES):
                    knobs = replace(row, slices_per_item=slices, tile_widths=widths, stages=stages)
                    knobs = _fitted(knobs, weights_format, shape, num_ranks, parallel)
                    if knobs is not None:
                        found[knobs] = None
    return tuple(found)


def _fitted(
    knobs: KernelKnobs, weights_format: str, shape: MoEShape, num_ranks: int, parallel: str
) -> KernelKnobs | None:
    """With fewer stages where not all fit; None where a wide build would lend its ring, see
    `make_buckets`, or nothing fits."""
    layout = make_layout(shape, num_ranks, 1, (Bucket(1, knobs),), parallel)
    options = {"weights_format": weights_format, "has_bias13": True, "has_bias2": True}
    while True:
        try:
            spec = fit_spec(shape=shape, layout=layout, knobs=knobs, **options)
        except MoEEpConfigError:
            return None
        knobs = spec.knobs
        if spec.num_lent_stages == 0 or knobs.max_tile_width <= MAX_LENDING_WIDTH:
            return knobs
        if knobs.stages <= 3:
            return None
        knobs = replace(knobs, stages=knobs.stages - 1)


def token_counts(max_tokens_per_rank: int) -> tuple[int, ...]:
    """Powers of two below the capacity, and the capacity."""
    powers = [1 << i for i in range(max_tokens_per_rank.bit_length())]
    return (*(n for n in powers if n < max_tokens_per_rank), max_tokens_per_rank)


def sweep(
    measure: Callable[[int, int], float],
    num_candidates: int,
    counts: Sequence[int],
    *,
    is_shown: bool,
) -> list[list[float]]:
    """Seconds [candidate][number of tokens] of `measure(candidate_idx, num_tokens)`.

    is_shown   whether this process draws the progress bar
    """
    seconds = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not is_shown) as progress:
        bar = progress.add_task("tuning the mega kernel", total=num_candidates * len(counts))
        for candidate_idx in range(num_candidates):
            seconds.append([])
            for num_tokens in counts:
                seconds[-1].append(measure(candidate_idx, num_tokens))
                progress.advance(bar)
    return seconds


def choose(
    knobs: Sequence[KernelKnobs], counts: Sequence[int], seconds: Sequence[Sequence[float]]
) -> tuple[Bucket, ...]:
    """The build of each number of tokens, by ascending tokens: the one of fewer tokens as long as
    it is as good as the best, else the best."""
    buckets: list[Bucket] = []
    current = None
    for count_idx, num_tokens in enumerate(counts):
        times = [row[count_idx] for row in seconds]
        best = min(times)
        if current is None or times[current] > (1 + EQUAL_SHARE) * best:
            current = times.index(best)
        else:
            buckets.pop()
        buckets.append(Bucket(num_tokens, knobs[current]))
    return tuple(buckets)


# ---- what was found, kept for later processes


def knob_key(
    *,
    device_name: str,
    shape: MoEShape,
    weights_format: str,
    num_ranks: int,
    max_tokens_per_rank: int,
    parallel: str,
    has_bias13: bool,
    has_bias2: bool,
    max_sms: int | None,
) -> dict[str, object]:
    """Everything that times depend on, the kernel's source among it."""
    return {
        "device": device_name,
        "shape": repr(shape),
        "weights_format": weights_format,
        "activations": "bf16",
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens_per_rank,
        "parallel": parallel,
        "biases": [has_bias13, has_bias2],
        "max_sms": max_sms,
        "source": SOURCE_DIGEST,
    }


def store(key: dict[str, object], buckets: Sequence[Bucket]) -> Path:
    """Write what a layer of this key takes from now on; the file's path."""
    path = writable_dir(cache_dir()) / _file_name(key)
    record = {"key": key, "buckets": to_json(buckets)}
    with FileLock(path.with_suffix(".lock")):
        write_atomically(path, json.dumps(record, indent=1).encode())
    return path


def find(key: dict[str, object]) -> tuple[Bucket, ...] | None:
    """What `store` has written last; None where there is no whole file of this key."""
    directories = dict.fromkeys((cache_dir(), writable_dir(cache_dir())))
    for directory in directories:
        path = directory / _file_name(key)
        try:
            record = json.loads(path.read_text())
            if record["key"] == key:
                return from_json(record["buckets"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is not what was tuned (%s): it is passed over", path, error)
    return None


def to_json(buckets: Sequence[Bucket]) -> list[dict[str, object]]:
    return [asdict(bucket) for bucket in buckets]


def from_json(items: Sequence[dict]) -> tuple[Bucket, ...]:
    """Raises `ValueError`, `KeyError` or `TypeError` for what `to_json` has not made."""
    buckets = []
    for item in items:
        fields = item["knobs"] | {"tile_widths": tuple(item["knobs"]["tile_widths"])}
        buckets.append(Bucket(item["max_tokens"], KernelKnobs(**fields)))
    limits = [bucket.max_tokens for bucket in buckets]
    if not limits or limits != sorted(set(limits)):
        raise ValueError(f"buckets of {limits} tokens do not ascend")
    return tuple(buckets)


def _file_name(key: dict[str, object]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"knobs_{digest[:24]}.json"

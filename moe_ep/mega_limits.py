"""What the mega kernel takes: ranks, configuration, shape.

Plain questions with a reason as answer, None where nothing stands against it; no kernel is loaded.
"""

from bisect import bisect_left
from dataclasses import replace
from importlib.util import find_spec

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.config import MegaConfig
from moe_ep.megakernel.grouped_gemm import CHANNEL_MULTIPLE
from moe_ep.megakernel.knobs import MAX_LOCAL_EXPERTS, KernelKnobs
from moe_ep.megakernel.mega_spec import fit_spec, make_buckets, make_layout, most_local_experts
from moe_ep.megakernel.problem import MoEShape

# Why the kernel is not offered to layers at all, for tests of what a layer does without it.
PENDING: str | None = None


def layer_misfit(
    shape: MoEShape,
    weights_format: str,
    config: MegaConfig,
    *,
    parallel: str,
    num_ranks: int,
    max_tokens_per_rank: int | None = None,
) -> str | None:
    """Why the kernel cannot run the layer, on whatever device."""
    kernel = config.megakernel
    if PENDING is not None:
        return PENDING
    if kernel.activations != "bf16":
        return f"activations={kernel.activations!r} is not built yet; allowed: 'bf16'"
    if not config.preprocess_weights:
        return "preprocess_weights=False is not built yet; allowed: True"
    knobs = kernel.knobs
    if parallel == "ep" and shape.num_experts < num_ranks:
        return f"{num_ranks} ranks hold {shape.num_experts} experts; allowed: at least one each"
    num_local_experts = most_local_experts(shape, num_ranks, parallel)
    if num_local_experts > MAX_LOCAL_EXPERTS:
        return f"a rank holds {num_local_experts} experts; allowed: at most {MAX_LOCAL_EXPERTS}"
    if reason := peers_misfit(num_ranks):
        return reason
    given = knobs if isinstance(knobs, KernelKnobs) else None
    division = {"parallel": parallel, "num_ranks": num_ranks}
    misfit = builds_misfit(shape, weights_format, given, **division)
    if misfit is not None and given is None:
        most = most_hidden(shape, weights_format, **division)
        if 0 < most < shape.hidden // CHANNEL_MULTIPLE * CHANNEL_MULTIPLE:
            return (
                f"hidden is {shape.hidden}; allowed for {num_local_experts} experts of a rank in "
                f"{weights_format}: at most {most}"
            )
    if misfit is None and max_tokens_per_rank is not None:
        buckets = make_buckets(weights_format, shape, max_tokens_per_rank, num_ranks, parallel)
        try:
            make_layout(shape, num_ranks, max_tokens_per_rank, buckets, parallel)
        except MoEEpConfigError as error:
            return str(error)
    return misfit


def most_hidden(shape: MoEShape, weights_format: str, *, parallel: str, num_ranks: int) -> int:
    """The largest hidden, up to the shape's, for which the table's builds fit; 0 if none does."""

    def is_too_wide(num_units: int) -> bool:
        narrower = replace(shape, hidden=CHANNEL_MULTIPLE * num_units)
        misfit = builds_misfit(
            narrower, weights_format, None, parallel=parallel, num_ranks=num_ranks
        )
        return misfit is not None

    units = range(1, shape.hidden // CHANNEL_MULTIPLE + 1)
    return CHANNEL_MULTIPLE * bisect_left(units, True, key=is_too_wide)


def builds_misfit(
    shape: MoEShape,
    weights_format: str,
    given: KernelKnobs | None,
    *,
    parallel: str,
    num_ranks: int,
) -> str | None:
    """Why a build of the layer, the one given or one of the table's, does not fit."""
    try:
        buckets = make_buckets(weights_format, shape, 1 << 20, num_ranks, parallel)
        layout = make_layout(shape, num_ranks, 1, buckets, parallel)
        for knobs in [given] if given else [bucket.knobs for bucket in buckets]:
            spec = fit_spec(
                shape=shape,
                layout=layout,
                knobs=knobs,
                weights_format=weights_format,
                has_bias13=True,
                has_bias2=True,
            )
            if given and spec.knobs != given:
                return (
                    f"knobs have {given.stages} stages; allowed for this layer: at most "
                    f"{spec.knobs.stages}"
                )
    except MoEEpConfigError as error:
        return str(error)
    return None


def peers_misfit(num_ranks: int) -> str | None:
    """Why so many ranks cannot reach each other's memory, or None."""
    if num_ranks > 1 and find_spec("nvshmem") is None:
        return f"{num_ranks} ranks need nvshmem4py (pip install 'moe-ep[gpu]')"
    return None

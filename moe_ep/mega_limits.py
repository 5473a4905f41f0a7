"""What the mega kernel takes: ranks, configuration, shape.

Plain questions with a reason as answer, None where nothing stands against it; no kernel is loaded.
"""

from importlib.util import find_spec

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.config import MegaConfig
from moe_ep.megakernel.knobs import MAX_LOCAL_EXPERTS, KernelKnobs
from moe_ep.megakernel.mega_moe import (
    fit_spec,
    make_buckets,
    make_layout,
    most_local_experts,
)
from moe_ep.megakernel.problem import MoEShape

# Why the kernel is not offered to layers at all, for tests of what a layer does without it.
PENDING: str | None = None


def layer_misfit(
    shape: MoEShape, weights_format: str, config: MegaConfig, *, parallel: str, num_ranks: int
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
    try:
        buckets = make_buckets(weights_format, shape, 1 << 20, num_ranks, parallel)
        layout = make_layout(shape, num_ranks, 1, buckets, parallel)
        is_given = isinstance(knobs, KernelKnobs)
        for build in [knobs] if is_given else [bucket.knobs for bucket in buckets]:
            spec = fit_spec(
                shape=shape,
                layout=layout,
                knobs=build,
                weights_format=weights_format,
                has_bias13=True,
                has_bias2=True,
            )
            if is_given and spec.knobs != knobs:
                return (
                    f"knobs have {knobs.stages} stages; allowed for this layer: at most "
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

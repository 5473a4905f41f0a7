"""What all ranks of one layer must have in common, compared when the layer is built.

A rank whose arguments do not pass tells the others so in the same exchange: all ranks raise.
"""

import torch

from moe_ep.comm import errors
from moe_ep.comm.errors import MoEEpConfigError, MoEEpError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.rendezvous import exchange_records
from moe_ep.config import Backend
from moe_ep.megakernel.problem import MoEShape
from moe_ep.weights import MoEWeights

# Ranks may find different kernels in their caches; compiling all of them takes minutes.
COMPILE_TIMEOUT_S = 900.0

Fingerprint = dict[str, str | int]


def fingerprint(
    shape: MoEShape,
    weights: MoEWeights,
    max_tokens_per_rank: int,
    backend: Backend,
    device: torch.device,
) -> Fingerprint:
    """Everything that must be equal on all ranks, by the name a user knows it by."""
    import moe_ep

    # Under tp rank 0 alone holds b2.
    biases = ("b13",) if weights.parallel == "tp" else ("b13", "b2")
    return {
        "moe_ep version": moe_ep.__version__,
        "torch version": torch.__version__,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "activation": repr(shape.activation),
        "weights_format": weights.weights_format,
        "parallel": weights.parallel,
        **{name: str(getattr(weights.tensors.get(name), "dtype", "absent")) for name in biases},
        "max_tokens_per_rank": max_tokens_per_rank,
        "backend": repr(backend),
        "device": _device_kind(device),
    }


def agree(
    group: EpGroup,
    fields: Fingerprint | None,
    refusal: Exception | None,
    timeout_s: float,
    topic: str = "construction",
) -> int:
    """The number of this agreement on `topic` in its group, 1, 2, ..., the same on every rank: at
    construction the layer's. Collective.

    Raises on every rank if one has a `refusal`, or if a field differs from rank 0's. The refusing
    rank raises its own error; the others its text with its rank.
    """
    record = {"fields": fields, "refusal": None}
    if refusal is not None:
        record["refusal"] = [type(refusal).__name__, str(refusal)]
    try:
        layer_id, records = exchange_records(group, topic, record, timeout_s)
    except MoEEpError as error:
        raise error from refusal
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(records):
        if other["refusal"] is not None:
            kind, text = other["refusal"]
            error_type = getattr(errors, kind, MoEEpError)
            raise error_type(f"{group.rank_name(rank)}: {text}")
    for rank, other in enumerate(records):
        _compare(group, rank, other["fields"], records[0]["fields"])
    return layer_id


def _compare(group: EpGroup, rank: int, fields: Fingerprint, of_rank_0: Fingerprint) -> None:
    for name in of_rank_0 | fields:
        if fields.get(name) != of_rank_0.get(name):
            raise MoEEpConfigError(
                f"{group.rank_name(rank)}: {name} is {fields.get(name, 'absent')}, "
                f"{group.rank_name(0)} has {of_rank_0.get(name, 'absent')}; "
                "allowed: the same on all ranks"
            )


def _device_kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

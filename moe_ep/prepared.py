"""The weights that the Hopper kernels read, made from those that a model has."""

import logging
from dataclasses import replace

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.grouped_memory import prepared_bytes
from moe_ep.megakernel.formats import PreparedWeights, prepare
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.workspace_memory import free_bytes
from moe_ep.weights import MoEWeights

_log = logging.getLogger(__name__)


def prepare_weights(shape: MoEShape, weights: MoEWeights) -> PreparedWeights:
    """A tiled copy of a rank's `weights`, on their device beside them.

    Raises `MoEEpConfigError` naming the bytes where they do not fit, and for the values that
    `prepare` refuses.
    """
    device = weights.device
    num_bytes = prepared_bytes(
        replace(shape, intermediate=weights.local_intermediate),
        weights.weights_format,
        weights.num_local_experts,
        has_bias13=weights.b13 is not None,
        has_bias2=weights.b2 is not None,
    )
    _log.info("preparing weights: %d bytes on %s", num_bytes, device)
    try:
        return prepare(weights)
    except torch.OutOfMemoryError as error:
        raise MoEEpConfigError(
            f"prepared weights need {num_bytes} bytes on {device} beside the weights given, where "
            f"{free_bytes(device)} are free; allowed: fewer experts on a rank than "
            f"{weights.num_local_experts}"
        ) from error

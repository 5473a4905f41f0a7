"""What one call of the layer takes."""

from dataclasses import dataclass

import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import MoEShape


@dataclass(frozen=True)
class MoEInputs:
    """One rank's tokens and their routing. T = tokens of this rank, H = hidden, K = top_k.

    hidden_states  [T, H] BF16
    topk_ids       [T, K] int32 or int64, expert of each slot; negative = masked slot
    topk_weights   [T, K] FP32, applied at combine

    Any strides. T may be 0 and may differ between ranks. `MoEEpLayer.forward` checks the tensors
    against its shape; nothing is cast silently.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.hidden_states.shape[0]


def check_inputs(
    inputs: MoEInputs,
    shape: MoEShape,
    max_tokens: int,
    device: torch.device,
    *,
    reads_ids: bool = True,
) -> None:
    """Raise `MoEEpConfigError`, with argument, value and what is allowed, unless `inputs` fit.

    max_tokens   most tokens that this call may bring
    reads_ids    whether to look for ids that are no experts, which waits for the device
    """
    x = inputs.hidden_states
    check_tensor("hidden_states", x, (torch.bfloat16,), (None, shape.hidden), device)
    num_tokens = x.shape[0]
    if num_tokens > max_tokens:
        raise MoEEpConfigError(
            f"hidden_states has {num_tokens} tokens; allowed: at most {max_tokens} "
            "(max_tokens of the call, else max_tokens_per_rank of the layer)"
        )
    slots = (num_tokens, shape.top_k)
    check_tensor("topk_ids", inputs.topk_ids, (torch.int32, torch.int64), slots, device)
    check_tensor("topk_weights", inputs.topk_weights, (torch.float32,), slots, device)
    if torch.is_grad_enabled():
        for name in ("hidden_states", "topk_weights"):
            if getattr(inputs, name).requires_grad:
                raise MoEEpConfigError(
                    f"{name} requires grad; allowed: inference only, call under torch.no_grad() "
                    "or detach it"
                )
    if reads_ids and num_tokens and int(inputs.topk_ids.max()) >= shape.num_experts:
        raise MoEEpConfigError(
            f"topk_ids holds {int(inputs.topk_ids.max())}; allowed: 0 to "
            f"{shape.num_experts - 1}, negative for a masked slot"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Raise `MoEEpConfigError` unless dtype, shape (first None: any length) and device are as
    given. Part of every call."""
    if not isinstance(tensor, torch.Tensor):
        raise MoEEpConfigError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise MoEEpConfigError(f"{name} has dtype {tensor.dtype}; allowed: {allowed}")
    lengths = tensor.shape
    if shape[0] is None and len(lengths):
        fits = lengths == (lengths[0], *shape[1:])
    else:
        fits = lengths == shape
    if not fits:
        allowed = ", ".join("any" if length is None else str(length) for length in shape)
        raise MoEEpConfigError(f"{name} has shape {list(lengths)}; allowed: [{allowed}]")
    if tensor.layout is not torch.strided:
        raise MoEEpConfigError(f"{name} has layout {tensor.layout}; allowed: torch.strided")
    if tensor.device != device:
        raise MoEEpConfigError(f"{name} is on {tensor.device}; allowed: {device}")

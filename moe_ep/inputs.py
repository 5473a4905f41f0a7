"""What one call of the layer takes."""

from dataclasses import dataclass

import torch


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

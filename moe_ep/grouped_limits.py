"""What the grouped GEMM kernel takes: device, libraries, configuration, shape.

Plain questions with a reason as answer, None where nothing stands against it; no kernel is loaded.
"""

from importlib.util import find_spec

import torch

from moe_ep.config import GroupedGemmConfig
from moe_ep.grouped_memory import capacity_misfit
from moe_ep.megakernel.grouped_gemm import CHANNEL_MULTIPLE
from moe_ep.megakernel.knobs import (
    KNOB_TABLE,
    MAX_LOCAL_EXPERTS,
    MAX_SMEM_BYTES,
    KernelKnobs,
)
from moe_ep.megakernel.problem import MoEShape, owned_experts

COMPUTE_CAPABILITY = (9, 0)
# A thread of combine holds a 16-byte load of every slot in registers.
MAX_TOP_K = 32


def device_misfit(device: torch.device, config: str = "GroupedGemmConfig") -> str | None:
    """Why a kernel for Hopper, which `config` asks for, cannot run on `device`."""
    needed = f"{config} needs an NVIDIA GPU of compute capability 9.0"
    if device.type != "cuda":
        return f"{needed}, device is {device}"
    if not torch.cuda.is_available():
        return f"{needed}, torch finds no GPU"
    found = torch.cuda.get_device_capability(device)
    if found != COMPUTE_CAPABILITY:
        return f"{needed}, {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
    if find_spec("cutlass") is None:
        return f"{config} needs nvidia-cutlass-dsl (pip install 'moe-ep[gpu]')"
    return None


def layer_misfit(
    shape: MoEShape,
    weights_format: str,
    kernel: GroupedGemmConfig,
    *,
    parallel: str,
    num_ranks: int,
    max_tokens_per_rank: int | None = None,
) -> str | None:
    """Why the kernel cannot run the layer, on whatever device."""
    if kernel.activations != "bf16":
        return f"activations={kernel.activations!r} is not built yet; allowed: 'bf16'"
    if shape.hidden % CHANNEL_MULTIPLE:
        return f"hidden is {shape.hidden}; allowed: multiples of {CHANNEL_MULTIPLE}"
    multiple = CHANNEL_MULTIPLE * (num_ranks if parallel == "tp" else 1)
    if shape.intermediate % multiple:
        of_ranks = f" over {num_ranks} tp ranks" if parallel == "tp" else ""
        return f"intermediate is {shape.intermediate}; allowed{of_ranks}: multiples of {multiple}"
    if shape.top_k > MAX_TOP_K:
        return f"top_k is {shape.top_k}; allowed: at most {MAX_TOP_K}"
    num_local_experts = shape.num_experts
    if parallel == "ep":
        num_local_experts = len(owned_experts(shape.num_experts, num_ranks, rank=0))
    most = max_local_experts(weights_format, kernel.knobs)
    if num_local_experts > most:
        return f"a rank holds {num_local_experts} experts; allowed: at most {most}"
    if max_tokens_per_rank is not None and num_ranks == 1:
        return capacity_misfit(shape, max_tokens_per_rank)
    return None


def max_local_experts(weights_format: str, knobs: KernelKnobs | None = None) -> int:
    """Most experts of one rank: the sorted list of experts shares shared memory with the ring."""
    choices = [knobs] if knobs else [r.knobs for r in KNOB_TABLE if weights_format in r.formats]

    def fits(num_experts: int) -> bool:
        return all(k.smem_bytes(weights_format, num_experts) <= MAX_SMEM_BYTES for k in choices)

    return next((n for n in range(MAX_LOCAL_EXPERTS, 0, -1) if fits(n)), 0)

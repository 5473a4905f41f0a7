"""What NCCL-EP (`nccl.ep` of nccl-extensions) can carry, asked before anything is allocated.

NCCL-EP checks its limits by stopping the process, or while it compiles a kernel. These are the
limits that the headers and checks of 0.1.0 state.
"""

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

LEAST_NCCL = (2, 30, 4)
MAX_RANKS = 64
MAX_LOCAL_EXPERTS = 1024
MAX_HIDDEN = 16384
HIDDEN_MULTIPLE = {"ll": 256, "ht": 8}  # elements of BF16
MAX_TOP_K = {"ll": 31, "ht": 32}  # a warp for each slot; "ll" keeps one of 32 to count
HT_EXPERTS_MULTIPLE = 4


def layer_misfit(
    mode: str, *, hidden: int, top_k: int, num_experts: int, num_ranks: int
) -> str | None:
    """Why NCCL-EP cannot carry such a layer, naming value and limit; None where it can.

    mode   "ll" (low latency) or "ht" (high throughput)
    """
    multiple = HIDDEN_MULTIPLE[mode]
    if num_ranks > MAX_RANKS:
        return f"NCCL-EP joins at most {MAX_RANKS} ranks, got {num_ranks}"
    if hidden % multiple or hidden > MAX_HIDDEN:
        return (
            f"NCCL-EP mode {mode!r} takes a hidden that is a multiple of {multiple} and at most "
            f"{MAX_HIDDEN}, got {hidden}"
        )
    if top_k > MAX_TOP_K[mode]:
        return f"NCCL-EP mode {mode!r} takes a top_k of at most {MAX_TOP_K[mode]}, got {top_k}"
    if num_experts % num_ranks:
        return f"NCCL-EP needs equally many experts on {num_ranks} ranks, got {num_experts}"
    if num_experts // num_ranks > MAX_LOCAL_EXPERTS:
        return (
            f"NCCL-EP takes at most {MAX_LOCAL_EXPERTS} experts a rank, got "
            f"{num_experts // num_ranks}"
        )
    if mode == "ht" and num_experts % HT_EXPERTS_MULTIPLE:
        return (
            f"NCCL-EP mode 'ht' needs a multiple of {HT_EXPERTS_MULTIPLE} experts, got "
            f"{num_experts}"
        )
    return None


def library_misfit() -> str | None:
    """What this machine lacks to load NCCL-EP and to compile its kernels, or None."""
    try:
        version("nccl-extensions")
    except PackageNotFoundError:
        return "nccl-extensions is not installed (pip install 'moe-ep[nccl-ep]')"
    loaded = torch.cuda.nccl.version()
    if loaded < LEAST_NCCL:
        return (
            f"torch has loaded NCCL {_dotted(loaded)}, NCCL-EP needs {_dotted(LEAST_NCCL)} or "
            "newer: install torch 2.14.1 or newer, or preload a newer libnccl.so.2"
        )
    if _nvcc() is None:
        return (
            "NCCL-EP compiles its kernels at run time and finds no nvcc: install the CUDA toolkit "
            "or name it in NCCL_EP_JIT_NVCC"
        )
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _nvcc() -> str | None:
    named = os.environ.get("NCCL_EP_JIT_NVCC") or os.environ.get("NVCC")
    home = os.environ.get("CUDA_HOME")
    return shutil.which(named or (Path(home, "bin", "nvcc") if home else "nvcc"))

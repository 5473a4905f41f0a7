"""What NCCL-EP (`nccl.ep` of nccl-extensions) can carry, asked before anything is allocated.

NCCL-EP checks its limits by stopping the process, or while it compiles a kernel. These are the
limits that the headers and checks of 0.1.0 state.
"""

import ctypes
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LEAST_NCCL = (2, 30, 4)
MAX_RANKS = 64
MAX_LOCAL_EXPERTS = {"rank_major": 1024, "flat": 1024, "expert_major": 256}
MAX_HIDDEN = 16384
# Elements of BF16. "ll": in its combine each lane of a warp reads two vectors of 16 bytes at once.
HIDDEN_MULTIPLE = {"ll": 512, "ht": 8}
MAX_TOP_K = 32  # of "ht": a warp reads a token's slots
HT_EXPERTS_MULTIPLE = 4
HT_MAX_TOKENS_PER_RANK = 8192
# "ll": each SM serves as many experts as it has warp groups; the groups share 32 warps.
LL_MAX_EXPERTS_PER_SM = 14
WARPS = 32
NUM_SMS = 132  # of an H100 or H200 SXM; asked of the GPU where there is one


def layer_misfit(
    mode: str,
    layout: str,
    *,
    hidden: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    num_sms: int = NUM_SMS,
) -> str | None:
    """Why NCCL-EP cannot carry such a layer, naming every value and limit; None where it can.

    mode, layout   "ll" (low latency), rank- or expert-major; "ht" (high throughput), flat or
                   expert-major
    top_k          experts of a row that is sent: 1 with exact_combine
    """
    found = []
    if num_ranks > MAX_RANKS:
        found.append(f"at most {MAX_RANKS} ranks, got {num_ranks}")
    multiple = HIDDEN_MULTIPLE[mode]
    most_hidden, most_top_k, num_warps = MAX_HIDDEN, MAX_TOP_K, ll_num_warps(num_experts, num_sms)
    if mode == "ll" and num_warps:
        # One warp counts, the others send a slot each; one loads, the others add 512 elements each.
        most_hidden, most_top_k = multiple * (num_warps - 1), num_warps - 1
    if hidden % multiple or hidden > most_hidden:
        found.append(
            f"a hidden that is a multiple of {multiple} and at most {most_hidden}, got {hidden}"
        )
    if top_k > most_top_k:
        found.append(f"a top_k of at most {most_top_k}, got {top_k}")
    if mode == "ll" and num_warps == 0:
        most = LL_MAX_EXPERTS_PER_SM * num_sms
        found.append(f"at most {most} experts on GPUs of {num_sms} SMs, got {num_experts}")
    if mode == "ht" and num_experts % HT_EXPERTS_MULTIPLE:
        found.append(f"a multiple of {HT_EXPERTS_MULTIPLE} experts, got {num_experts}")
    if num_experts % num_ranks:
        found.append(f"equally many experts on {num_ranks} ranks, got {num_experts}")
    else:
        found += _local_experts_misfit(mode, layout, num_experts // num_ranks)
    return _sentence(mode, layout, found)


def capacity_misfit(mode: str, layout: str, *, max_tokens_per_rank: int, top_k: int) -> str | None:
    """Why NCCL-EP cannot carry so many tokens of a rank, or None.

    top_k   slots of a token, each of them a row with exact_combine; else 1
    """
    rows = max_tokens_per_rank * top_k
    if mode == "ll" or rows <= HT_MAX_TOKENS_PER_RANK:
        return None
    got = f"{max_tokens_per_rank} tokens"
    if top_k > 1:
        got += f" of {top_k} slots, each a row with exact_combine"
    return _sentence(mode, layout, [f"at most {HT_MAX_TOKENS_PER_RANK} rows of a rank, got {got}"])


def ll_num_warps(num_experts: int, num_sms: int) -> int:
    """Warps of an SM in mode "ll"; 0 for more experts than it serves."""
    experts_per_sm = -(-num_experts // num_sms)
    if experts_per_sm > LL_MAX_EXPERTS_PER_SM:
        return 0
    return experts_per_sm * (WARPS // experts_per_sm)


def library_misfit() -> str | None:
    """What this machine lacks to load NCCL-EP and to compile its kernels, or None."""
    try:
        version("nccl-extensions")
    except PackageNotFoundError:
        return "nccl-extensions is not installed (pip install 'moe-ep[nccl-ep]')"
    loaded = loaded_nccl()
    if loaded is None or loaded < LEAST_NCCL:
        found = "no NCCL" if loaded is None else f"NCCL {_dotted(loaded)}"
        return (
            f"torch has loaded {found}, NCCL-EP needs {_dotted(LEAST_NCCL)} or newer: install "
            "torch 2.14.1 or newer, or preload a newer libnccl.so.2"
        )
    if _nvcc() is None:
        return (
            "NCCL-EP compiles its kernels at run time and finds no nvcc: install the CUDA toolkit "
            "or name it in NCCL_EP_JIT_NVCC"
        )
    return None


def loaded_nccl() -> tuple[int, int, int] | None:
    """Version of the NCCL in this process, None without one.

    `torch.cuda.nccl.version()` tells the one that torch was built with, which a preloaded one
    replaces.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    rest, patch = divmod(number.value, 100)
    return (*divmod(rest, 100), patch)


def _local_experts_misfit(mode: str, layout: str, num_local_experts: int) -> list[str]:
    most = MAX_LOCAL_EXPERTS[layout]
    if num_local_experts > most:
        return [f"at most {most} experts of a rank, got {num_local_experts}"]
    is_power_of_two = num_local_experts & (num_local_experts - 1) == 0
    if mode == "ht" and layout == "expert_major" and not is_power_of_two:
        return [f"a power of two experts on each rank, got {num_local_experts}"]
    return []


def _sentence(mode: str, layout: str, found: list[str]) -> str | None:
    return f"NCCL-EP {mode} {layout} takes {'; '.join(found)}" if found else None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _nvcc() -> str | None:
    named = os.environ.get("NCCL_EP_JIT_NVCC") or os.environ.get("NVCC")
    home = os.environ.get("CUDA_HOME")
    return shutil.which(named or (Path(home, "bin", "nvcc") if home else "nvcc"))

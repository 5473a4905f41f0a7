"""What a device can do at most in a second: bytes of memory, operations, bytes over links."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peaks:
    """bytes_per_s of device memory, flops_per_s of dense matmuls, and where the figures are from.

    GPUs: BF16 tensor cores with FP32 sums. CPU: FP32, which is what the CPU path multiplies in.
    link_bytes_per_s: NVLink, each direction; 0 where it is not known.
    """

    bytes_per_s: float
    flops_per_s: float
    source: str
    link_bytes_per_s: float = 0.0


# Part of the device's name -> the maker's figures (dense, SXM boards).
STATED = {
    "H200": Peaks(4.8e12, 989e12, "data sheet", 450e9),
    "H100": Peaks(3.35e12, 989e12, "data sheet", 450e9),
    "B200": Peaks(8.0e12, 2250e12, "data sheet", 900e9),
}


def device_peaks(device: torch.device) -> Peaks:
    """The data sheet's figures where we have them, else measured in about a second."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peaks in STATED.items():
            if part in name:
                return peaks
    return _measured(device)


def _measured(device: torch.device) -> Peaks:
    on_gpu = device.type == "cuda"
    size, num_bytes = (8192, 2**30) if on_gpu else (1024, 2**28)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a = torch.randn(size, size, device=device).to(dtype)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matmul_s = _best_seconds(lambda: a @ a, device)
    copy_s = _best_seconds(lambda: target.copy_(source), device)
    threads = "" if on_gpu else f", threads={torch.get_num_threads()}"
    return Peaks(2 * num_bytes / copy_s, 2 * size**3 / matmul_s, f"measured{threads}")


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)

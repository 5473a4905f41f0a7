"""Time of quantising BF16 to NVFP4 beside torchao's `nvfp4_quantize`, in one warm process.

    python scripts/bench_quantize.py [--mib 1024]          (torchao: pip install -e .[oracle])

Checks first that both decode to the same error. Prints the median of three runs in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from moe_ep.quantize import QuantizedTensor, QuantSpec, dequantize, quantize

NUM_COLS = 8192
MIN_RATIO = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the BF16 tensor")
    num_rows = parser.parse_args().mib * 2**20 // (2 * NUM_COLS)
    w = torch.empty(num_rows, NUM_COLS, dtype=torch.bfloat16)
    for rows in w.split(1024):
        rows.copy_(torch.randn(rows.shape))
    check(w[:1024])
    runs: dict[str, Callable[[], object]] = {
        "moe-ep": lambda: quantize(w, "nvfp4", advance=lambda num_done: None),
        "torchao": lambda: torchao_nvfp4(w),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:8} {median:7.2f} s   {w.nbytes / median / 1e9:6.3f} GB/s of BF16")
    ratio = medians["torchao"] / medians["moe-ep"]
    print(f"{torch.get_num_threads()} threads: {ratio:.1f} x as fast (wanted {MIN_RATIO:g})")
    return 0 if ratio >= MIN_RATIO else 1


def torchao_nvfp4(w: torch.Tensor) -> QuantizedTensor:
    scale = per_tensor_amax_to_scale(w.abs().amax().float())
    sf, codes = nvfp4_quantize(w, 16, scale)
    sf = sf.view(w.shape[0], -1)
    spec = QuantSpec(format="nvfp4")
    return QuantizedTensor(spec=spec, codes=codes.view(torch.uint8), sf=sf, global_scale=scale)


def check(w: torch.Tensor) -> None:
    """Both quantisers' errors are those of NVFP4 on normal data."""
    for q in (quantize(w, "nvfp4"), torchao_nvfp4(w)):
        error = ((dequantize(q) - w.float()).norm() / w.float().norm()).item()
        if abs(error - 0.095) > 0.001:
            raise SystemExit(f"relative error {error:.4f}, expected 0.095")


if __name__ == "__main__":
    raise SystemExit(main())

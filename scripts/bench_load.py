"""Bytes, memory and time of loading one rank's half of a layer from two safetensors shards.

    python scripts/bench_load.py [--gib 2] [--format hf|deepseek_fp8] [--parallel ep|tp]

Writes the checkpoint into a temporary folder first. Memory is what becomes resident during the
load, mapped pages of the files included.
"""

import argparse
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_file

import moe_ep
from moe_ep import MoEShape
from moe_ep.checkpoint import Checkpoint

HIDDEN, INTERMEDIATE = 2048, 1024
EXPERTS = "model.layers.0.mlp.experts"
MATRICES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--format", choices=("hf", "deepseek_fp8"), default="hf")
    parser.add_argument("--parallel", choices=("ep", "tp"), default="ep")
    args = parser.parse_args()
    element_bytes = 2 if args.format == "hf" else 1
    num_experts = round(args.gib * 2**30 / (3 * HIDDEN * INTERMEDIATE * element_bytes))
    shape = MoEShape(num_experts=num_experts, top_k=2, hidden=HIDDEN, intermediate=INTERMEDIATE)
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose memory goes with it.
        writer = get_context("spawn").Process(
            target=write, args=(Path(folder), args.format, num_experts)
        )
        writer.start()
        writer.join()
        checkpoint = Checkpoint(folder)
        total = sum(file.stat().st_size for file in Path(folder).iterdir())
        division = {"parallel": args.parallel, "rank": 1, "num_ranks": 2}
        with peak_memory() as peak:
            start = time.perf_counter()
            weights = moe_ep.load(checkpoint, 0, shape=shape, format=args.format, **division)
            seconds = time.perf_counter() - start
    asked, own = checkpoint.bytes_read, weights.num_bytes
    print(
        f"{args.format}, {args.parallel} rank 1 of 2, {total / 2**30:.2f} GiB in two files: asked "
        f"for {asked / own:.3f} x its own bytes, {asked / total:.1%} of the files; peak memory "
        f"{peak[0] / own:.2f} x its own bytes; {seconds:.2f} s, {asked / seconds / 1e9:.2f} GB/s"
    )
    return 0 if asked <= 1.02 * own else 1


def write(folder: Path, format: str, num_experts: int) -> None:
    for shard, experts in enumerate(torch.arange(num_experts).tensor_split(2)):
        tensors = {}
        for expert in track(experts.tolist(), f"writing shard {shard}", transient=True):
            for matrix, size in MATRICES.items():
                name = f"{EXPERTS}.{expert}.{matrix}.weight"
                tensors[name] = torch.randn(size).bfloat16()
                if format == "deepseek_fp8":
                    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                    tensors[f"{name}_scale_inv"] = torch.rand(size[0] // 128, size[1] // 128) + 0.5
        save_file(tensors, folder / f"model-{shard + 1:05}-of-00002.safetensors")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Most resident bytes above those at the start, sampled; a list of one number."""
    before, peak, is_done = resident_bytes(), [0], threading.Event()

    def sample() -> None:
        while not is_done.wait(0.001):
            peak[0] = max(peak[0], resident_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        is_done.set()
        thread.join()


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|File):\s+(\d+)", status, re.MULTILINE)))


if __name__ == "__main__":
    raise SystemExit(main())

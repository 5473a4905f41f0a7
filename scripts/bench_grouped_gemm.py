"""Time FC1 and FC2 of one rank's experts with the grouped GEMM kernel; values are checked first.

    python scripts/bench_grouped_gemm.py --out gemm.json --rows 1,8,64 --format nvfp4

A measurement is the median of --repeats replays of a CUDA graph that holds the launches; 1 GiB is
read between replays, so that L2 holds no weights. HBM share is prepared bytes of the experts hit
over time over the read rate of `torch.sum`, measured in the same run.
"""

import argparse
import itertools
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from moe_ep.megakernel.compile_cache import compile_all
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.grouped_gemm import GroupedGemm
from moe_ep.megakernel.knobs import KernelKnobs, choose_row
from moe_ep.megakernel.problem import Activation
from moe_ep.megakernel.tiles import TILE_FORMATS
from moe_ep.reference import activate
from moe_ep.weights import MoEWeights

# hidden, intermediate; 32 experts of each on one GPU.
SHAPES = {"v3": (7168, 2048), "v4flash": (4096, 2048), "v4pro": (7168, 3072), "qwen3": (2048, 768)}
FLUSH_BYTES = 1 << 30
MAX_GEMM_ERROR = 0.0018
console = Console(stderr=True)


def random_weights(name: str, hidden: int, intermediate: int, num_experts: int) -> MoEWeights:
    """Random codes and usual scale factors on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, generator=generator, device="cuda", dtype=torch.uint8
        )

    tensors = {}
    for key, halves, rows, cols in (
        ("w13", 2, 2 * intermediate, hidden),
        ("w2", 1, hidden, intermediate),
    ):
        shape = (num_experts, rows, cols)
        if name == "bf16":
            tensors[key] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            tensors[key].normal_(std=1 / 32, generator=generator)
            continue
        if TILE_FORMATS[name].code_bits == 4:
            tensors[key] = integers(0, 256, num_experts, rows, cols // 2)
        else:
            codes = integers(0, 0x7F, *shape) | integers(0, 2, *shape) << 7
            tensors[key] = codes.view(torch.float8_e4m3fn)
        if name == "nvfp4":
            sf = integers(0x20, 0x50, num_experts, rows, cols // 16)
            tensors[f"{key}_sf"] = sf.view(torch.float8_e4m3fn)
        elif name == "fp8_block":
            sf_shape = (num_experts, halves * math.ceil(rows / halves / 128), cols // 128)
            tensors[f"{key}_sf"] = torch.rand(sf_shape, device="cuda") / 4096 + 1 / 8192
        else:
            middle = 120 if name == "mxfp4" else 113
            tensors[f"{key}_sf"] = integers(middle - 3, middle + 3, *shape[:2], cols // 32)
    if name == "nvfp4":
        for key in ("gate_scale", "up_scale", "down_scale"):
            tensors[key] = (torch.rand(num_experts, device="cuda") + 0.5) / 64
    return MoEWeights(
        weights_format=name,
        num_experts=num_experts,
        expert_ids=tuple(range(num_experts)),
        hidden=hidden,
        intermediate=intermediate,
        **tensors,
    )


class Problem:
    """One format and shape; rows per expert change from measurement to measurement."""

    def __init__(self, name: str, shape: str, num_experts: int) -> None:
        self.name, self.shape = name, shape
        self.hidden, self.intermediate = SHAPES[shape]
        self.weights = random_weights(name, self.hidden, self.intermediate, num_experts)
        self.prepared = prepare(self.weights)
        self.num_experts = num_experts

    def gemm(self, knobs: KernelKnobs) -> GroupedGemm:
        return GroupedGemm(
            self.name,
            hidden=self.hidden,
            intermediate=self.intermediate,
            activation=Activation(),
            num_local_experts=self.num_experts,
            knobs=knobs,
        )

    def measure(self, rows: list[int], label: str, knobs: KernelKnobs, args) -> dict:
        bounds = list(itertools.accumulate(rows, initial=0))
        offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        x = torch.randn(bounds[-1], self.hidden, device="cuda").bfloat16()
        hidden = torch.full_like(x[:, :1], math.nan).repeat(1, self.intermediate)
        terms = torch.full_like(x, math.nan)
        gemm = self.gemm(knobs)

        def fc1() -> None:
            gemm.fc1(x, offsets, self.prepared, hidden)

        def fc2() -> None:
            gemm.fc2(hidden, offsets, self.prepared, terms)

        fc1()
        fc2()
        errors = self.check(rows, bounds, x, hidden, terms)
        both = time_graph(lambda: (fc1(), fc2()), args)
        result = {
            "format": self.name,
            "shape": self.shape,
            "rows": label,
            "us": both,
            "fc1_us": time_graph(fc1, args)["median"],
            "fc2_us": time_graph(fc2, args)["median"],
            "fc1_error": errors[0],
            "fc2_error": errors[1],
            "knobs": repr(knobs),
        }
        hit = sum(n > 0 for n in rows)
        per_expert = (self.prepared.w13[0].nbytes + self.prepared.w2[0].nbytes) * hit
        flops = 6 * bounds[-1] * self.hidden * self.intermediate
        result["tb_s"] = per_expert / both["median"] / 1e6
        result["tflop_s"] = flops / both["median"] / 1e6
        return result

    def check(self, rows, bounds, x, hidden, terms) -> tuple[float, float]:
        """Largest error of three experts' GEMMs, each on its own BF16 input; raises above limit."""
        largest = [0.0, 0.0]
        used = [e for e, n in enumerate(rows) if n]
        for expert in {used[0], used[len(used) // 2], used[-1]}:
            part = slice(bounds[expert], bounds[expert + 1])
            w13, w2 = (self.weights.dequantize_expert(n, expert) for n in ("w13", "w2"))
            exact = activate(x[part].float() @ w13.T, Activation())
            largest[0] = max(largest[0], relative_error(hidden[part], exact))
            largest[1] = max(largest[1], relative_error(terms[part], hidden[part].float() @ w2.T))
        if not max(largest) < MAX_GEMM_ERROR or terms.isnan().any():
            raise SystemExit(f"{self.name} {self.shape} {rows}: wrong values, errors {largest}")
        return largest[0], largest[1]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def time_graph(work: Callable[[], object], args) -> dict[str, float]:
    """Median, p99 and least microseconds of a graph replay with cold L2."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    spans = []
    for _ in range(args.repeats + 3):
        args.flush.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in spans[3:])
    last = min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)
    return {"median": times[len(times) // 2], "p99": times[last], "min": times[0]}


def read_rate(flush: torch.Tensor) -> float:
    """TB/s of torch.sum over the flush buffer, clocks up."""
    for _ in range(20):
        flush.sum()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        flush.sum()
    end.record()
    torch.cuda.synchronize()
    return 5 * flush.nbytes / start.elapsed_time(end) / 1e9


def row_lists(spec: str, num_experts: int) -> list[tuple[str, list[int]]]:
    """ "8": eight rows each; "skew8": one expert has half of them; "part8": 28 of 32 are active."""
    lists = []
    for label in spec.split(","):
        count = int(label.removeprefix("skew").removeprefix("part"))
        rows = [count] * num_experts
        if label.startswith("skew"):
            rest = count * num_experts // 2
            share, extra = divmod(rest, num_experts - 1)
            rows = [rest] + [share + (e < extra) for e in range(num_experts - 1)]
        elif label.startswith("part"):
            rows = [0 if e % 8 == 3 else count for e in range(num_experts)]
        lists.append((label, rows))
    return lists


def head() -> str:
    """Commit of this checkout, empty outside one."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="nvfp4", help="comma separated")
    parser.add_argument("--shape", default="v3", help=f"comma separated, of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,4,8,16,32,64,128,256", help="see row_lists")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default=head(), help="what is measured, for the record")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    args.flush = torch.randn(FLUSH_BYTES // 4, device="cuda")
    lists = row_lists(args.rows, args.experts)
    problems = list(itertools.product(args.format.split(","), args.shape.split(",")))
    results = []
    device = torch.cuda.get_device_name()
    rate = read_rate(args.flush)
    print(f"{device}, torch.sum reads {rate:.3f} TB/s, commit {args.commit[:8]}")
    for name, shape in track(problems, "measuring", console=console):
        problem = Problem(name, shape, args.experts)
        choices = [choose_row(name, sum(rows) / args.experts).knobs for _, rows in lists]
        compile_all([b for k in set(choices) for b in problem.gemm(k).kernel_builds()])
        for (label, rows), knobs in zip(lists, choices, strict=True):
            result = problem.measure(rows, label, knobs, args)
            results.append(result)
            print(
                f"{name:9s} {shape:8s} rows {label:7s} {result['us']['median']:7.1f} us "
                f"(p99 {result['us']['p99']:.1f}; FC1 {result['fc1_us']:.1f}, FC2 "
                f"{result['fc2_us']:.1f}) {result['tb_s']:.3f} TB/s "
                f"{100 * result['tb_s'] / rate:.1f} % {result['tflop_s']:.1f} TFLOP/s "
                f"errors {result['fc1_error']:.5f} {result['fc2_error']:.5f}",
                flush=True,
            )
        del problem
    if args.out:
        record = {"device": device, "read_tb_s": rate, "commit": args.commit}
        args.out.write_text(json.dumps(record | {"results": results}, indent=1))


if __name__ == "__main__":
    main()

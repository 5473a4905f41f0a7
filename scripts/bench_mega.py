"""Time the fused layer of one rank; values are checked first.

    python scripts/bench_mega.py --out mega.json --tokens 1,8,32,128,512,2048 --format nvfp4

A measurement is the median of --repeats replays of a CUDA graph that holds the launch, with 1 GiB
read between replays, so that L2 holds no weights. HBM share is prepared bytes of the experts hit
over time over the read rate of `torch.sum` of the same run. `host_us` is what an eager call costs
the host. `--compile-only` fills the cache, so that a later run measures alone.

`--tp N` measures the work of one of N tp ranks: its Nth of every expert's intermediate, for the
tokens of all ranks, FP32 sums over the slots; nothing comes from or goes to another rank.
"""

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bench_grouped_gemm import FLUSH_BYTES, SHAPES, head, random_weights, read_rate, time_graph
from rich.console import Console
from rich.progress import track

from moe_ep.comm.group import EpGroup
from moe_ep.megakernel.compile_cache import compile_all
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.knobs import KernelKnobs
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.mega_spec import make_buckets
from moe_ep.megakernel.problem import MoEShape
from moe_ep.megakernel.protocol import Moment
from moe_ep.reference import activate, combine_terms

MAX_TERM_ERROR = 0.0026
NUM_HOST_CALLS = 50


@dataclass(frozen=True)
class Case:
    """changes: to the knobs of the build that the tokens take."""

    geometry: str
    name: str
    num_tokens: int
    is_skewed: bool
    takes_stamps: bool
    changes: dict = field(default_factory=dict)


class Problem:
    """Weights of one format and geometry; tokens change from measurement to measurement."""

    def __init__(self, name: str, geometry: str, args: argparse.Namespace) -> None:
        self.name, self.geometry, self.args = name, geometry, args
        hidden, intermediate = SHAPES[geometry]
        intermediate //= args.tp or 1
        self.parallel = "tp" if args.tp else "ep"
        self.shape = MoEShape(
            num_experts=args.experts, top_k=args.top_k, hidden=hidden, intermediate=intermediate
        )
        self.weights = random_weights(name, hidden, intermediate, args.experts)
        self.prepared = prepare(self.weights)

    def layer(self, case: Case) -> MegaMoE:
        """Of that capacity, with the build that it takes, changed."""
        buckets = make_buckets(
            self.name, self.shape, case.num_tokens, num_ranks=1, parallel=self.parallel
        )
        return MegaMoE(
            EpGroup.single("cuda"),
            self.shape,
            self.name,
            max_tokens_per_rank=case.num_tokens,
            parallel=self.parallel,
            knobs=changed_knobs(buckets[-1].knobs, case.changes),
            max_sms=self.args.max_sms,
            takes_stamps=case.takes_stamps,
            timeout_s=5.0,
        )

    def measure(self, case: Case, mega: MegaMoE) -> dict:
        num_tokens = case.num_tokens
        ids = self.routing(num_tokens, case.is_skewed)
        gen = torch.Generator("cuda").manual_seed(num_tokens)
        x = torch.randn(num_tokens, self.shape.hidden, generator=gen, device="cuda").bfloat16()
        topk_weights = torch.rand(ids.shape, generator=gen, device="cuda")
        out = torch.full_like(x, float("nan"))

        def launch() -> None:
            mega.forward(x, ids, topk_weights, self.prepared, out)

        launch()
        torch.cuda.synchronize()
        mega.check()
        error = self.check(mega, x, ids, topk_weights, out)
        times = time_graph(launch, self.args)
        mega.check()
        rows = torch.bincount(ids.flatten(), minlength=self.shape.num_experts)
        hit = int((rows > 0).sum())
        expert_bytes = self.prepared.w13[0].nbytes + self.prepared.w2[0].nbytes
        flops = 6 * ids.numel() * self.shape.hidden * self.shape.intermediate
        result = {
            "format": self.name,
            "geometry": self.geometry,
            "experts": self.shape.num_experts,
            "tp": self.args.tp,
            "tokens": num_tokens,
            "routing": "half to one expert" if case.is_skewed else "uniform",
            "us": times,
            "experts_hit": hit,
            "most_rows": int(rows.max()),
            "tb_s": hit * expert_bytes / times["median"] / 1e6,
            "tflop_s": flops / times["median"] / 1e6,
            "term_error": error,
            "host_us": host_us(launch),
            "knobs": repr(mega.spec(mega.buckets[0].knobs, ids_are_int64=False).knobs),
        }
        if case.takes_stamps:
            result["moments_us"] = moments(mega, launch, self.args)
        return result

    def routing(self, num_tokens: int, is_skewed: bool) -> torch.Tensor:
        """int32 [T, K], distinct experts; skewed: every second token has expert 0."""
        gen = torch.Generator("cuda").manual_seed(1000 + num_tokens)
        scores = torch.rand(num_tokens, self.shape.num_experts, generator=gen, device="cuda")
        if is_skewed:
            scores[::2, 0] = 2.0
        return scores.topk(self.shape.top_k).indices.int()

    def check(self, mega: MegaMoE, x, ids, topk_weights, out) -> float:
        """Largest error of three experts' terms; raises above the limit, and if the output is not
        the terms' sum bit for bit."""
        # Of the one rank launched and, under tp, of the one rank whose tokens these are.
        terms = mega.memory.region("terms").flatten(0, -4)[0, : len(x)]
        largest = 0.0
        used = ids.unique().tolist()
        for expert in {used[0], used[len(used) // 2], used[-1]}:
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = (self.weights.dequantize_expert(n, expert) for n in ("w13", "w2"))
            exact = activate(x[tokens].float() @ w13.T, self.shape.activation) @ w2.T
            error = (terms[tokens, slots].float() - exact).norm() / exact.norm()
            largest = max(largest, float(error))
        is_sum = torch.equal(out, combine_terms(terms, ids, topk_weights))
        if not (largest < MAX_TERM_ERROR and is_sum):
            raise SystemExit(f"{self.name} T {len(x)}: term error {largest}, sum {is_sum}")
        return largest


def changed_knobs(knobs: KernelKnobs, changes: dict) -> KernelKnobs:
    """A build with what the command line changes."""
    lists = {name: tuple(value) for name, value in changes.items() if isinstance(value, list)}
    return replace(knobs, **changes | lists)


def moments(mega: MegaMoE, launch, args: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds after the first CTA's start: first, median and last CTA at each moment."""
    args.flush.sum()
    launch()
    torch.cuda.synchronize()
    stamps = mega.stamps.cpu()
    stamps = stamps[stamps[:, Moment.STARTED] > 0]
    start = stamps[:, Moment.STARTED].min()
    found = {}
    for moment in Moment:
        times = stamps[:, moment][stamps[:, moment] > 0].sort().values - start
        if len(times):
            found[moment.name] = [round(float(times[i]) / 1e3, 2) for i in (0, len(times) // 2, -1)]
    return found


def host_us(launch) -> float:
    """Microseconds of the host in an eager call."""
    torch.cuda.synchronize()
    spans = []
    for _ in range(NUM_HOST_CALLS):
        start = time.perf_counter()
        launch()
        spans.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return sorted(spans)[NUM_HOST_CALLS // 2] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="nvfp4", help="comma separated")
    parser.add_argument("--shape", default="v3", help=f"comma separated, of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048")
    parser.add_argument("--skew", default="", help="tokens to measure with half on one expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tp", type=int, metavar="N", help="the work of one of N tp ranks")
    parser.add_argument("--max-sms", type=int)
    parser.add_argument(
        "--knobs",
        action="append",
        help='changes as JSON, e.g. {"stages": 4}; several: each; "tokens": [128] and "shape": '
        '"v3": for these only; "stamps": true: with time stamps',
    )
    parser.add_argument("--stamps", action="store_true", help="take time stamps in the kernel")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default=head(), help="what is measured, for the record")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    args.flush = torch.randn(FLUSH_BYTES // 4, device="cuda")
    device, rate = torch.cuda.get_device_name(), read_rate(args.flush)
    print(f"{device}, torch.sum reads {rate:.3f} TB/s, commit {args.commit[:8]}")
    record = {"device": device, "read_tb_s": rate, "commit": args.commit, "results": []}
    for geometry in args.shape.split(","):
        for name in args.format.split(","):
            cases = list_cases(args, geometry, name)
            problem = Problem(name, geometry, args)
            layers = [problem.layer(case) for case in cases]
            compile_all([layer.kernel_builds()[0] for layer in layers])
            if not args.compile_only:
                pairs = list(zip(cases, layers, strict=True))
                for case, layer in track(pairs, name, console=Console(stderr=True)):
                    result = problem.measure(case, layer)
                    record["results"].append(result)
                    show(case, result, rate)
                    if args.out:
                        args.out.write_text(json.dumps(record, indent=1))
            for layer in layers:
                layer.destroy()
            del problem


def list_cases(args: argparse.Namespace, geometry: str, name: str) -> list[Case]:
    """All token counts with the first --knobs, then with the next."""
    cases = []
    for text in args.knobs or ["{}"]:
        changes = json.loads(text)
        only = changes.pop("tokens", None)
        if changes.pop("shape", geometry) != geometry:
            continue
        takes_stamps = changes.pop("stamps", args.stamps)
        for is_skewed, counts in enumerate((args.tokens, args.skew)):
            cases += [
                Case(geometry, name, int(n), bool(is_skewed), takes_stamps, changes)
                for n in counts.split(",")
                if n and (only is None or int(n) in only)
            ]
    return cases


def show(case: Case, result: dict, rate: float) -> None:
    us = result["us"]
    print(
        f"{case.name:9s} {case.geometry:8s} T {case.num_tokens:5d} {result['routing']:8s} "
        f"{us['median']:7.1f} us (min {us['min']:.1f}, p99 {us['p99']:.1f}) "
        f"{result['tb_s']:.3f} TB/s {100 * result['tb_s'] / rate:.1f} % "
        f"{result['tflop_s']:.0f} TFLOP/s, host {result['host_us']:.1f} us, error "
        f"{result['term_error']:.5f} {json.dumps(case.changes) if case.changes else ''}",
        flush=True,
    )
    for moment, times in result.get("moments_us", {}).items():
        print(f"    {moment:8s} first, median, last CTA: {times}", flush=True)


if __name__ == "__main__":
    main()

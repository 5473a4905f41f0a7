"""Microseconds of dispatch, and of dispatch + combine, over virtual ranks of one GPU.

    python scripts/bench_transport.py [--ranks 1 2 4 8] [--tokens 1 8 128 1024 4096] [--json F]

Each line: one launch in a CUDA graph, L2 read over before it, median and 99th percentile of
`--repeats`, events around the replay (launch and drain of 4 to 6 us included). Values are checked
against plain torch first. GB/s count each routed row once for the dispatch (H BF16), twice with
the terms; virtual ranks share one GPU's memory, so these are no NVLink figures.

    checks    what the time-out checks of all waits take: a build without them takes turns with the
              one that runs, `--repeats` times 4 each; percent of the latter's median
    moments   when the CTAs reached each `protocol.Moment`, us after the first one started: first,
              median and last CTA of the median launch; a build of its own, as taking them costs
"""

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_permute import time_replay

from moe_ep.comm.group import EpGroup
from moe_ep.launch.stages import median_launch
from moe_ep.megakernel.compile_cache import compile_all
from moe_ep.megakernel.fused_transport import FusedTransport, transport_spec
from moe_ep.megakernel.transport_sm90 import transport_build

FLUSH_BYTES = 1 << 30
LIMIT_BYTES = 100 << 30  # of one case; larger ones are left out, and said so


class Case:
    """Tensors, launches and the expected output of one number of ranks and tokens."""

    def __init__(self, num_ranks: int, num_tokens: int, args: argparse.Namespace) -> None:
        gen = torch.Generator(device="cuda").manual_seed(num_tokens)
        shape = (num_ranks, num_tokens)
        scores = torch.rand(*shape, args.experts, generator=gen, device="cuda")
        self.ids = scores.topk(args.top_k).indices.int()
        self.scale = torch.rand(args.experts, generator=gen, device="cuda") + 0.5
        self.weights = torch.rand(*shape, args.top_k, generator=gen, device="cuda")
        self.x = torch.randn(*shape, args.hidden, generator=gen, device="cuda").bfloat16()
        self.out = torch.empty_like(self.x)
        self.num_tokens = torch.full((num_ranks,), num_tokens, dtype=torch.int32, device="cuda")
        self.group = EpGroup.single("cuda") if num_ranks == 1 else EpGroup.virtual(num_ranks)
        self.shape = geometry(num_tokens, args)

    @contextlib.contextmanager
    def build(self, **options) -> Iterator[tuple[torch.cuda.CUDAGraph, FusedTransport]]:
        transport = FusedTransport(self.group, timeout_s=5.0, **self.shape, **options)
        tensors = (self.x, self.ids, self.weights, self.num_tokens, self.scale, self.out)
        transport.forward(*tensors)
        torch.cuda.synchronize()
        transport.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            transport.forward(*tensors)
        yield graph, transport
        torch.cuda.synchronize()
        transport.check()
        transport.destroy()

    def check(self) -> None:
        total = torch.zeros_like(self.x, dtype=torch.float32)
        for k in range(self.ids.shape[-1]):
            factor = self.scale[self.ids[..., k].long()]
            term = (self.x.float() * factor[..., None]).bfloat16().float()
            total = total + term * self.weights[..., k, None]
        if not torch.equal(self.out.view(torch.int16), total.bfloat16().view(torch.int16)):
            raise SystemExit(f"wrong values for {self.shape} over {self.group.num_ranks} ranks")


def times_us(
    graphs: list[torch.cuda.CUDAGraph], flush: torch.Tensor, repeats: int
) -> list[list[float]]:
    """Of each graph, in rising order; the graphs take turns."""
    times = [[] for _ in graphs]
    for _ in range(repeats + 3):
        for graph, taken in zip(graphs, times, strict=True):
            taken.append(time_replay(graph, flush))
    return [sorted(taken[3:]) for taken in times]


def moments(case: Case) -> dict[str, list[float]]:
    with case.build(has_stamps=True) as (graph, transport):
        return median_launch(graph.replay, transport.stamps, case.group)


BUILDS = {
    "dispatch": dict(combines=False),
    "round": {},
    "bare": dict(is_bounded=False),
}


def measure(case: Case, flush: torch.Tensor, repeats: int) -> dict:
    times = {}
    with case.build(**BUILDS["dispatch"]) as (graph, _):
        (times["dispatch"],) = times_us([graph], flush, repeats)
    with case.build() as (graph, _), case.build(**BUILDS["bare"]) as (bare, _):
        times["round"], times["bare"] = times_us([graph, bare], flush, 4 * repeats)
        for one in (bare, graph):
            case.out.fill_(float("nan"))
            one.replay()
            case.check()
    result = {}
    for name, taken in times.items():
        result[f"{name}_us"] = round(statistics.median(taken), 2)
        result[f"{name}_p99_us"] = round(taken[int(0.99 * (len(taken) - 1))], 2)
    result["checks_percent"] = round(100 * (1 - result["bare_us"] / result["round_us"]), 2)
    result["moments_us"] = moments(case)
    row_bytes = case.ids.numel() * case.x.shape[-1] * 2
    result["dispatch_gb_s"] = round(row_bytes / result["dispatch_us"] / 1e3, 1)
    result["round_gb_s"] = round(2 * row_bytes / result["round_us"] / 1e3, 1)
    return result


def compile_ahead(cases: list[tuple[int, int]], args: argparse.Namespace) -> None:
    """All kernels of the run, by as many processes as there are cores."""
    specs = [
        transport_spec(
            num_ranks,
            is_virtual=num_ranks > 1,
            **geometry(num_tokens, args),
            **options,
        )
        for num_ranks, num_tokens in cases
        for options in (*BUILDS.values(), dict(has_stamps=True))
    ]
    compile_all([transport_build(spec) for spec in specs])


def geometry(num_tokens: int, args: argparse.Namespace) -> dict[str, int]:
    return dict(
        num_experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        max_tokens_per_rank=num_tokens,
    )


def needed_bytes(num_ranks: int, num_tokens: int, args: argparse.Namespace) -> int:
    """Pools and terms of all ranks: the bulk."""
    rows = num_ranks * num_tokens * args.top_k
    return num_ranks * rows * args.hidden * 2 + rows * args.hidden * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 128, 1024, 4096])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda").fill_(1)
    results = []
    print(f"{torch.cuda.get_device_name()}  E {args.experts} K {args.top_k} H {args.hidden}")
    cases = []
    for case in itertools.product(args.ranks, args.tokens):
        if needed_bytes(*case, args) <= LIMIT_BYTES:
            cases.append(case)
        else:
            print("R {} T {:5d}  left out: more than {} bytes".format(*case, LIMIT_BYTES))
    compile_ahead(cases, args)
    for num_ranks, num_tokens in cases:
        case = Case(num_ranks, num_tokens, args)
        result = dict(ranks=num_ranks, tokens=num_tokens)
        result |= measure(case, flush, args.repeats)
        results.append(result)
        print(
            f"R {num_ranks} T {num_tokens:5d}  dispatch {result['dispatch_us']:8.1f} us "
            f"({result['dispatch_gb_s']:7.1f} GB/s)  round {result['round_us']:8.1f} us, p99 "
            f"{result['round_p99_us']:8.1f} ({result['round_gb_s']:7.1f} GB/s)  checks "
            f"{result['checks_percent']:5.2f} %",
            flush=True,
        )
        spread = result["moments_us"].items()
        texts = (f"{name} {'/'.join(f'{us:.1f}' for us in some)}" for name, some in spread)
        print("   ", "  ".join(texts).lower(), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Microseconds of permutation and combine on one GPU, in CUDA graphs, values checked first.

    python scripts/bench_permute.py [--tokens 8 128 512] [--layer nvfp4] [--json permute.json]

cold   one launch, L2 read over before it, events around the graph (includes launch and drain)
chain  one of many launches back to back in a graph: programmatic launches overlap, caches are warm
layer  the whole one-rank layer (permute, FC1, FC2, combine) and its two GEMMs alone, both cold
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from bench_grouped_gemm import SHAPES, Problem

from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.megakernel.combine_sm90 import Combine, CombineConfig
from moe_ep.megakernel.knobs import choose_row
from moe_ep.megakernel.permute_sm90 import Permute, PermuteConfig

NUM_REPEATS = 50
FLUSH_BYTES = 1 << 30


def capture(work: Callable[[], None], num_launches: int) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_launches):
            work()
    graph.replay()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, flush: torch.Tensor | None) -> float:
    """Median over `NUM_REPEATS`."""
    return statistics.median(time_replay(graph, flush) for _ in range(NUM_REPEATS))


def time_replay(graph: torch.cuda.CUDAGraph, flush: torch.Tensor | None) -> float:
    """Microseconds of one replay, `flush` read before it."""
    if flush is not None:
        flush.sum()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)


class Case:
    """Routing, tensors and launches of one number of tokens; `plan` is the specification's."""

    def __init__(self, num_tokens: int, num_experts: int, top_k: int, hidden: int) -> None:
        gen = torch.Generator().manual_seed(num_tokens)
        topk_ids = torch.rand(num_tokens, num_experts, generator=gen).topk(top_k).indices.int()
        self.plan = DispatchPlan.from_topk_ids(topk_ids, num_experts=num_experts)
        self.x = torch.randn(num_tokens, hidden, generator=gen).bfloat16()
        self.weights = torch.rand(num_tokens, top_k, generator=gen)
        self.num_experts, self.top_k, self.hidden = num_experts, top_k, hidden

        self._ids, self._x, self._weights = topk_ids.cuda(), self.x.cuda(), self.weights.cuda()
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.offsets = torch.empty(num_experts + 1, **int32)
        self.pool_row = torch.empty(num_tokens, top_k, **int32)
        self._outputs = {
            "out_counts": torch.empty(num_experts, **int32),
            "out_offsets": self.offsets,
            "out_src_slot": torch.empty(num_tokens * top_k, **int32),
            "out_pool_row": self.pool_row,
            "status": torch.zeros(1, **int32),
        }
        self.pool = torch.empty(num_tokens * top_k, hidden, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self._x)
        self._combine = Combine(CombineConfig(top_k=top_k, hidden=hidden))

    def permutation(self, *, has_copy: bool) -> Callable[[], None]:
        permute = Permute(
            PermuteConfig(
                num_local_experts=self.num_experts,
                top_k=self.top_k,
                hidden=self.hidden if has_copy else None,
                ids_are_int64=False,
            )
        )
        rows = {"hidden_states": self._x, "out_pool": self.pool} if has_copy else {}
        return lambda: permute(
            self._ids, num_experts=self.num_experts, first_expert=0, **self._outputs, **rows
        )

    def combine(self, terms: torch.Tensor) -> None:
        self._combine(terms, self.pool_row, self._weights, self.out)

    def check(self, terms: torch.Tensor) -> None:
        assert torch.equal(self.pool_row.cpu(), self.plan.pool_row)
        assert torch.equal(self.pool.cpu(), self.plan.gather(self.x))
        assert torch.equal(self.out.cpu(), self.plan.combine(terms.cpu(), self.weights))


def measure(case: Case, flush: torch.Tensor) -> dict[str, float]:
    with_copy, without_copy = (case.permutation(has_copy=value) for value in (True, False))

    def both() -> None:
        with_copy()
        case.combine(case.pool)

    both()
    case.check(case.pool)
    one_element = torch.zeros(1, device="cuda")
    steps = {
        "one element": one_element.zero_,
        "permute": without_copy,
        "permute, copy": with_copy,
        "combine": lambda: case.combine(case.pool),
        "permute, copy, combine": both,
    }
    result = {}
    for name, work in steps.items():
        result[f"{name} cold"] = replay_us(capture(work, 1), flush)
        result[f"{name} chain"] = replay_us(capture(work, NUM_REPEATS), None) / NUM_REPEATS
    return result


def measure_layer(case: Case, problem: Problem, flush: torch.Tensor) -> dict[str, float]:
    """The layer against its two GEMMs alone, replayed in turn on the same pool."""
    rows = case.plan.counts.tolist()
    gemm = problem.gemm(choose_row(problem.name, sum(rows) / case.num_experts).knobs)
    permute = case.permutation(has_copy=True)
    hidden = torch.empty(len(case.pool), problem.intermediate, dtype=torch.bfloat16, device="cuda")
    terms = torch.empty_like(case.pool)

    def gemms() -> None:
        gemm.fc1(case.pool, case.offsets, problem.prepared, hidden)
        gemm.fc2(hidden, case.offsets, problem.prepared, terms)

    def layer() -> None:
        permute()
        gemms()
        case.combine(terms)

    layer()
    case.check(terms)
    problem.check(rows, list(itertools.accumulate(rows, initial=0)), case.pool, hidden, terms)
    graphs = capture(layer, 1), capture(gemms, 1)
    whole, alone = (replay_us(graph, flush) for graph in graphs)
    return {"layer": whole, "layer, GEMMs alone": alone, "layer over GEMMs": whole - alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 8192])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--shape", default="v3", help="of bench_grouped_gemm.py")
    parser.add_argument("--layer", metavar="FORMAT", help="also the layer with such weights")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    hidden, _ = SHAPES[args.shape]
    print(f"{device}; {args.experts} experts, top-{args.top_k}, hidden {hidden}; us")
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    problem = Problem(args.layer, args.shape, args.experts) if args.layer else None
    results = {}
    for num_tokens in args.tokens:
        case = Case(num_tokens, args.experts, args.top_k, hidden)
        results[num_tokens] = measure(case, flush)
        if problem:
            results[num_tokens] |= measure_layer(case, problem, flush)
        print(f"{num_tokens} tokens")
        for name, us in results[num_tokens].items():
            print(f"  {name:30s} {us:9.2f}", flush=True)
    if args.json:
        facts = {"device": device, **vars(args), "json": str(args.json), "us": results}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()

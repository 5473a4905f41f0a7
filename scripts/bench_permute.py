"""Microseconds of permutation and combine on one GPU, in CUDA graphs, values checked first.

    python scripts/bench_permute.py [--tokens 8 128 512] [--json permute.json]

cold   one launch, L2 read over before it, events around the graph (includes launch and drain)
chain  one of many launches back to back in a graph: programmatic launches overlap, caches are warm
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from moe_ep.dispatch_plan import DispatchPlan
from moe_ep.megakernel.combine_sm90 import Combine, CombineConfig
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
    times = []
    for _ in range(NUM_REPEATS):
        if flush is not None:
            flush.sum()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def measure(num_tokens: int, args: argparse.Namespace) -> dict[str, float]:
    num_experts, top_k, hidden = args.experts, args.top_k, args.hidden
    gen = torch.Generator().manual_seed(num_tokens)
    topk_ids = torch.rand(num_tokens, num_experts, generator=gen).topk(top_k).indices.int()
    plan = DispatchPlan.from_topk_ids(topk_ids, num_experts=num_experts)
    x = torch.randn(num_tokens, hidden, generator=gen).bfloat16()
    weights = torch.rand(num_tokens, top_k, generator=gen)

    ids, x_gpu, weights_gpu = topk_ids.cuda(), x.cuda(), weights.cuda()
    int32 = {"dtype": torch.int32, "device": "cuda"}
    plan_gpu = {
        "out_counts": torch.empty(num_experts, **int32),
        "out_offsets": torch.empty(num_experts + 1, **int32),
        "out_src_slot": torch.empty(num_tokens * top_k, **int32),
        "out_pool_row": torch.empty(num_tokens, top_k, **int32),
        "status": torch.zeros(1, **int32),
    }
    pool = torch.empty(num_tokens * top_k, hidden, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x_gpu)

    def permutation(width: int | None) -> Callable[[], None]:
        config = PermuteConfig(
            num_local_experts=num_experts, top_k=top_k, hidden=width, ids_are_int64=False
        )
        permute = Permute(config)
        rows = {"hidden_states": x_gpu, "out_pool": pool} if width else {}
        return lambda: permute(ids, num_experts=num_experts, first_expert=0, **plan_gpu, **rows)

    with_copy, without_copy = permutation(hidden), permutation(None)
    combine = Combine(CombineConfig(top_k=top_k, hidden=hidden))

    def combined() -> None:
        combine(pool, plan_gpu["out_pool_row"], weights_gpu, out)

    def both() -> None:
        with_copy()
        combined()

    both()
    assert torch.equal(plan_gpu["out_pool_row"].cpu(), plan.pool_row)
    assert torch.equal(pool.cpu(), plan.gather(x))
    assert torch.equal(out.cpu(), plan.combine(plan.gather(x), weights))

    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    empty = torch.zeros(1, device="cuda")
    steps = {
        "one element": lambda: empty.zero_(),
        "permute": without_copy,
        "permute, copy": with_copy,
        "combine": combined,
        "permute, copy, combine": both,
    }
    result = {}
    for name, work in steps.items():
        result[f"{name} cold"] = replay_us(capture(work, 1), flush)
        result[f"{name} chain"] = replay_us(capture(work, NUM_REPEATS), None) / NUM_REPEATS
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 8192])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}; {args.experts} experts, top-{args.top_k}, hidden {args.hidden}; us")
    results = {}
    for num_tokens in args.tokens:
        results[num_tokens] = measure(num_tokens, args)
        print(f"{num_tokens} tokens")
        for name, us in results[num_tokens].items():
            print(f"  {name:30s} {us:9.2f}")
    if args.json:
        facts = {"device": device, **vars(args), "json": str(args.json), "us": results}
        args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()

"""`moe-ep bench --cpu-ratio`: what the CPU layer costs above its matmuls.

The layer: BF16 weights, one rank, one thread. The yardstick: the FP32 matmuls of the same padded
rows alone, with weights upcast beforehand. What is between them is routing, upcasting weights and
rows, activations, roundings and the combine. Both are timed in turn in one process.
"""

import time
from collections.abc import Callable

import torch

from moe_ep.comm.group import EpGroup
from moe_ep.config import SplitConfig
from moe_ep.cpu_matmul import ROW_BLOCK
from moe_ep.inputs import MoEInputs
from moe_ep.layer import MoEEpLayer
from moe_ep.megakernel.problem import MoEShape
from moe_ep.weights import MoEWeights

SHAPE = MoEShape(num_experts=64, top_k=8, hidden=1024, intermediate=512)
NUM_TOKENS = 512
NUM_RUNS = 7


def run() -> None:
    """Print both medians and their ratio."""
    layer_s, matmuls_s = measure()
    ratio = layer_s / matmuls_s
    print(
        f"T={NUM_TOKENS} E={SHAPE.num_experts} K={SHAPE.top_k} H={SHAPE.hidden} "
        f"I={SHAPE.intermediate}, BF16, one rank, one thread, median of {NUM_RUNS}: "
        f"layer {1e3 * layer_s:.1f} ms, FP32 matmuls {1e3 * matmuls_s:.1f} ms, "
        f"ratio {ratio:.3f}"
    )


def measure() -> tuple[float, float]:
    """Median seconds of the layer's forward and of the matmuls alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        rows, hidden, intermediate = SHAPE.fc1_rows, SHAPE.hidden, SHAPE.intermediate
        w13 = torch.randn(SHAPE.num_experts, rows, hidden, generator=generator) / hidden**0.5
        w2 = torch.randn(SHAPE.num_experts, hidden, intermediate, generator=generator)
        w2 /= intermediate**0.5
        weights = MoEWeights.from_dense(w13.to(torch.bfloat16), w2.to(torch.bfloat16))
        scores = torch.rand(NUM_TOKENS, SHAPE.num_experts, generator=generator)
        top = scores.topk(SHAPE.top_k)
        x = torch.randn(NUM_TOKENS, hidden, generator=generator).to(torch.bfloat16)
        inputs = MoEInputs(x, top.indices, top.values)
        layer = MoEEpLayer(
            SHAPE,
            weights,
            max_tokens_per_rank=NUM_TOKENS,
            backend=SplitConfig(),
            group=EpGroup.single("cpu"),
        )
        matmuls = _matmuls(weights, top.indices)
        layer.forward(inputs)
        matmuls()
        times = [
            (_seconds(lambda: layer.forward(inputs)), _seconds(matmuls)) for _ in range(NUM_RUNS)
        ]
        layer.destroy()
    finally:
        torch.set_num_threads(num_threads)
    layer_s, matmuls_s = torch.tensor(times, dtype=torch.float64).median(dim=0).values.tolist()
    return layer_s, matmuls_s


def _matmuls(weights: MoEWeights, topk_ids: torch.Tensor) -> Callable[[], None]:
    """FC1 and FC2 of every expert in FP32, on as many rows as the layer pads to."""
    w13, w2 = weights.dequantize(torch.float32)
    counts = topk_ids.flatten().bincount(minlength=len(w13)).tolist()
    padded = [-(-count // ROW_BLOCK) * ROW_BLOCK for count in counts]
    x = [torch.randn(num_rows, SHAPE.hidden) for num_rows in padded]
    h = [torch.randn(num_rows, SHAPE.intermediate) for num_rows in padded]

    def call() -> None:
        for expert_idx in range(len(w13)):
            torch.mm(x[expert_idx], w13[expert_idx].t())
            torch.mm(h[expert_idx], w2[expert_idx].t())

    return call


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

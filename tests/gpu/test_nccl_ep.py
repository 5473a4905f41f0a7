"""The layer over NCCL-EP on two GPUs: right against FP64 in every layout, exact rows with the bits
of the torch transport, tokens that differ by rank and call, refusals, captured graphs.

Two H200: pytest -n 7 tests/gpu/test_nccl_ep.py. Each layout has a job of its own: NCCL-EP compiles
its kernels on the way, two to seven for a layout, half a minute each (nvcc).
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("nccl.ep", reason="needs nccl-extensions")

from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.config import Backend, GroupedGemmConfig, NcclEpConfig, TorchCommConfig, TorchGemmConfig
from moe_ep.launch import spawn
from moe_ep.reference import moe_oracle_fp64

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(420)]

SHAPE = MoEShape(num_experts=16, top_k=4, hidden=512, intermediate=256)
CAPACITY = 24
TOKENS = [(24, 7), (0, 5), (1, 1), (3, 0), (9, 24), (24, 23)]  # of each rank, call by call
NUM_REPEATS = 50
JOB_S, CALL_S = 400.0, 60.0  # time-outs of a job, and of a layer's waits
GROUPED = GroupedGemmConfig()
KINDS = {
    "ll rank_major": NcclEpConfig(mode="ll"),
    "ll expert_major": NcclEpConfig(mode="ll", layout="expert_major"),
    "ht flat": NcclEpConfig(mode="ht"),
    "ht expert_major": NcclEpConfig(mode="ht", layout="expert_major"),
    "ll exact": NcclEpConfig(mode="ll", exact_combine=True),
    "ht exact": NcclEpConfig(mode="ht", exact_combine=True),
}
# Relative L2 to FP64. Contract rule 6 for the terms; each further rounding to BF16 adds 0.0017.
TERM_ERROR, ROUNDING_ERROR = 0.0026, 0.0017
ROUNDINGS = {"ll expert_major": 1, "ht expert_major": 2, "ll exact": 1, "ht exact": 1}


def inputs_of(rank: int, call: int) -> MoEInputs:
    """A tenth of the slots masked, and an expert that a token names twice."""
    inputs = make_inputs(SHAPE, TOKENS[call][rank], 10 * call + rank, masked=0.1)
    inputs.topk_ids[2:, 3] = inputs.topk_ids[2:, 0]
    return inputs


def on_gpu(inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))


def make_layer(rank: int, backend: Backend, fmt: str = "nvfp4") -> MoEEpLayer:
    weights = make_weights(SHAPE, fmt).shard("ep", rank, 2).to("cuda")
    layer = MoEEpLayer(
        SHAPE, weights, max_tokens_per_rank=CAPACITY, backend=backend, timeout_s=CALL_S
    )
    layer.warmup()
    return layer


def all_calls(layer, rank: int) -> list[torch.Tensor]:
    return [layer(on_gpu(inputs_of(rank, call))) for call in range(len(TOKENS))]


def check_life(layer: MoEEpLayer, rank: int, expected: torch.Tensor) -> None:
    """What a call may not disturb; `expected` is the output of call 0."""
    inputs = on_gpu(inputs_of(rank, 0))
    with pytest.raises(MoEEpConfigError, match="rank 1: topk_weights"):
        bad = replace(inputs, topk_weights=inputs.topk_weights.double()) if rank else inputs
        layer(bad)
    ids = inputs.topk_ids.clone()
    ids[1, 2] = SHAPE.num_experts
    layer(replace(inputs, topk_ids=ids))
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[1, 2\] of an earlier call"):
        layer.check()
    for _ in range(NUM_REPEATS):
        out = layer(inputs)
    assert torch.equal(out, expected)


def replay(layer, rank: int) -> list[torch.Tensor]:
    """Outputs of every call, put into one graph; masked rows behind its tokens."""
    inputs = on_gpu(make_inputs(SHAPE, CAPACITY, 99))
    out = torch.empty_like(inputs.hidden_states)
    layer(inputs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        layer(inputs, out=out)
    outs = []
    for call in range(len(TOKENS)):
        other = inputs_of(rank, call)
        inputs.topk_ids.fill_(-1)
        for name, tensor in vars(other).items():
            getattr(inputs, name)[: other.num_tokens] = tensor.cuda()
        out.fill_(float("nan"))
        graph.replay()
        outs.append(out[: other.num_tokens].clone())
        assert not out[other.num_tokens :].any()
    layer.check()
    return outs


def run_kind(rank: int, num_ranks: int, kind: str) -> dict[str, list[torch.Tensor]]:
    layer = make_layer(rank, SplitConfig(comm=KINDS[kind], kernel=GROUPED))
    found = {kind: all_calls(layer, rank)}
    check_life(layer, rank, found[kind][0])
    found["graph"] = replay(layer, rank)
    torch.cuda.synchronize()
    layer.destroy()
    if kind.endswith("exact"):
        backend = SplitConfig(comm=TorchCommConfig(), kernel=GROUPED)
        found["torch transport"] = all_calls(make_layer(rank, backend), rank)
    return on_cpu(found)


def run_torch_kernels(rank: int, num_ranks: int) -> dict[str, list[torch.Tensor]]:
    backend = SplitConfig(comm=KINDS["ll rank_major"], kernel=TorchGemmConfig())
    layer = make_layer(rank, backend, "bf16")
    found = {"bf16": all_calls(layer, rank)}
    with pytest.raises(MoEEpStateError, match="take GroupedGemmConfig"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(on_gpu(inputs_of(rank, 0)))
    found["after the refused capture"] = all_calls(layer, rank)
    return on_cpu(found)


def on_cpu(found: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {name: [out.cpu() for out in outs] for name, outs in found.items()}


def error(outputs: list[dict[str, list[torch.Tensor]]], name: str, fmt: str = "nvfp4") -> float:
    """Of all calls and ranks together, against the layer in FP64."""
    weights = make_weights(SHAPE, fmt)
    got, exact = [], []
    for rank, found in enumerate(outputs):
        for call, out in enumerate(found[name]):
            got.append(out.double())
            exact.append(moe_oracle_fp64(inputs_of(rank, call), weights, SHAPE))
    got, exact = torch.cat(got), torch.cat(exact)
    return float((got - exact).norm() / exact.norm())


def max_error(kind: str) -> float:
    return TERM_ERROR + ROUNDING_ERROR * ROUNDINGS.get(kind, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_layer_on_two_gpus(kind):
    """Near FP64; captured in a graph, and with exact rows over torch's transport, bit for bit."""
    outputs = spawn.run(run_kind, 2, kind, device="cuda", timeout_s=JOB_S)
    assert 0 < error(outputs, kind) <= max_error(kind)
    for rank, found in enumerate(outputs):
        for name in found.keys() - {kind}:
            for call, (ours, theirs) in enumerate(zip(found[name], found[kind], strict=True)):
                assert torch.equal(ours, theirs), f"{name}, rank {rank}, call {call}"


def test_torch_kernels_run_over_it_outside_a_capture():
    outputs = spawn.run(run_torch_kernels, 2, device="cuda", timeout_s=JOB_S)
    limit = TERM_ERROR + 2 * ROUNDING_ERROR
    for name in ("bf16", "after the refused capture"):
        assert 0 < error(outputs, name, "bf16") <= limit

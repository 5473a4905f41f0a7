"""NCCL-EP with a group of one rank, so that every layout runs on one GPU: values, exact bits,
tokens that change by call, graphs, memory. A layer of one rank takes no transport; the layer on two
GPUs is in `test_nccl_ep.py`.

One process for each layout, which NCCL-EP may end: pytest -n 6 tests/gpu/test_nccl_ep_one_rank.py.
"""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("nccl.ep", reason="needs nccl-extensions")

from layer_cases import make_weights
from test_nccl_ep import (
    CAPACITY,
    GROUPED,
    JOB_S,
    KINDS,
    SHAPE,
    all_calls,
    error,
    inputs_of,
    max_error,
    on_cpu,
    on_gpu,
    replay,
)

from moe_ep import MoEEpLayer, MoEInputs, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.comm.group import EpGroup
from moe_ep.comm.liveness import Liveness
from moe_ep.comm.torch_transport import TorchTransport
from moe_ep.config import TorchCommConfig
from moe_ep.grouped import GroupedExperts
from moe_ep.launch import spawn
from moe_ep.split_nccl_ep import NcclEpSplit, make_nccl_ep_split

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

LAYER_ID, TIMEOUT_S = 1, 20.0
NUM_REPEATS = 300


class OneRank:
    """The layer's backend over a group of one, called as the layer calls it."""

    def __init__(self, kind: str) -> None:
        group = EpGroup.default("cuda")
        weights = make_weights(SHAPE, "nvfp4").to("cuda")
        liveness = Liveness(group, LAYER_ID, TIMEOUT_S)
        control = TorchTransport(
            *(group, liveness),
            layer_id=LAYER_ID,
            hidden=SHAPE.hidden,
            top_k=SHAPE.top_k,
            owner_E=None,
            timeout_s=TIMEOUT_S,
        )
        experts = GroupedExperts(SHAPE, weights, GROUPED.knobs)
        self.backend: NcclEpSplit = make_nccl_ep_split(
            *(KINDS[kind], experts, SHAPE, weights, group, CAPACITY, control, liveness, TIMEOUT_S)
        )
        self.backend.warmup()
        self.check = self.backend.check

    def __call__(self, inputs: MoEInputs, out: torch.Tensor | None = None) -> torch.Tensor:
        self.backend.require_callable()
        return self.backend.forward(inputs, CAPACITY, out)


def run_kind(rank: int, num_ranks: int, kind: str) -> dict[str, list[torch.Tensor]]:
    found = {}
    layer = OneRank(kind)
    found[kind] = all_calls(layer, rank)
    inputs = on_gpu(inputs_of(rank, 0))
    ids = inputs.topk_ids.clone()
    ids[1, 2] = SHAPE.num_experts
    layer(MoEInputs(inputs.hidden_states, ids, inputs.topk_weights))
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[1, 2\] of an earlier call"):
        layer.check()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(NUM_REPEATS):
        out = layer(inputs)
    torch.cuda.synchronize()
    assert torch.equal(out, found[kind][0])
    del out
    assert torch.cuda.memory_allocated() == before
    print(f"{kind}: eager done", flush=True)
    found["graph"] = replay(layer, rank)
    layer.backend.destroy()
    again = OneRank(kind)
    found["again"] = all_calls(again, rank)
    again.backend.destroy()
    weights = make_weights(SHAPE, "nvfp4").to("cuda")
    backend = SplitConfig(comm=TorchCommConfig(), kernel=GROUPED)
    alone = MoEEpLayer(SHAPE, weights, max_tokens_per_rank=CAPACITY, backend=backend)
    alone.warmup()
    found["alone"] = all_calls(alone, rank)
    return on_cpu(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_layer_on_one_gpu(kind):
    outputs = spawn.run(run_kind, 1, kind, device="cuda", timeout_s=JOB_S)
    assert 0 < error(outputs, kind) <= max_error(kind)
    (found,) = outputs
    for name in ("graph", "again") + (("alone",) if kind.endswith("exact") else ()):
        for call, (ours, theirs) in enumerate(zip(found[name], found[kind], strict=True)):
            assert torch.equal(ours, theirs), f"{name}, call {call}"

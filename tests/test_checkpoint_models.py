"""Models that transformers saved load as the weights that their own experts hold."""

import pytest
import torch
from test_integration_transformers import FAMILIES, build_model

import moe_ep
from moe_ep.checkpoint import Checkpoint
from moe_ep.integrations.transformers import experts_shape, experts_weights, find_experts
from moe_ep.launch.inspect import examine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_layer_by_layer(tmp_path, family):
    model = build_model(family)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    checkpoint = Checkpoint(tmp_path)
    assert len(set(checkpoint.files.values())) > 1
    modules = find_experts(model)
    reports = examine(checkpoint)
    assert len(reports) == len(modules)
    assert all(report.can_run for report in reports)
    fmt = "gpt_oss" if family == "gpt-oss" else "hf"
    for report, experts in zip(reports, modules.values(), strict=True):
        shape, full = experts_shape(experts), experts_weights(experts)
        sizes = (report.num_experts, report.hidden, report.intermediate)
        assert sizes == (shape.num_experts, shape.hidden, shape.intermediate)
        for rank in range(2):
            part = moe_ep.load(
                checkpoint, report.layer, shape=shape, format=fmt, rank=rank, num_ranks=2
            )
            wanted = full.shard("ep", rank, 2)
            assert part.tensors.keys() == wanted.tensors.keys()
            for name, tensor in wanted.tensors.items():
                assert torch.equal(part.tensors[name], tensor)

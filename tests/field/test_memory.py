"""Field cases of kind memory: overruns, leaks, and errors that hid what did not fit."""

import gc
import re
from dataclasses import replace

import pytest
import torch
from field_ranks import S0, OneRank, Virtual, on, parts_of, weights_of
from held_memory import held_bytes
from layer_cases import make_inputs, make_weights

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import weight_format

FORMATS = ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block")


def on_device(ranks, inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.to(ranks.device) for tensor in vars(inputs).values()))


@on("cpu2", "split2", "mega2", "split@2", "mega@2")
def test_A53_odd_capacities_are_right_when_full(ranks):
    shape = replace(S0, hidden=272)
    weights = weights_of(shape, "nvfp4")
    for capacity in (1, 17, 33, 99):
        layer = ranks.layer(shape, weights, capacity)
        parts = ranks.parts(shape, capacity)
        ranks.assert_right(layer(parts), parts, weights, shape)
        layer.destroy()


@on("split1", "mega1")
def test_A53_a_hidden_size_that_kernels_cannot_take_states_the_multiple(ranks):
    shape = replace(S0, hidden=264)
    with pytest.raises(MoEEpConfigError, match="hidden.*264.*multiple|hidden.*multiple.*264"):
        ranks.module(shape, weights_of(shape, "bf16"))


@on("mega1", "mega2")
def test_A66_graphs_that_share_a_pool_keep_their_layers_apart(ranks):
    layers = [
        ranks.layer(S0, weights_of(S0, "nvfp4", seed=0)),
        ranks.layer(S0, weights_of(S0, "nvfp4", seed=1)),
    ]
    parts = [ranks.parts(S0, 16), ranks.parts(S0, 16, seed=70)]
    expected = [layer(part) for layer, part in zip(layers, parts, strict=True)]
    for seed in (0, 1):
        ranks.assert_right(expected[seed], parts[seed], weights_of(S0, "nvfp4", seed=seed))
    calls = [layer.bind(part) for layer, part in zip(layers, parts, strict=True)]
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for layer, call in zip(layers, calls, strict=True):
        if isinstance(ranks, OneRank):
            layer.module.warmup()
        call.launch()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            call.launch()
    for turn in range(100):
        which = (0, 1, 1, 0)[turn % 4]
        calls[which].out.fill_(float("nan"))
        graphs[which].replay()
        assert all(map(torch.equal, calls[which].outputs(), expected[which]))


@on("cpu1", "split1", "mega1")
def test_A70_eight_layers_hold_their_weights_and_nothing_that_grows(ranks):
    before = held_bytes(ranks.device)
    layers = [ranks.module(S0, make_weights(S0, "bf16", seed)) for seed in range(8)]
    given = make_inputs(S0, 16, seed=0)
    inputs = on_device(ranks, given)
    held = []
    num_steps = 300 if ranks.kind != "cpu" else 6
    for step in range(num_steps):
        for layer in layers:
            layer(inputs)
        if step in (1, 2, num_steps // 2, num_steps - 1):
            held.append(held_bytes(ranks.device) - before)
    assert held == [held[0]] * 4
    for seed, layer in enumerate(layers):
        ranks.assert_right([layer(inputs).cpu()], [given], make_weights(S0, "bf16", seed))
    if ranks.kind == "cpu":
        assert held[-1] <= 1.1 * 8 * make_weights(S0).num_bytes
        return
    # What the layers state: weights of each, one workspace for all.
    memory = [layer._backend.memory for layer in layers]
    stated = sum(m["prepared weights"] for m in memory) + memory[0]["shared workspace"]
    assert stated <= held[-1] <= stated + (1 << 20)  # stamps and roundings of the allocator
    for layer in layers:
        assert f"shared workspace {memory[0]['shared workspace'] / 1e6:.1f} MB" in layer.explain()
        layer.destroy()


@on("cpu1", "split2", "mega2", "split@2", "mega@2")
def test_A71_layers_of_other_sizes_and_formats_interleave(ranks):
    wide = MoEShape(num_experts=4, top_k=3, hidden=512, intermediate=256)
    built = []
    for shape, name, capacity in (
        (S0, "nvfp4", 16),
        (wide, "nvfp4", 64),
        (S0, "bf16", 16),
    ):
        weights = weights_of(shape, name)
        built.append((shape, weights, capacity, ranks.layer(shape, weights, capacity)))
    for idx in (0, 1, 2, 1, 0, 2, 2, 1, 0):
        shape, weights, capacity, layer = built[idx]
        parts = ranks.parts(shape, capacity, seed=idx)
        ranks.assert_right(layer(parts), parts, weights, shape)


@on("cpu1", "split1", "mega1")
def test_A72_failed_calls_and_rebuilt_layers_leak_nothing(ranks):
    inputs = make_inputs(S0, 16, seed=0)
    wrong = on_device(ranks, make_inputs(replace(S0, top_k=3), 16, seed=0))
    weights, held, outputs = ranks.weights(), {}, []
    for cycle in range(21):
        layer = ranks.module(S0, weights)
        with pytest.raises(MoEEpConfigError, match="topk_ids has shape"):
            layer(wrong)
        outputs.append(layer(on_device(ranks, inputs)).cpu())
        layer.check()
        layer.destroy()
        del layer
        if cycle in (1, 20):
            held[cycle] = held_bytes(ranks.device)
    grown = held[20] - held[1]
    assert grown == (19 * inputs.hidden_states.nbytes if ranks.kind == "cpu" else 0)
    ranks.assert_right([outputs[-1]], [inputs], weights)


@on("mega2")
def test_A72_rebuilt_layers_of_several_ranks_leak_nothing(ranks):
    parts, weights, held = ranks.parts(S0, 16), ranks.weights(), []
    for _ in range(21):
        layer = ranks.layer(S0, weights)
        outputs = layer(parts)
        layer.destroy()
        del layer
        held.append(held_bytes("cuda"))
    assert held[-1] == held[1]
    ranks.assert_right(outputs, parts, weights)


@on("split1", "mega1")
def test_A75_what_does_not_fit_is_an_error_with_the_bytes_and_what_to_lower(ranks):
    """The process may use 256 MiB more; the workspace needs some 4 GB."""
    shape = MoEShape(num_experts=8, top_k=8, hidden=1024, intermediate=1024)
    weights = weights_of(replace(shape, top_k=1), "nvfp4")
    ranks.module(shape, weights, 16).destroy()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((reserved + (1 << 28)) / total)
    try:
        with pytest.raises(MoEEpConfigError, match="max_tokens_per_rank.* 100000") as error:
            ranks.module(shape, weights, 100_000)
        needed = sum(map(int, re.findall(r"(\d+) (?:bytes of|of local)", str(error.value))))
        (free,) = map(int, re.findall(r"where (\d+) are free", str(error.value)))
        assert 3 << 30 < needed < 16 << 30
        assert 1 << 27 < free < 1 << 30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    ranks.module(shape, weights, 100_000).destroy()  # nothing of the first attempt is left
    layer, parts = ranks.layer(shape, weights, 16), ranks.parts(shape, 16)
    ranks.assert_right(layer(parts), parts, weights, shape)


@on("cpu1", "split1", "mega1")
def test_A76_one_token_above_the_capacity_is_an_error_with_both_numbers(ranks):
    layer = ranks.module(S0, ranks.weights())
    with pytest.raises(MoEEpConfigError, match="33 tokens; allowed: at most 32"):
        layer(on_device(ranks, make_inputs(S0, 33, seed=0)))
    inputs = make_inputs(S0, 32, seed=0)
    output = layer(on_device(ranks, inputs))
    ranks.assert_right([output.cpu()], [inputs], ranks.weights())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
def test_A77_the_originals_are_not_kept_alive(name, rank, num_ranks):
    before = held_bytes("cpu")
    weights = make_weights(S0, name).shard("ep", rank, num_ranks)
    layer = MoEEpLayer(S0, weights, max_tokens_per_rank=32) if num_ranks == 1 else None
    if layer is not None:
        layer.warmup()
    packed = packed_bytes(name, S0.num_experts // num_ranks)
    assert held_bytes("cpu") - before <= 1.1 * packed
    assert weights.num_bytes <= 1.1 * packed


def packed_bytes(name: str, num_experts: int, shape: MoEShape = S0) -> int:
    fmt = weight_format(name)
    matrices = fmt.num_bytes(shape.fc1_rows, shape.hidden)
    return num_experts * (matrices + fmt.num_bytes(shape.hidden, shape.intermediate))


@on("split1", "mega1")
@pytest.mark.parametrize("name", FORMATS)
def test_A77_a_kernels_layer_holds_its_prepared_weights_alone(ranks, name):
    shape = MoEShape(num_experts=8, top_k=2, hidden=2048, intermediate=1024)
    before = held_bytes("cuda")
    weights = make_weights(shape, name).to("cuda")
    layer = ranks.module(shape, weights, 1)
    workspace = layer._backend.memory["shared workspace"]
    del weights
    held = held_bytes("cuda") - before - workspace
    assert held <= 1.1 * packed_bytes(name, 8, shape)
    layer.destroy()


@on("split1", "mega1")
def test_A77_a_dropped_layer_frees_its_memory_without_the_collector(ranks):
    inputs = on_device(ranks, make_inputs(S0, 16, seed=0))
    first = ranks.module(S0, ranks.weights())  # holds the shared workspace
    first(inputs)
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        for end in (lambda layer: layer.destroy(), lambda layer: None):
            layer = ranks.module(S0, ranks.weights(seed=1))
            layer(inputs)
            end(layer)
            del layer
            assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_A77_a_view_of_a_large_checkpoint_tensor_does_not_keep_it_alive_after_shard():
    before = held_bytes("cpu")
    checkpoint = torch.randn(64, 3 * S0.intermediate, S0.hidden).bfloat16()
    w13 = checkpoint[:8, : S0.fc1_rows]
    w2 = checkpoint[8:16, : S0.intermediate].mT.contiguous()
    weights = MoEWeights.from_dense(w13, w2).shard("ep", 1, 2)
    del checkpoint, w13, w2
    assert held_bytes("cpu") - before <= 1.1 * weights.num_bytes


@on("cpu2", "split2", "split@2")
def test_A78_a_capacity_of_70000(ranks):
    shape = MoEShape(num_experts=8, top_k=2, hidden=128, intermediate=128)
    weights = ranks.weights(shape)
    layer = ranks.layer(shape, weights, 70_000)
    parts = parts_of(shape, [40, 70])
    ranks.assert_right(layer(parts), parts, weights, shape)
    if ranks.kind == "split":
        parts = parts_of(shape, [70_000, 66_000])
        ranks.assert_right(layer(parts), parts, weights, shape)


def test_A78_more_tokens_than_the_kernels_can_number_is_an_error_with_the_limit():
    from moe_ep.grouped_memory import max_capacity, workspace_regions

    limit = max_capacity(S0)
    workspace_regions(S0, 8, limit)
    with pytest.raises(MoEEpConfigError, match=f"{limit + 1}.*at most {limit}"):
        workspace_regions(S0, 8, limit + 1)


# Virtual ranks share one process, so that their workspace is one allocation for each geometry.
@on("mega2")
def test_A70_layers_of_virtual_ranks_share_a_workspace(ranks):
    assert isinstance(ranks, Virtual)
    before = held_bytes("cuda")
    layers = [ranks.layer(S0, weights_of(S0, "nvfp4", seed), 33) for seed in range(4)]
    parts = ranks.parts(S0, 16)
    calls = [layer.bind(parts) for layer in layers]
    held = []
    for step in range(100):
        for call in calls:
            call.launch()
        if step in (1, 2, 99):
            held.append(held_bytes("cuda") - before)
    assert held == [held[0]] * 3
    assert len({id(layer.mega.memory) for layer in layers}) == 1
    for seed, call in enumerate(calls):
        ranks.assert_right(call.outputs(), parts, weights_of(S0, "nvfp4", seed))

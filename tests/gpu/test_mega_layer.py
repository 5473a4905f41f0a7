"""The layer over the mega kernel: the bits of the split layer, and a whole life on the device.

One H200: pytest tests/gpu/test_mega_layer.py. Six mega kernels are compiled first, on every core.
"""

import functools
import gc

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import make_inputs, make_weights

from moe_ep import MegaConfig, MoEEpLayer, MoEInputs, MoEShape, MoEWeights, SplitConfig
from moe_ep.backends import supports
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.config import GroupedGemmConfig, MegaKernelConfig
from moe_ep.launch.compile import mega_builds
from moe_ep.megakernel.compile_cache import compile_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = MoEShape(num_experts=16, top_k=4, hidden=512, intermediate=256)
CAPACITY = 120  # two builds: up to 95 tokens, and above
FEW = 24  # capacity of one build
SPLIT = SplitConfig(kernel=GroupedGemmConfig())


@functools.cache
def weights_of(seed: int = 0) -> MoEWeights:
    return make_weights(SHAPE, "bf16", seed).to("cuda").quantize("nvfp4")


def make_layer(backend, seed: int = 0, capacity: int = CAPACITY) -> MoEEpLayer:
    return MoEEpLayer(SHAPE, weights_of(seed), max_tokens_per_rank=capacity, backend=backend)


def on_gpu(num_tokens: int, seed: int = 1) -> MoEInputs:
    inputs = make_inputs(SHAPE, num_tokens, seed, masked=0.1)
    return MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """All of this module's mega kernels at once."""
    builds = [mega_builds(SHAPE, "nvfp4", max_tokens_per_rank=n) for n in (CAPACITY, FEW)]
    compile_all([build for few in builds for build in few])


@pytest.fixture(scope="module")
def mega() -> MoEEpLayer:
    layer = make_layer(MegaConfig())
    layer.warmup()
    return layer


@pytest.fixture(scope="module")
def split() -> MoEEpLayer:
    return make_layer(SPLIT)


def test_auto_takes_it_and_says_so():
    assert supports(SHAPE, "nvfp4", "auto", "cuda").reason.startswith("mega")
    layer = make_layer("auto")
    assert isinstance(layer.backend, MegaConfig)
    assert "mega runs: the whole layer in one launch" in layer.explain()
    layer.destroy()


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, CAPACITY])
def test_bits_are_those_of_the_split_layer(mega, split, num_tokens):
    inputs = on_gpu(num_tokens)
    expected = split.forward(inputs)
    assert torch.equal(mega.forward(inputs), expected)
    assert torch.equal(mega.forward(inputs, max_tokens=num_tokens), expected)


def test_any_strides_and_ids_of_64_bits_are_taken(mega):
    inputs = on_gpu(50)
    expected = mega.forward(inputs)
    strided = MoEInputs(
        torch.stack([inputs.hidden_states] * 2, dim=1)[:, 1],
        inputs.topk_ids.long().T.contiguous().T,
        inputs.topk_weights.repeat(1, 2)[:, : SHAPE.top_k],
    )
    out = torch.empty(50, 2 * SHAPE.hidden, dtype=torch.bfloat16, device="cuda")[:, ::2]
    assert mega.forward(strided, out=out) is out
    assert torch.equal(out, expected)


def test_a_graph_needs_a_warm_layer_and_follows_new_weights():
    layer, inputs = make_layer(MegaConfig()), on_gpu(40)
    out = torch.empty_like(inputs.hidden_states)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(MoEEpStateError, match="warm up first"), torch.cuda.graph(graph):
        layer.forward(inputs, out=out)
    layer.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(inputs, out=out)
    graph.replay()
    assert torch.equal(out, layer.forward(inputs))
    layer.update_weights(weights_of(seed=5))
    graph.replay()
    fresh = make_layer(MegaConfig(), seed=5)
    assert torch.equal(out, fresh.forward(inputs))
    layer.destroy()
    assert torch.equal(out, fresh.forward(inputs))


def test_a_call_allocates_nothing_but_its_output(mega):
    inputs = on_gpu(CAPACITY)
    out = torch.empty_like(inputs.hidden_states)
    mega.forward(inputs, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        mega.forward(inputs, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_an_id_that_is_no_expert_is_raised_by_check_and_the_layer_works_on(mega):
    inputs = on_gpu(9)
    expected = mega.forward(inputs)
    bad = inputs.topk_ids.clone()
    bad[3, 1] = SHAPE.num_experts
    mega.forward(MoEInputs(inputs.hidden_states, bad, inputs.topk_weights))
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[3, 1\] was 16"):
        mega.check()
    assert torch.equal(mega.forward(inputs), expected)


def test_fewer_sms_give_the_same_bits(mega):
    inputs = on_gpu(30)
    few = make_layer(MegaConfig(megakernel=MegaKernelConfig(max_sms=20)))
    assert torch.equal(few.forward(inputs), mega.forward(inputs))
    few.destroy()


def test_layers_take_turns_in_one_workspace_on_two_streams(mega):
    other = make_layer(MegaConfig(), seed=7)
    inputs, streams = on_gpu(CAPACITY), [torch.cuda.Stream() for _ in range(2)]
    expected = [layer.forward(inputs) for layer in (mega, other)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for layer, stream in zip((mega, other), streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(layer.forward(inputs))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert torch.equal(out, expected[i % 2])
    other.destroy()


def test_a_graph_follows_other_routing_and_fewer_tokens_on_any_stream(mega):
    static = on_gpu(64, seed=2)
    out, graph, stream = (
        torch.empty_like(static.hidden_states),
        torch.cuda.CUDAGraph(),
        torch.cuda.Stream(),
    )
    with torch.cuda.graph(graph, stream=stream):
        mega.forward(static, out=out)
    for seed, num_tokens in enumerate([64, 1, 0, 33, 64], start=3):
        inputs = on_gpu(num_tokens, seed)
        expected = mega.forward(inputs)
        for name, tensor in vars(inputs).items():
            getattr(static, name)[:num_tokens] = tensor
        static.topk_ids[num_tokens:] = -1
        out.fill_(float("nan"))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out[:num_tokens], expected), num_tokens
        assert not out[num_tokens:].any(), num_tokens
    mega.check()


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_capacities_of_one_layer_have_the_same_bits_and_end_in_any_order(mega, first_to_go):
    inputs = on_gpu(FEW, seed=8)
    expected = mega.forward(inputs)
    layers = [make_layer(MegaConfig(), capacity=n) for n in (FEW, CAPACITY)]
    for _ in range(2):
        for layer in layers:
            assert torch.equal(layer.forward(inputs), expected)
    layers.pop(first_to_go).destroy()
    (left,) = layers
    assert torch.equal(left.forward(inputs), expected)
    left.destroy()
    left.destroy()
    with pytest.raises(MoEEpStateError, match="destroyed"):
        left.forward(inputs)
    assert torch.equal(mega.forward(inputs), expected)


def requested_bytes() -> int:
    """What tensors asked for; `memory_allocated` counts the allocator's larger blocks."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_memory_is_what_it_says_and_all_of_it_is_given_back():
    """A capacity of its own, so that no other layer shares the workspace."""
    weights_of()
    gc.collect()
    before = requested_bytes()
    layer = make_layer(MegaConfig(), capacity=CAPACITY + 1)
    told = sum(layer._backend.memory.values())
    # The heap rounds the workspace up to 1 KiB; addresses and stamps are not worth a word.
    assert 0 <= requested_bytes() - before - told < 16 * 1024
    layer.destroy()
    assert requested_bytes() == before


def test_memory_of_a_layer_that_was_called_is_given_back_without_a_collection_of_garbage():
    inputs = on_gpu(FEW)
    layer = make_layer(MegaConfig(), capacity=FEW)
    layer.forward(inputs)  # what stays with the process is there
    layer.destroy()
    gc.collect()
    gc.disable()
    try:
        before = requested_bytes()
        for _ in range(2):
            layer = make_layer(MegaConfig(), capacity=FEW)
            layer.forward(inputs)
            torch.cuda.synchronize()
            layer.destroy()
            assert requested_bytes() == before
    finally:
        gc.enable()

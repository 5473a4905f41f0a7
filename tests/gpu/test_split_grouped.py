"""The layer over the grouped GEMM kernel on a GPU: right against FP64 and the specification, the
same bits for any batch, and nothing waited for or allocated.

One H200: pytest -n 8 tests/gpu/test_split_grouped.py. Some 80 kernels are compiled on the way.
"""

import functools
import gc
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import Case, make_inputs, make_weights, with_ids

from moe_ep import MoEEpLayer, MoEInputs, MoEShape, MoEWeights, SplitConfig
from moe_ep.comm.errors import MoEEpConfigError, MoEEpStateError
from moe_ep.comm.transport import LocalTransport
from moe_ep.config import GroupedGemmConfig
from moe_ep.grouped import GroupedExperts
from moe_ep.grouped_limits import MAX_TOP_K
from moe_ep.grouped_memory import prepared_bytes, workspace_bytes, workspace_regions
from moe_ep.launch import cli, spawn
from moe_ep.megakernel.knobs import KNOB_TABLE, KernelKnobs, choose_row
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS, WEIGHT_FORMATS
from moe_ep.reference import (
    moe_oracle_fp64,
    moe_reference,
    moe_reference_tp,
    terms_oracle_fp64,
)
from moe_ep.split import SplitBackend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = MoEShape(num_experts=13, top_k=4, hidden=2048, intermediate=256)
CAPACITY = 520
NUM_TOKENS = 512  # times 2048: a million outputs
# Contract rule 6: a term within this of FP64 (relative L2); the output's own rounding adds 0.0017.
MAX_TERM_ERROR = 0.0026
MAX_OUTPUT_ERROR = 0.0026 + 0.0017
NAN = float("nan")


def on_gpu(inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.cuda() for tensor in vars(inputs).values()))


def on_cpu(inputs: MoEInputs) -> MoEInputs:
    return MoEInputs(*(tensor.cpu() for tensor in vars(inputs).values()))


@functools.cache
def weights_of(name: str, shape: MoEShape = SHAPE, has_bias: bool = False, seed: int = 0):
    """All experts, on the CPU."""
    weights = make_weights(shape, name, seed)
    if has_bias:
        gen = torch.Generator().manual_seed(seed + 50)
        b13 = torch.randn(shape.num_experts, shape.fc1_rows, generator=gen)
        b2 = torch.randn(shape.num_experts, shape.hidden, generator=gen).bfloat16()
        weights = replace(weights, b13=b13, b2=b2)
    return weights


def make_layer(
    weights: MoEWeights | None = None,
    shape: MoEShape = SHAPE,
    *,
    name: str = "nvfp4",
    knobs: KernelKnobs | None = None,
    capacity: int = CAPACITY,
) -> MoEEpLayer:
    weights = weights_of(name, shape) if weights is None else weights
    backend = SplitConfig(kernel=GroupedGemmConfig(knobs=knobs))
    return MoEEpLayer(shape, weights.to("cuda"), max_tokens_per_rank=capacity, backend=backend)


@functools.cache
def shared_layer() -> MoEEpLayer:
    layer = make_layer()
    layer.warmup()
    return layer


def tokens(count: int, seed: int, shape: MoEShape = SHAPE, masked: float = 0.1) -> MoEInputs:
    return on_gpu(make_inputs(shape, count, seed, masked))


def part_of(inputs: MoEInputs, rows: slice | torch.Tensor) -> MoEInputs:
    return MoEInputs(*(tensor[rows].contiguous() for tensor in vars(inputs).values()))


def run(layer: MoEEpLayer, inputs: MoEInputs) -> torch.Tensor:
    """The output, written over NaN, with no error left behind."""
    out = torch.full_like(inputs.hidden_states, NAN)
    assert layer(inputs, out=out) is out
    layer.check()
    return out


def error_of(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double().cpu() - exact).norm() / exact.norm())


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert not expected.isnan().any()
    differs = actual.view(torch.int16) != expected.view(torch.int16)
    assert not differs.any(), f"{int(differs.sum())} of {differs.numel()} differ"


def assert_right(output: torch.Tensor, inputs: MoEInputs, weights: MoEWeights, shape) -> None:
    """Within the contract of FP64, and of the specification, which is that near to FP64 too."""
    exact = moe_oracle_fp64(on_cpu(inputs), weights, shape)
    assert error_of(output, exact) <= MAX_OUTPUT_ERROR
    specified = moe_reference(on_cpu(inputs), weights, shape)
    assert error_of(output, specified.double()) <= 2 * MAX_OUTPUT_ERROR


# ---- values --------------------------------------------------------------------------------------


def assert_terms_right(layer: MoEEpLayer, weights: MoEWeights, shape: MoEShape) -> None:
    """With one slot of weight 1 the output is the term itself."""
    inputs = tokens(150, seed=2, shape=shape, masked=0.0)
    inputs = MoEInputs(
        4 * inputs.hidden_states, inputs.topk_ids, torch.ones_like(inputs.topk_weights)
    )
    exact = terms_oracle_fp64(on_cpu(inputs), weights, shape)[:, 0]
    error = error_of(run(layer, inputs), exact)
    plain = error_of(moe_reference(on_cpu(inputs), weights, shape), exact)
    assert error <= min(MAX_TERM_ERROR, 2 * plain)


ONE_SLOT = replace(SHAPE, top_k=1, hidden=512)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_terms_of_every_format(name):
    weights = weights_of(name, ONE_SLOT)
    layer = make_layer(weights, ONE_SLOT, knobs=choose_row(name, 1).knobs)
    assert_terms_right(layer, weights, ONE_SLOT)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", NAMED_ACTIVATIONS)
def test_terms_of_every_activation_with_and_without_bias(kind, has_bias):
    """One build of the GEMMs each. Tokens four times as large reach the clamps."""
    shape = replace(ONE_SLOT, activation=kind)
    weights = weights_of("nvfp4", shape, has_bias)
    layer = make_layer(weights, shape, knobs=choose_row("nvfp4", 1).knobs)
    assert_terms_right(layer, weights, shape)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_output_of_every_format(name):
    inputs = tokens(100, seed=1)
    layer = make_layer(name=name)
    assert_right(run(layer, inputs), inputs, weights_of(name), SHAPE)


SMALL = replace(SHAPE, hidden=512)
CASES = [
    Case("one token", (1,), shape=SMALL),
    Case("odd count", (37,), shape=SMALL),
    Case("full capacity", (CAPACITY,), shape=SMALL),
    Case("masked slots", (60,), ids="masked", shape=SMALL),
    Case("all tokens to one expert", (300,), ids="one expert", shape=SMALL),
    Case("expert repeated in a token", (40,), ids="one token", shape=SMALL),
    Case("experts without a token", (40,), ids="first half", shape=SMALL),
    Case("top_k = num_experts", (9,), shape=replace(SMALL, num_experts=5, top_k=5)),
    Case("most slots", (9,), shape=replace(SMALL, num_experts=40, top_k=MAX_TOP_K)),
    Case("one expert", (9,), shape=replace(SMALL, num_experts=1, top_k=1)),
    Case("padded shape", (30,), shape=replace(SMALL, hidden=288, intermediate=160)),
    Case("smallest shape", (30,), shape=replace(SMALL, hidden=16, intermediate=16)),
    Case("not gated", (30,), shape=replace(SMALL, activation="relu2")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_of_every_routing(case):
    inputs, weights = on_gpu(case.inputs(0)), weights_of("nvfp4", case.shape)
    layer = make_layer(weights, case.shape, knobs=choose_row("nvfp4", 1).knobs)
    assert_right(run(layer, inputs), inputs, weights, case.shape)


def test_no_tokens_and_no_routed_slot():
    layer = shared_layer()
    assert run(layer, tokens(0, seed=3)).shape == (0, SHAPE.hidden)
    output = run(layer, with_ids(tokens(20, seed=3), -1))
    assert_same_bits(output, torch.zeros_like(output))


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_tp_part_of_one_rank(num_tokens):
    """FP32 terms; a token's bits do not depend on the batch here either."""
    weights = weights_of("nvfp4", SMALL).shard("tp", 0, 1)
    layer, inputs = make_layer(weights, SMALL), tokens(40, seed=4, shape=SMALL)
    output = run(layer, inputs)
    expected = moe_reference_tp(on_cpu(inputs), [weights], SMALL)
    exact = moe_oracle_fp64(on_cpu(inputs), weights, SMALL)
    assert error_of(output, exact) <= 2 * error_of(expected, exact)
    assert_same_bits(run(layer, part_of(inputs, slice(num_tokens))), output[:num_tokens])


# ---- the same bits -------------------------------------------------------------------------------


@functools.cache
def batch() -> tuple[MoEInputs, torch.Tensor]:
    """A million outputs of NVFP4 weights."""
    inputs = tokens(NUM_TOKENS, seed=5)
    return inputs, run(shared_layer(), inputs)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_tokens_alone_have_the_bits_of_the_batch(name):
    layer, inputs = make_layer(name=name), tokens(NUM_TOKENS, seed=5)
    expected = run(layer, inputs)
    alone = [run(layer, part_of(inputs, slice(i, i + 1))) for i in range(NUM_TOKENS)]
    assert_same_bits(torch.cat(alone), expected)


def test_batches_of_any_size_have_the_same_bits():
    inputs, expected = batch()
    sizes = [1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 65, 120, 137]
    assert sum(sizes) == NUM_TOKENS
    parts = torch.arange(NUM_TOKENS, device="cuda").split(sizes)
    outputs = [run(shared_layer(), part_of(inputs, rows)) for rows in parts]
    assert_same_bits(torch.cat(outputs), expected)


def test_any_order_of_the_tokens_has_the_same_bits():
    inputs, expected = batch()
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(6)).cuda()
    assert_same_bits(run(shared_layer(), part_of(inputs, order)), expected[order])


@pytest.mark.parametrize(
    "row", [row for row in KNOB_TABLE if "nvfp4" in row.formats], ids=lambda row: str(row.max_rows)
)
def test_every_build_of_the_gemms_has_the_same_bits(row):
    inputs, expected = batch()
    assert_same_bits(run(make_layer(knobs=row.knobs), inputs), expected)


def test_kinds_of_tensors_have_the_same_bits():
    inputs, expected = batch()
    x, ids, weights = vars(inputs).values()
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    wide = torch.zeros(NUM_TOKENS, 2 * SHAPE.hidden, dtype=x.dtype, device="cuda")
    given = {
        "int64 ids": MoEInputs(x, ids.long(), weights),
        "misaligned rows": MoEInputs(shifted, ids, weights),
        "strides": MoEInputs(
            x.t().contiguous().t(), ids.repeat(1, 2)[:, : SHAPE.top_k], weights.t().contiguous().t()
        ),
    }
    for name, changed in given.items():
        out = wide.zero_()[:, ::2]
        shared_layer()(changed, out=out)
        assert torch.equal(out, expected), name
        assert not wide[:, 1::2].any(), name
    out = x.clone()
    shared_layer()(MoEInputs(out, ids, weights), out=out)
    assert_same_bits(out, expected)


def test_the_way_of_several_ranks_has_the_bits_of_one():
    """`SplitBackend`, which several ranks run, on the same prepared experts."""
    inputs, expected = batch()
    weights = weights_of("nvfp4").to("cuda")
    experts = GroupedExperts(SHAPE, weights, None)
    backend = SplitBackend(weights, LocalTransport("ep"), experts)
    assert_same_bits(backend.forward(inputs, NUM_TOKENS), expected)


def forward_part(rank: int, num_ranks: int) -> torch.Tensor:
    weights = weights_of("nvfp4").shard("ep", rank, num_ranks)
    layer = make_layer(weights)
    layer.warmup()
    inputs = tokens(NUM_TOKENS, seed=5)
    bounds = [0, 300, 512] if num_ranks == 2 else [0, 1, 200, 200, 512]
    return layer(part_of(inputs, slice(bounds[rank], bounds[rank + 1]))).cpu()


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)])
def test_several_ranks_have_the_bits_of_one(num_ranks):
    outputs = spawn.run(forward_part, num_ranks, device="cuda", timeout_s=250)
    assert_same_bits(torch.cat(outputs), batch()[1].cpu())


# ---- no host sync, no allocation, graphs, streams ------------------------------------------------


def test_a_call_waits_for_nothing_and_allocates_nothing():
    layer, inputs = shared_layer(), batch()[0]
    parts = [part_of(inputs, slice(n)) for n in (1, 8, 33, 100, 400, NUM_TOKENS)]
    outs = [torch.empty_like(part.hidden_states) for part in parts]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            for part, out in zip(parts, outs, strict=True):
                layer(part, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_same_bits(outs[-1], batch()[1])


class Captured:
    """A graph of one call over `count` tokens; `replay` puts other tokens into it, masked rows
    behind them."""

    def __init__(self, layer: MoEEpLayer, count: int) -> None:
        static = with_ids(tokens(count, seed=7), -1)
        self.static = MoEInputs(*(tensor.clone() for tensor in vars(static).values()))
        self.out = torch.full_like(static.hidden_states, NAN)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            layer(self.static, out=self.out)

    def replay(self, inputs: MoEInputs) -> torch.Tensor:
        count = inputs.num_tokens
        for name, tensor in vars(inputs).items():
            getattr(self.static, name)[:count] = tensor
        self.static.topk_ids[count:] = -1
        self.out.fill_(NAN)
        self.graph.replay()
        return self.out


@pytest.mark.parametrize("capacity", [16, 128, NUM_TOKENS])
def test_a_graph_follows_other_routing_and_fewer_tokens(capacity):
    captured = Captured(shared_layer(), capacity)
    for seed, count in ((8, capacity), (9, 5), (10, 0), (11, capacity - 1), (12, 1)):
        inputs = tokens(count, seed)
        expected = run(shared_layer(), inputs)
        output = captured.replay(inputs)
        assert_same_bits(output[:count], expected)
        assert_same_bits(output[count:], torch.zeros_like(output[count:]))


def test_ten_thousand_replays_have_the_same_bits():
    inputs = tokens(64, seed=13)
    captured = Captured(shared_layer(), 64)
    expected = captured.replay(inputs).clone()
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(10_000):
        captured.graph.replay()
        differs |= captured.out.ne(expected).any()
    assert not differs
    assert_same_bits(expected, run(shared_layer(), inputs))


def test_a_capture_before_warmup_says_so_and_leaves_the_layer_usable():
    layer, inputs = make_layer(), tokens(20, seed=14)
    with pytest.raises(MoEEpStateError, match="warm up first"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(inputs)
    assert_same_bits(run(layer, inputs), run(shared_layer(), inputs))


def test_several_ranks_refuse_a_capture():
    weights = weights_of("nvfp4", SMALL).shard("tp", 0, 1)
    layer = make_layer(weights, SMALL)
    inputs = tokens(5, seed=14, shape=SMALL)
    expected = run(layer, inputs)
    with pytest.raises(MoEEpStateError, match="cannot capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(inputs)
    assert_same_bits(run(layer, inputs), expected)


def test_other_streams_give_the_same_bits_beside_a_busy_one():
    inputs, expected = batch()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            a = (a @ a) * 1e-3
    outs = []
    for stream in (other, torch.cuda.default_stream(), other, busy):
        with torch.cuda.stream(stream):
            outs.append(shared_layer()(inputs))
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bits(out, expected)


def test_layers_that_share_a_workspace_take_turns_on_one_stream_and_on_two():
    layers = [shared_layer(), make_layer(weights_of("nvfp4", seed=1))]
    assert layers[0]._backend._workspace is layers[1]._backend._workspace
    inputs = tokens(200, seed=15)
    expected = [run(layer, inputs) for layer in layers]
    assert not torch.equal(*expected)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outs = []
    torch.cuda.synchronize()
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 2] if turn < 50 else streams[0]):
            outs.append(layers[turn % 2](inputs))
    torch.cuda.synchronize()
    for turn, out in enumerate(outs):
        assert_same_bits(out, expected[turn % 2])


def test_two_layers_in_one_graph():
    layers = [shared_layer(), make_layer(weights_of("nvfp4", seed=1))]
    layers[1].warmup()
    inputs = tokens(30, seed=16)
    x = inputs.hidden_states.clone()
    static = MoEInputs(x, inputs.topk_ids, inputs.topk_weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = layers[0](static)
        last = layers[1](MoEInputs(middle, inputs.topk_ids, inputs.topk_weights))
    for seed in (17, 18):
        inputs = replace(inputs, hidden_states=tokens(30, seed).hidden_states)
        x.copy_(inputs.hidden_states)
        graph.replay()
        expected = run(layers[0], inputs)
        assert_same_bits(middle, expected)
        assert_same_bits(last, run(layers[1], replace(inputs, hidden_states=expected)))


# ---- errors, weights, memory ---------------------------------------------------------------------


def test_a_bad_id_masks_its_slot_and_is_raised_by_the_next_call():
    layer, inputs = shared_layer(), tokens(50, seed=19)
    ids = inputs.topk_ids.clone()
    ids[30, 2] = SHAPE.num_experts
    output = layer(with_ids(inputs, ids))
    torch.cuda.synchronize()
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[30, 2\].*below num_experts 13"):
        layer(inputs)
    ids[30, 2] = -1
    assert_same_bits(run(layer, with_ids(inputs, ids)), output)


def test_a_bad_id_in_a_replay_is_raised_by_check_and_not_in_a_capture():
    layer, inputs = shared_layer(), tokens(16, seed=20)
    captured = Captured(layer, 16)
    captured.replay(with_ids(inputs, 2**31 - 1))
    torch.cuda.synchronize()
    Captured(layer, 16)
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[0, 0\]"):
        layer.check()
    assert_same_bits(captured.replay(inputs), run(layer, inputs))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_new_weights_show_in_a_graph_captured_before(name):
    knobs = choose_row(name, 1).knobs
    layer = make_layer(weights_of(name, SMALL), SMALL, knobs=knobs)
    layer.warmup()
    inputs = tokens(40, seed=21, shape=SMALL)
    out = torch.empty_like(inputs.hidden_states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(inputs, out=out)
    new = weights_of(name, SMALL, seed=1)
    layer.update_weights(new.to("cuda"))
    graph.replay()
    assert_same_bits(out, run(make_layer(new, SMALL, knobs=knobs), inputs))


def requested_bytes() -> int:
    """What tensors asked for. `memory_allocated` counts blocks, and one above 1 MiB may be up to
    1 MiB longer than its tensor: the allocator does not cut off less."""
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_memory_is_what_was_counted_and_the_weights_given_are_let_go():
    shape = replace(SHAPE, num_experts=40, hidden=1024, intermediate=512)
    weights = make_weights(shape, "mxfp8").to("cuda")
    regions = workspace_regions(shape, shape.num_experts, CAPACITY)
    counted = prepared_bytes(shape, "mxfp8", shape.num_experts) + workspace_bytes(regions)
    before = requested_bytes() - weights.num_bytes
    layer = make_layer(weights, shape)
    del weights
    counters = layer._backend._experts._gemm._counters
    assert requested_bytes() - before == counted + counters.nbytes
    assert sum(layer._backend.memory.values()) == counted
    del counters
    layer.destroy()
    assert requested_bytes() == before


def test_bench_measures_the_layer_in_a_graph(tmp_path):
    words = ["--geometry", "tiny", "--tokens", "1", "33", "--weights-format", "nvfp4"]
    words += ["--backend", "split", "--graph", "--json", str(tmp_path / "bench.json")]
    assert cli.main(["bench", *words]) == 0

"""The fused layer: right against FP64, and the same bits however ranks, batches and builds differ.

One H200: pytest -n 8 tests/gpu/test_mega.py. Several ranks are virtual, in one launch. Some 50
kernels are compiled on the way, which several workers share.
"""

import functools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from test_grouped_gemm import random_weights

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.formats import TILE_FORMATS, prepare
from moe_ep.megakernel.grouped_gemm import GroupedGemm
from moe_ep.megakernel.knobs import KNOB_TABLE
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS, MoEShape
from moe_ep.reference import combine_terms, terms_oracle_fp64

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = MoEShape(num_experts=13, top_k=4, hidden=512, intermediate=256)
# Ten K slabs: no ring has more stages.
LONG = replace(SHAPE, hidden=1280)
CAPACITY = 61
RANKS = [1, 2, 4, 8]
# Contract: a term within this of FP64 (relative L2).
MAX_TERM_ERROR = 0.0026


@functools.cache
def weights_of(name: str, shape: MoEShape = SHAPE, has_bias: bool = False):
    """(checkpoint's, prepared) weights of all experts."""
    weights = random_weights(
        name,
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        is_gated=shape.activation.is_gated,
        has_bias=has_bias,
    )
    if name == "nvfp4":
        # Pre-activations of up to about 20 reach the clamps and both ends of the sigmoid.
        scales = {"up_scale": weights.up_scale / 2}
        if shape.activation.is_gated:
            scales["gate_scale"] = weights.gate_scale / 4
        weights = replace(weights, **scales)
    return weights, prepare(weights)


@functools.cache
def tokens(count: int, seed: int, shape: MoEShape = SHAPE, masked: float = 0.1) -> MoEInputs:
    """On the GPU; repeated experts and masked slots included."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, shape.num_experts, (count, shape.top_k), generator=gen)
    ids[torch.rand(ids.shape, generator=gen) < masked] = -1
    return MoEInputs(
        torch.randn(count, shape.hidden, generator=gen).bfloat16().cuda(),
        ids.int().cuda(),
        torch.rand(ids.shape, generator=gen).cuda(),
    )


class Layer:
    """The fused layer of `num_ranks` virtual ranks (one: plain)."""

    def __init__(
        self,
        num_ranks: int = 1,
        name: str = "nvfp4",
        *,
        shape: MoEShape = SHAPE,
        has_bias: bool = False,
        capacity: int = CAPACITY,
        timeout_s: float = 5.0,
        **options,
    ) -> None:
        self.num_ranks, self.shape, self.capacity = num_ranks, shape, capacity
        self.weights, self.prepared = weights_of(name, shape, has_bias)
        group = EpGroup.single("cuda") if num_ranks == 1 else EpGroup.virtual(num_ranks)
        self.mega = MegaMoE(
            group,
            shape,
            name,
            max_tokens_per_rank=capacity,
            has_bias13=has_bias,
            has_bias2=has_bias,
            timeout_s=timeout_s,
            **options,
        )

    def run(self, inputs: MoEInputs, **options) -> torch.Tensor:
        """One rank: its output. Several: tokens dealt out as evenly as possible, rank by rank."""
        if self.num_ranks == 1:
            out = torch.full_like(inputs.hidden_states, float("nan"))
            self.launch(inputs, out, **options)
        else:
            out = self.run_parts(deal(inputs, self.num_ranks), **options)
        self.mega.check()
        return out

    def launch(self, inputs: MoEInputs, out: torch.Tensor, **options) -> None:
        self.mega.forward(
            inputs.hidden_states, inputs.topk_ids, inputs.topk_weights, self.prepared, out,
            **options,
        )  # fmt: skip

    def run_parts(self, parts: list[MoEInputs], **options) -> torch.Tensor:
        """Each rank's tokens, however many; the outputs in rank order."""
        counts = [part.num_tokens for part in parts]
        stacked = MoEInputs(
            *(
                torch.stack([padded(getattr(part, name), self.capacity) for part in parts])
                for name in ("hidden_states", "topk_ids", "topk_weights")
            )
        )
        out = torch.full_like(stacked.hidden_states, float("nan"))
        num_tokens = torch.tensor(counts, dtype=torch.int32, device="cuda")
        self.launch(stacked, out, num_tokens=num_tokens, **options)
        for rank, count in enumerate(counts):
            assert out[rank, count:].isnan().all(), f"rank {rank} wrote past its tokens"
        return torch.cat([out[rank, :count] for rank, count in enumerate(counts)])

    def terms(self, count: int) -> torch.Tensor:
        """BF16 [count, K, H] of the one rank's last call."""
        return self.mega.memory.region("terms")[0, :count]


@functools.cache
def shared_layer(num_ranks: int = 1) -> Layer:
    return Layer(num_ranks)


def padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of junk behind the tokens, which nobody may read."""
    junk = 1 << 30 if tensor.dtype == torch.int32 else float("nan")
    return torch.cat([tensor, tensor.new_full((length - len(tensor), tensor.shape[1]), junk)])


def part_of(inputs: MoEInputs, part: slice) -> MoEInputs:
    return MoEInputs(
        inputs.hidden_states[part].contiguous(),
        inputs.topk_ids[part].contiguous(),
        inputs.topk_weights[part].contiguous(),
    )


def deal(inputs: MoEInputs, num_ranks: int) -> list[MoEInputs]:
    bounds = [inputs.num_tokens * r // num_ranks for r in range(num_ranks + 1)]
    return [part_of(inputs, slice(bounds[r], bounds[r + 1])) for r in range(num_ranks)]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert not expected.isnan().any()
    differs = actual.view(torch.int16) != expected.view(torch.int16)
    assert not differs.any(), (
        f"{int(differs.sum())} of {differs.numel()} differ, first {differs.nonzero()[0].tolist()}"
    )


def assert_correct(layer: Layer, inputs: MoEInputs) -> None:
    """Terms within the contract of FP64; the output their sum in slot order, bit for bit."""
    out = layer.run(inputs)
    on_cpu = MoEInputs(*(t.cpu() for t in vars(inputs).values()))
    exact = terms_oracle_fp64(on_cpu, layer.weights.to("cpu"), layer.shape)
    terms = layer.terms(inputs.num_tokens).cpu()
    is_used = on_cpu.topk_ids >= 0
    error = (terms.double() - exact)[is_used].norm() / exact[is_used].norm()
    assert error < MAX_TERM_ERROR
    expected = combine_terms(terms, on_cpu.topk_ids, on_cpu.topk_weights)
    assert_same_bits(out.cpu(), expected)


def with_ids(inputs: MoEInputs, ids: torch.Tensor) -> MoEInputs:
    return MoEInputs(inputs.hidden_states, ids.int().contiguous(), inputs.topk_weights)


ROUTINGS = {
    "random": lambda ids: ids,
    "one expert": lambda ids: torch.full_like(ids, 5),
    "all masked": lambda ids: torch.full_like(ids, -1),
    "mostly masked": lambda ids: torch.where(ids % 5 == 0, ids, -1),
    "a token repeats its expert": lambda ids: ids[:, :1].clamp(min=0).expand_as(ids),
    "few experts": lambda ids: torch.where(ids >= 0, ids // 6 * 6, ids),
    "last experts": lambda ids: torch.where(ids >= 0, 11 + ids % 2, ids),
}


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TILE_FORMATS)
def test_every_format_is_right(name):
    assert_correct(Layer(name=name), tokens(CAPACITY, 1))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", NAMED_ACTIVATIONS)
def test_every_activation_is_right_with_and_without_bias(kind, has_bias):
    shape = replace(SHAPE, activation=kind)
    assert_correct(Layer(shape=shape, has_bias=has_bias), tokens(CAPACITY, 2))


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "all masked"])
def test_every_routing_is_right(routing):
    inputs = tokens(CAPACITY, 3)
    assert_correct(shared_layer(), with_ids(inputs, ROUTINGS[routing](inputs.topk_ids)))


@pytest.mark.parametrize("hidden, intermediate", [(288, 160), (1024, 704), (128, 128)])
def test_shapes_that_need_padding_are_right(hidden, intermediate):
    shape = replace(SHAPE, hidden=hidden, intermediate=intermediate)
    assert_correct(Layer(shape=shape), tokens(CAPACITY, 4, shape))


def test_terms_have_the_bits_of_the_grouped_gemms():
    layer, inputs = shared_layer(), tokens(CAPACITY, 5, masked=0.0)
    layer.run(inputs)
    slots = torch.argsort(inputs.topk_ids.flatten(), stable=True)
    counts = torch.bincount(inputs.topk_ids.flatten(), minlength=SHAPE.num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    gemm = GroupedGemm(
        "nvfp4",
        hidden=SHAPE.hidden,
        intermediate=SHAPE.intermediate,
        activation=SHAPE.activation,
        num_local_experts=SHAPE.num_experts,
    )
    rows = inputs.hidden_states[slots // SHAPE.top_k].contiguous()
    hidden = rows.new_empty(len(rows), SHAPE.intermediate)
    terms = torch.empty_like(rows)
    gemm.fc1(rows, offsets, layer.prepared, hidden)
    gemm.fc2(hidden, offsets, layer.prepared, terms)
    assert_same_bits(layer.terms(CAPACITY).flatten(0, 1)[slots], terms)


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", RANKS[1:])
def test_bits_do_not_depend_on_the_number_of_ranks(num_ranks, routing):
    inputs = tokens(CAPACITY, 6)
    inputs = with_ids(inputs, ROUTINGS[routing](inputs.topk_ids))
    assert_same_bits(shared_layer(num_ranks).run(inputs), shared_layer().run(inputs))


@pytest.mark.parametrize("counts", [(0, 61), (61, 0), (1, 60), (0, 0), (1, 1)], ids=str)
def test_bits_do_not_depend_on_how_tokens_are_dealt_out(counts):
    inputs = part_of(tokens(CAPACITY, 7), slice(0, sum(counts)))
    parts = [part_of(inputs, slice(0, counts[0])), part_of(inputs, slice(counts[0], sum(counts)))]
    layer = shared_layer(2)
    assert_same_bits(layer.run_parts(parts), shared_layer().run(inputs))
    layer.mega.check()


def test_a_token_alone_has_the_bits_it_has_in_a_batch():
    inputs = tokens(CAPACITY, 8)
    expected = shared_layer().run(inputs)
    for token in (0, 1, 30, CAPACITY - 1):
        alone = part_of(inputs, slice(token, token + 1))
        assert_same_bits(shared_layer().run(alone), expected[token : token + 1])


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 33])
def test_any_number_of_tokens_has_the_bits_it_has_in_a_batch(count):
    inputs = tokens(CAPACITY, 8)
    expected = shared_layer().run(inputs)
    part = part_of(inputs, slice(0, count))
    assert_same_bits(shared_layer().run(part), expected[:count])


@pytest.mark.parametrize("max_sms", [None, 16, 7])
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "all masked"])
def test_few_tokens_straight_into_the_ring_have_the_bits_they_have_in_a_batch(routing, max_sms):
    """Up to 32 of one rank are, those of a CTA's first item, where its share is at most two; 61
    all go by way of the pool."""
    inputs = tokens(CAPACITY, 9, LONG)
    inputs = with_ids(inputs, ROUTINGS[routing](inputs.topk_ids))
    layer = Layer(shape=LONG, max_sms=max_sms)
    assert_correct(layer, inputs)
    expected = layer.run(inputs)
    for count in (1, 2, 8, 31, 32, 33):
        assert_same_bits(layer.run(part_of(inputs, slice(0, count))), expected[:count])


@pytest.mark.parametrize("row", KNOB_TABLE, ids=lambda row: f"{row.formats[0]}-{row.max_rows}")
def test_every_knob_row_gives_the_same_bits(row):
    name, inputs = row.formats[0], tokens(CAPACITY, 9)
    few = with_ids(inputs, ROUTINGS["few experts"](inputs.topk_ids))
    default, layer = Layer(name=name), Layer(name=name, knobs=row.knobs)
    for case in (inputs, few):
        assert_same_bits(layer.run(case), default.run(case))


@pytest.mark.parametrize("max_sms", [1, 7, 64])
def test_fewer_sms_give_the_same_bits(max_sms):
    inputs = tokens(CAPACITY, 10)
    assert_same_bits(Layer(max_sms=max_sms).run(inputs), shared_layer().run(inputs))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_buckets_of_one_capacity_give_the_same_bits_in_turn(num_ranks):
    """One rank alone takes the bucket of its tokens; several that of their bound."""
    layer = Layer(num_ranks, capacity=400)
    assert len(layer.mega.buckets) > 2
    inputs = tokens(400, 11)
    expected = layer.run(inputs)
    for bucket in layer.mega.buckets:
        part = part_of(inputs, slice(0, bucket.max_tokens))
        out = layer.run(part, max_tokens=bucket.max_tokens)
        assert_same_bits(out, expected[: bucket.max_tokens])


def test_ids_of_64_bits_give_the_same_bits():
    inputs = tokens(CAPACITY, 12)
    wide = MoEInputs(inputs.hidden_states, inputs.topk_ids.long(), inputs.topk_weights)
    assert_same_bits(shared_layer().run(wide), shared_layer().run(inputs))


def test_waits_without_an_end_give_the_same_bits():
    inputs = tokens(CAPACITY, 13)
    for num_ranks in (1, 4):
        layer = Layer(num_ranks, is_bounded=False)
        assert_same_bits(layer.run(inputs), shared_layer().run(inputs))


@pytest.mark.parametrize("late_rank", [0, 3])
def test_bits_hold_when_a_rank_comes_late(late_rank):
    inputs = tokens(CAPACITY, 14)
    out = shared_layer(4).run(inputs, late_rank=late_rank, late_s=2e-3)
    assert_same_bits(out, shared_layer().run(inputs))


def test_bits_hold_beside_a_busy_stream_and_on_another_one():
    inputs = tokens(CAPACITY, 15)
    expected = shared_layer().run(inputs)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            a = (a @ a) * 1e-3
    for stream in (other, torch.cuda.default_stream(), other):
        with torch.cuda.stream(stream):
            out = shared_layer(2).run(inputs)
        stream.synchronize()
        assert_same_bits(out, expected)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_graph_follows_other_routing_and_fewer_tokens(num_ranks):
    """Padding rows are masked by negative ids."""
    layer = shared_layer(num_ranks)
    count = CAPACITY if num_ranks == 1 else CAPACITY * num_ranks
    static = tokens(count, 16)
    static = MoEInputs(*(t.clone() for t in vars(static).values()))
    if num_ranks > 1:
        static = MoEInputs(*(t.unflatten(0, (num_ranks, -1)) for t in vars(static).values()))
    out = torch.zeros_like(static.hidden_states)
    options = {}
    if num_ranks > 1:
        full = torch.full((num_ranks,), CAPACITY, dtype=torch.int32, device="cuda")
        options = {"num_tokens": full}
    layer.launch(static, out, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(static, out, **options)
    eager = Layer(capacity=count)
    for seed, used in ((17, count), (18, 5), (19, 0), (20, count - 1)):
        inputs = tokens(count, seed)
        ids = inputs.topk_ids.clone()
        ids[used:] = -1
        static.hidden_states.view(count, -1).copy_(inputs.hidden_states)
        static.topk_ids.view(count, -1).copy_(ids)
        static.topk_weights.view(count, -1).copy_(inputs.topk_weights)
        for _ in range(10):
            out.fill_(float("nan"))
            graph.replay()
        expected = eager.run(with_ids(inputs, ids))
        assert_same_bits(out.view(count, -1), expected)
        assert not expected[used:].any()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_500_calls_back_to_back_with_changing_tokens_and_routing(num_ranks):
    layer, inputs = shared_layer(num_ranks), tokens(CAPACITY, 21)
    expected, outs = shared_layer().run(inputs), []
    for call in range(500):
        part = slice(call % 13, (7 * call) % (CAPACITY + 1))
        outs.append((part, layer.run(part_of(inputs, part))))
    torch.cuda.synchronize()
    layer.mega.check()
    for part, out in outs:
        assert_same_bits(out, expected[part])


def test_layers_of_one_geometry_share_a_workspace_in_turn():
    first, second = Layer(name="nvfp4"), Layer(name="mxfp4")
    assert first.mega.memory is second.mega.memory
    inputs = tokens(CAPACITY, 22)
    expected = [layer.run(inputs) for layer in (first, second)]
    for _ in range(20):
        for layer, wanted in zip((first, second), expected, strict=True):
            assert_same_bits(layer.run(inputs), wanted)


def test_weights_written_in_place_show_in_a_captured_graph():
    layer, inputs = Layer(), tokens(CAPACITY, 23)
    weights, _ = weights_of("nvfp4")
    other = replace(weights, up_scale=weights.up_scale * 2)
    layer.prepared = prepare(weights)
    out = layer.run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(inputs, out)
    prepare(other, out=layer.prepared)
    graph.replay()
    layer.prepared = prepare(other)
    assert_same_bits(out, layer.run(inputs))


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent_rank", [0, 3])
def test_a_rank_that_never_comes_is_named_and_the_gpu_is_usable_at_once(absent_rank):
    layer = Layer(4, capacity=CAPACITY + 1, timeout_s=0.2)
    inputs = tokens(CAPACITY, 24)
    layer.run(inputs)
    layer.run_parts(deal(inputs, 4), late_rank=absent_rank, late_s=-1.0)
    torch.cuda.synchronize()
    with pytest.raises(MoEEpTimeoutError, match=f"for rank {absent_rank}") as error:
        layer.mega.check()
    assert error.value.ranks == (absent_rank,)
    assert error.value.phase == "routed"
    layer.mega.destroy()
    assert_same_bits(shared_layer(4).run(inputs), shared_layer().run(inputs))


def test_a_refusing_rank_is_named_to_all_and_the_next_call_works():
    layer, inputs = Layer(4, capacity=CAPACITY + 2), tokens(CAPACITY, 26)
    stacked = deal(inputs, 4)
    x = torch.zeros(4, layer.capacity, SHAPE.hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(4, layer.capacity, SHAPE.top_k, dtype=torch.int32, device="cuda")
    out = torch.full_like(x, float("nan"))
    counts = torch.tensor([5, -3, 5, 5], dtype=torch.int32, device="cuda")
    layer.launch(MoEInputs(x, ids, ids.float()), out, num_tokens=counts)
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(MoEEpConfigError, match=r"rank 1 refused its input \(code 2\)"):
        layer.mega.check()
    assert_same_bits(layer.run_parts(stacked), shared_layer().run(inputs))


def test_an_id_that_is_no_expert_is_masked_and_named_later():
    layer, inputs = Layer(), tokens(CAPACITY, 25)
    ids = inputs.topk_ids.clone()
    ids[2, 3] = SHAPE.num_experts
    out = torch.empty_like(inputs.hidden_states)
    layer.launch(with_ids(inputs, ids), out)
    torch.cuda.synchronize()
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[2, 3\] was 13"):
        layer.mega.check()
    ids[2, 3] = -1
    assert_same_bits(layer.run(with_ids(inputs, ids)), out)

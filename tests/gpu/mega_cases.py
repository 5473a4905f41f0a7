"""Common cases of the fused layer: ranks in one launch, their tokens, what holds of any layer.

`expected` is a function MoEInputs -> BF16 [T, H]: the bits that the layer must give.
"""

import functools
from dataclasses import replace

import pytest
import torch
from test_grouped_gemm import random_weights

from moe_ep.comm.errors import MoEEpConfigError, MoEEpTimeoutError
from moe_ep.comm.group import EpGroup
from moe_ep.inputs import MoEInputs
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.mega_moe import MegaMoE
from moe_ep.megakernel.problem import MoEShape
from moe_ep.reference import combine_terms, terms_oracle_fp64

SHAPE = MoEShape(num_experts=13, top_k=4, hidden=512, intermediate=256)
# Ten K slabs: no ring has more stages.
LONG = replace(SHAPE, hidden=1280)
CAPACITY = 61
RANKS = [1, 2, 4, 8]
# Tokens of two ranks.
DEALS = [(0, 61), (61, 0), (1, 60), (0, 0), (1, 1)]
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


def assert_buckets_agree(layer: Layer) -> None:
    """Every build of the capacity gives its tokens the bits that the capacity's gives them."""
    assert len(layer.mega.buckets) > 2
    inputs = tokens(layer.capacity, 11)
    expected = layer.run(inputs)
    for bucket in layer.mega.buckets:
        part = part_of(inputs, slice(0, bucket.max_tokens))
        out = layer.run(part, max_tokens=bucket.max_tokens)
        assert_same_bits(out, expected[: bucket.max_tokens])


def assert_dealt_out(layer: Layer, counts: tuple[int, int], expected) -> None:
    """Two ranks with so many tokens: what `expected` makes of all of them."""
    inputs = part_of(tokens(CAPACITY, 7), slice(0, sum(counts)))
    parts = [part_of(inputs, slice(0, counts[0])), part_of(inputs, slice(counts[0], sum(counts)))]
    assert_same_bits(layer.run_parts(parts), expected(inputs))
    layer.mega.check()


def assert_graph_follows(layer: Layer, expected) -> None:
    """A launch of full ranks, captured and replayed with other routing and fewer tokens, whose
    padding rows are masked by negative ids: what `expected` makes of them."""
    num_ranks = layer.num_ranks
    count, options = CAPACITY * num_ranks, {}
    static = MoEInputs(*(t.clone() for t in vars(tokens(count, 16)).values()))
    if num_ranks > 1:
        static = MoEInputs(*(t.unflatten(0, (num_ranks, -1)) for t in vars(static).values()))
        full = torch.full((num_ranks,), CAPACITY, dtype=torch.int32, device="cuda")
        options = {"num_tokens": full}
    out = torch.zeros_like(static.hidden_states)
    layer.launch(static, out, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(static, out, **options)
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
        assert_same_bits(out.view(count, -1), expected(with_ids(inputs, ids)))
        assert not out.view(count, -1)[used:].any()


def assert_calls_in_a_row(layer: Layer, num_calls: int, expected) -> None:
    """Changing tokens and routing, nothing awaited in between."""
    inputs, outs = tokens(CAPACITY, 21), []
    wanted = expected(inputs)
    for call in range(num_calls):
        part = slice(call % 13, (7 * call) % (CAPACITY + 1))
        outs.append((part, layer.run(part_of(inputs, part))))
    torch.cuda.synchronize()
    layer.mega.check()
    for part, out in outs:
        assert_same_bits(out, wanted[part])


def assert_refusal_is_named(layer: Layer) -> None:
    """Of four ranks the second one's: nobody computes anything."""
    x = torch.zeros(4, layer.capacity, SHAPE.hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(4, layer.capacity, SHAPE.top_k, dtype=torch.int32, device="cuda")
    out = torch.full_like(x, float("nan"))
    counts = torch.tensor([5, -3, 5, 5], dtype=torch.int32, device="cuda")
    layer.launch(MoEInputs(x, ids, ids.float()), out, num_tokens=counts)
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(MoEEpConfigError, match=r"rank 1 refused its input \(code 2\)"):
        layer.mega.check()


def assert_absence_is_named(layer: Layer, absent_rank: int, inputs: MoEInputs) -> None:
    """Of one of four ranks."""
    layer.run_parts(deal(inputs, 4), late_rank=absent_rank, late_s=-1.0)
    torch.cuda.synchronize()
    with pytest.raises(MoEEpTimeoutError, match=f"for rank {absent_rank}") as error:
        layer.mega.check()
    assert error.value.ranks == (absent_rank,)
    assert error.value.phase == "routed"


def assert_bad_id_is_masked_and_named(layer: Layer, expected) -> None:
    inputs = tokens(CAPACITY, 25)
    ids = inputs.topk_ids.clone()
    ids[2, 3] = SHAPE.num_experts
    bad = with_ids(inputs, ids)
    if layer.num_ranks == 1:
        out = torch.full_like(inputs.hidden_states, float("nan"))
        layer.launch(bad, out)
    else:
        out = layer.run_parts(deal(bad, layer.num_ranks))
    torch.cuda.synchronize()
    with pytest.raises(MoEEpConfigError, match=r"topk_ids\[2, 3\] was 13"):
        layer.mega.check()
    ids[2, 3] = -1
    inputs = with_ids(inputs, ids)
    assert_same_bits(out, expected(inputs))
    assert_same_bits(layer.run(inputs), out)


ROUTINGS = {
    "random": lambda ids: ids,
    "one expert": lambda ids: torch.full_like(ids, 5),
    "all masked": lambda ids: torch.full_like(ids, -1),
    "mostly masked": lambda ids: torch.where(ids % 5 == 0, ids, -1),
    "a token repeats its expert": lambda ids: ids[:, :1].clamp(min=0).expand_as(ids),
    "few experts": lambda ids: torch.where(ids >= 0, ids // 6 * 6, ids),
    "last experts": lambda ids: torch.where(ids >= 0, 11 + ids % 2, ids),
}

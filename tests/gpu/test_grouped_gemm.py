"""The grouped GEMM kernel against FP64 on dequantised weights, and against itself bitwise.

One H200: pytest tests/gpu/test_grouped_gemm.py. Compiles some 40 kernels first (seconds on 16
cores).
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.grouped_gemm import GroupedGemm
from moe_ep.megakernel.knobs import KNOB_TABLE, MAX_SMEM_BYTES, KernelKnobs, choose_row
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS, Activation
from moe_ep.megakernel.tiles import TILE_FORMATS
from moe_ep.reference import activate
from moe_ep.weights import MoEWeights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Contract: each GEMM within this of FP64 on its own inputs (relative L2).
MAX_GEMM_ERROR = 0.0018
# An empty expert, one row, odd counts, several token tiles.
SKEWED = (37, 0, 1, 130, 8, 0, 300, 15)
POISON = float("nan")


def random_weights(
    name: str,
    hidden: int,
    intermediate: int,
    num_experts: int,
    *,
    is_gated: bool = True,
    has_bias: bool = False,
) -> MoEWeights:
    """Random codes, so that every code and every usual scale factor appears; |w| about 0.03."""
    generator = torch.Generator("cuda").manual_seed(1)
    halves = 2 if is_gated else 1

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device="cuda") + 0.5

    tensors = {}
    for key, rows, cols in (
        ("w13", halves * intermediate, hidden),
        ("w2", hidden, intermediate),
    ):
        if name == "bf16":
            w = torch.randn(num_experts, rows, cols, generator=generator, device="cuda") / 32
            tensors[key] = w.bfloat16()
        elif TILE_FORMATS[name].code_bits == 4:
            tensors[key] = integers(0, 256, num_experts, rows, cols // 2).to(torch.uint8)
        else:
            codes = integers(0, 0x7F, num_experts, rows, cols)
            codes += 128 * integers(0, 2, num_experts, rows, cols)
            tensors[key] = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        if name == "nvfp4":
            sf = integers(1, 0x60, num_experts, rows, cols // 16).to(torch.uint8)
            tensors[f"{key}_sf"] = sf.view(torch.float8_e4m3fn)
        elif name in ("mxfp4", "mxfp8"):
            middle = 120 if name == "mxfp4" else 113
            sf = integers(middle - 3, middle + 3, num_experts, rows, cols // 32)
            tensors[f"{key}_sf"] = sf.to(torch.uint8)
        elif name == "fp8_block":
            part = halves if key == "w13" else 1
            tensors[f"{key}_sf"] = (
                uniform(num_experts, part * math.ceil(rows / part / 128), math.ceil(cols / 128))
                / 4096
            )
    if name == "nvfp4":
        for key in ("gate_scale", "up_scale", "down_scale"):
            if is_gated or key != "gate_scale":
                tensors[key] = uniform(num_experts) / 64
    if has_bias:
        tensors["b13"] = uniform(num_experts, halves * intermediate)
        tensors["b2"] = uniform(num_experts, hidden).bfloat16()
    return MoEWeights(
        weights_format=name,
        num_experts=num_experts,
        expert_ids=tuple(range(num_experts)),
        hidden=hidden,
        intermediate=intermediate,
        is_gated=is_gated,
        **tensors,
    )


class Case:
    """Weights, prepared weights, rows and kernels of one problem."""

    def __init__(
        self,
        weights: MoEWeights,
        rows_per_expert=SKEWED,
        activation: Activation | None = None,
        knobs: KernelKnobs | None = None,
        prepared=None,
        **options,
    ) -> None:
        self.weights = weights
        self.activation = activation or Activation()
        self.prepared = prepare(weights) if prepared is None else prepared
        self.rows_per_expert = rows_per_expert
        self.num_rows = sum(rows_per_expert)
        bounds = list(itertools.accumulate(rows_per_expert, initial=0))
        self.parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        self.offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(2)
        shape = (self.num_rows + 5, weights.hidden)  # rows of nobody at the end
        self.x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        self.x[self.num_rows :] = POISON
        self.gemm = GroupedGemm(
            weights.weights_format,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            activation=self.activation,
            num_local_experts=weights.num_local_experts,
            has_bias13=weights.b13 is not None,
            has_bias2=weights.b2 is not None,
            knobs=knobs,
            **options,
        )
        self.hidden = self.empty(weights.intermediate)
        self.terms = self.empty(weights.hidden)

    def empty(self, width: int) -> torch.Tensor:
        shape = (self.num_rows + 5, width)
        return torch.full(shape, POISON, dtype=torch.bfloat16, device="cuda")

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.gemm.fc1(self.x, self.offsets, self.prepared, self.hidden)
        self.gemm.fc2(self.hidden, self.offsets, self.prepared, self.terms)
        return self.hidden[: self.num_rows].clone(), self.terms[: self.num_rows].clone()

    def exact(self, name: str, rows_in: torch.Tensor) -> torch.Tensor:
        """The GEMM in FP64 on its own BF16 input, FC1 with activation."""
        result = []
        for expert, part in enumerate(self.parts):
            w = self.weights.dequantize_expert(name, expert, torch.float64)
            sums = rows_in[part].double() @ w.T
            bias = getattr(self.weights, "b13" if name == "w13" else "b2")
            if bias is not None:
                sums += bias[expert].double()
            result.append(activate(sums, self.activation) if name == "w13" else sums)
        return torch.cat(result)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def assert_correct(case: Case) -> None:
    hidden, terms = case.run()
    assert relative_error(hidden, case.exact("w13", case.x)) < MAX_GEMM_ERROR
    assert relative_error(terms, case.exact("w2", hidden)) < MAX_GEMM_ERROR
    assert case.hidden[case.num_rows :].isnan().all(), "a row of nobody was written"
    assert case.terms[case.num_rows :].isnan().all(), "a row of nobody was written"


def single_width(width: int, num_warpgroups: int, slices: int) -> KernelKnobs:
    registers = {4: (32, 112), 2: (24, 240)}[num_warpgroups]
    return KernelKnobs(
        num_math_warpgroups=num_warpgroups,
        slices_per_item=slices,
        tile_widths=(width,),
        stages=2,
        producer_registers=registers[0],
        math_registers=registers[1],
    )


# (tile width, math warpgroups, slices): every WGMMA N that a knob row may use, and more.
SINGLE_WIDTHS = [
    *((width, 4, 2) for width in (8, 16, 32)),
    *((width, 4, 1) for width in (8, 48, 64)),
    *((width, 2, 2) for width in (16, 64, 96, 128)),
    *((width, 2, 1) for width in (8, 160, 192, 224, 256)),
]


@pytest.mark.parametrize("name", ["nvfp4", "bf16"])
def test_row_bits_do_not_depend_on_tile_width_nor_warpgroups(name):
    """Contract rule 4 rests on it: WGMMA sums a row's products in one order for every N."""
    weights = random_weights(name, 2048, 1024, len(SKEWED))
    first = Case(weights, knobs=single_width(*SINGLE_WIDTHS[3]))
    expected = first.run()
    assert expected[0].numel() + expected[1].numel() > 1_000_000
    different = []
    for choice in SINGLE_WIDTHS:
        knobs = single_width(*choice)
        if knobs.smem_bytes(name, len(SKEWED)) > MAX_SMEM_BYTES:
            continue
        actual = Case(weights, knobs=knobs, prepared=first.prepared).run()
        counts = [int((a != b).sum()) for a, b in zip(actual, expected, strict=True)]
        if any(counts):
            different.append((choice, counts))
    assert not different


@pytest.mark.parametrize("row", KNOB_TABLE, ids=lambda row: f"{row.formats[0]}-{row.max_rows}")
def test_every_knob_row_gives_the_same_bits_and_they_are_right(row):
    for name in row.formats:
        weights = random_weights(name, 1024, 512, len(SKEWED))
        first = Case(weights, knobs=choose_row(name, 1).knobs)
        case = Case(weights, knobs=row.knobs, prepared=first.prepared)
        assert_correct(case)
        for actual, expected in zip(case.run(), first.run(), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", TILE_FORMATS)
@pytest.mark.parametrize("hidden, intermediate", [(288, 160), (512, 704), (128, 128)])
def test_shapes_that_need_padding(name, hidden, intermediate):
    assert_correct(Case(random_weights(name, hidden, intermediate, len(SKEWED))))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", NAMED_ACTIVATIONS)
def test_activations_with_and_without_bias(kind, has_bias):
    activation = NAMED_ACTIVATIONS[kind]
    weights = random_weights(
        "nvfp4", 512, 256, len(SKEWED), is_gated=activation.is_gated, has_bias=has_bias
    )
    # Pre-activations of up to about 20 reach the clamps and both ends of the sigmoid.
    scales = {"up_scale": weights.up_scale / 2}
    if activation.is_gated:
        scales["gate_scale"] = weights.gate_scale / 4
    assert_correct(Case(replace(weights, **scales), activation=activation))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "bf16"])
def test_decode_is_exact_for_every_code_and_scale(name):
    """One-hot rows read single weights back: code x scale pairs, bitwise in BF16."""
    num_rows, num_cols = 8192, 128
    fmt = TILE_FORMATS[name]
    row = torch.arange(num_rows, device="cuda")[:, None]
    col = torch.arange(num_cols, device="cuda")[None]
    tensors = {}
    if name == "bf16":
        bits = (row * num_cols + col) % 65536
        w2 = bits.to(torch.uint16).view(torch.bfloat16)
        w2 = torch.where(w2.isfinite() & (w2.abs() > 1e-30), w2, 1.0)
    else:
        # Row r walks the scales, column c the codes, shifted so that all pairs meet.
        codes = (col + row // 8) % (1 << fmt.code_bits)
        num_sf = num_cols // fmt.sf_cols
        block = torch.arange(num_sf, device="cuda")[None]
        if name == "nvfp4":
            sf = (row * num_sf + block) % 0x7F
            tensors["w2_sf"] = sf.to(torch.uint8).view(torch.float8_e4m3fn)[None]
            tensors |= {key: torch.ones(1, device="cuda") for key in SCALES}
        else:
            sf = 60 + (row * num_sf + block) % 100
            tensors["w2_sf"] = sf.to(torch.uint8)[None]
        if fmt.code_bits == 4:
            w2 = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        else:
            codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
            w2 = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    template = random_weights(name, num_rows, num_cols, 1)
    weights = replace(template, **{"w2": w2[None], **tensors})
    case = Case(weights, (num_cols,))
    one_hot = torch.eye(num_cols, dtype=torch.bfloat16, device="cuda")
    case.hidden[:num_cols] = one_hot
    case.gemm.fc2(case.hidden, case.offsets, case.prepared, case.terms)
    expected = weights.dequantize_expert("w2", 0).T
    is_same = case.terms[:num_cols].float() == expected.float()
    assert is_same.all(), f"{int((~is_same).sum())} of {is_same.numel()} differ"
    assert torch.equal(expected.bfloat16().float(), expected.float())


SCALES = ("gate_scale", "up_scale", "down_scale")


def test_a_row_alone_has_the_bits_it_has_in_a_batch():
    weights = random_weights("nvfp4", 2048, 512, len(SKEWED))
    batch = Case(weights)
    expected = batch.run()
    for expert, row in ((0, 36), (3, 129), (6, 150), (7, 0)):
        counts = [0] * len(SKEWED)
        counts[expert] = 1
        alone = Case(weights, counts, prepared=batch.prepared)
        position = batch.parts[expert].start + row
        alone.x[0] = batch.x[position]
        for actual, reference in zip(alone.run(), expected, strict=True):
            assert torch.equal(actual[0], reference[position])


def test_graph_replays_follow_new_offsets_and_repeats_are_bit_identical():
    weights = random_weights("nvfp4", 1024, 512, len(SKEWED))
    case = Case(weights)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.gemm.fc1(case.x, case.offsets, case.prepared, case.hidden)
        case.gemm.fc2(case.hidden, case.offsets, case.prepared, case.terms)
    for counts in (SKEWED, SKEWED[::-1], (0,) * 7 + (1,), (61,) * 8):
        eager = Case(weights, counts, prepared=case.prepared)
        expected = eager.run()
        case.x[: eager.num_rows] = eager.x[: eager.num_rows]
        case.offsets.copy_(eager.offsets)
        for _ in range(25):
            case.hidden.fill_(POISON)
            case.terms.fill_(POISON)
            graph.replay()
            assert torch.equal(case.hidden[: eager.num_rows], expected[0])
            assert torch.equal(case.terms[: eager.num_rows], expected[1])
            assert case.terms[eager.num_rows :].isnan().all()


def test_no_rows_at_all_changes_nothing():
    case = Case(random_weights("nvfp4", 256, 128, 4), (0, 0, 0, 0))
    case.run()
    assert case.hidden.isnan().all() and case.terms.isnan().all()


def test_terms_are_scattered_to_the_rows_asked_for():
    weights = random_weights("nvfp4", 512, 256, len(SKEWED))
    plain = Case(weights)
    hidden, expected = plain.run()
    case = Case(weights, prepared=plain.prepared, scatters_terms=True)
    target = torch.randperm(case.num_rows, device="cuda").int()
    case.hidden[: case.num_rows] = hidden
    case.gemm.fc2(case.hidden, case.offsets, case.prepared, case.terms, target)
    assert torch.equal(case.terms[target.long()], expected)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block"])
def test_fp32_terms_round_to_the_bf16_ones(name):
    weights = random_weights(name, 512, 256, len(SKEWED))
    plain = Case(weights)
    hidden, expected = plain.run()
    case = Case(weights, prepared=plain.prepared, terms_are_fp32=True)
    case.hidden[: case.num_rows] = hidden
    case.terms = case.terms.float()
    case.gemm.fc2(case.hidden, case.offsets, case.prepared, case.terms)
    terms = case.terms[: case.num_rows]
    assert torch.equal(terms.bfloat16(), expected)
    assert relative_error(terms, case.exact("w2", hidden)) < 2e-6
    assert case.terms[case.num_rows :].isnan().all()


@pytest.mark.parametrize("max_sms", [1, 7])
def test_fewer_ctas_give_the_same_bits(max_sms):
    weights = random_weights("nvfp4", 512, 256, len(SKEWED))
    first = Case(weights)
    few = Case(weights, prepared=first.prepared, max_sms=max_sms)
    for actual, expected in zip(few.run(), first.run(), strict=True):
        assert torch.equal(actual, expected)


def test_many_experts_fill_more_than_one_warp_of_the_search():
    counts = [(7 * e) % 11 for e in range(97)]
    assert_correct(Case(random_weights("nvfp4", 256, 128, 97), counts))

"""The grouped GEMM, cross-compiled for sm_90a: every knob row, format and activation.

What is looked for has been measured to cost: spills 1-4 %, a move to a uniform register (R2UR) or
a divergence barrier (BSSY) in the K loop 1-8 %, serialised WGMMA a factor of two.
"""

from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sass import Sass, disassemble

from moe_ep.megakernel.grouped_gemm import GemmSpec
from moe_ep.megakernel.knobs import KNOB_TABLE, MAX_SMEM_BYTES, KernelKnobs, choose_knobs
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS, Activation

pytestmark = pytest.mark.compile

FC1 = GemmSpec(
    name="fc1",
    weights_format="nvfp4",
    num_cols=7168,
    num_channels=2048,
    activation=Activation(),
    has_bias=False,
    num_experts=32,
    scatters_rows=False,
    knobs=choose_knobs("nvfp4", 8),
)
FC2 = replace(FC1, name="fc2", num_cols=2048, num_channels=7168, activation=None)


def wgmma_loops(sass: Sass) -> list[tuple[str, ...]]:
    """K loops: the innermost ones that hold WGMMA, one for each token tile width.

    They differ by 6 %; the shortest way back of the loop over items is 39 % longer than they are.
    """
    loops = [loop for loop in sass.loops if any(op.startswith("HGMMA") for op in loop)]
    shortest = min(map(len, loops))
    return [loop for loop in loops if len(loop) < 1.3 * shortest]


def is_serialised(loop: tuple[str, ...]) -> bool:
    """ptxas's C7512 and C7513: a wait around every WGMMA instead of every group of four."""
    num_wgmma = sum(op.startswith("HGMMA") for op in loop)
    return sum(op.startswith("WARPGROUP") for op in loop) > num_wgmma


def assert_lean(spec: GemmSpec, folder) -> None:
    knobs = spec.knobs
    assert knobs.smem_bytes(spec.weights_format, spec.num_experts) <= MAX_SMEM_BYTES
    sass = disassemble(spec.kernel_build(), folder)
    assert sass.num_registers * knobs.num_threads == knobs.register_pool
    assert sass.count("LDL", "STL") == 0
    assert sass.count("ACQBULK") == sass.count("PREEXIT") == 1  # programmatic launch, both sides
    loops = wgmma_loops(sass)
    assert len(loops) == len(knobs.tile_widths)
    for loop in loops:
        assert sum(op.startswith("HGMMA") for op in loop) == 8 * knobs.slices_per_item
        assert not is_serialised(loop)
        found = [op for op in loop if op.startswith(("R2UR", "BSSY", "LDL", "STL"))]
        assert not found


NVFP4_ROWS = [row.knobs for row in KNOB_TABLE if "nvfp4" in row.formats]


@pytest.mark.parametrize("spec", [FC1, FC2], ids=lambda spec: spec.name)
@pytest.mark.parametrize("knobs", NVFP4_ROWS, ids=lambda k: f"widths{k.tile_widths}")
def test_every_knob_row_is_lean(spec, knobs, tmp_path):
    assert_lean(replace(spec, knobs=knobs), tmp_path)


OTHER_ROWS = [
    (name, row.knobs)
    for row in KNOB_TABLE
    for name in row.formats
    if name != "nvfp4" and (name != "mxfp4" or row.max_rows <= 32)  # else as nvfp4's
]


@pytest.mark.parametrize("name, knobs", OTHER_ROWS, ids=lambda value: str(value)[:9])
def test_every_format_is_lean(name, knobs, tmp_path):
    assert_lean(replace(FC1, weights_format=name, knobs=knobs), tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in NAMED_ACTIVATIONS if kind != "swiglu"])
def test_every_activation_is_lean_with_a_bias(kind, tmp_path):
    activation = NAMED_ACTIVATIONS[kind]
    assert_lean(replace(FC1, activation=activation, has_bias=True), tmp_path)


@pytest.mark.parametrize("options", [{"scatters_rows": True, "has_bias": True}, {"is_fp32": True}])
def test_every_kind_of_term_is_lean(options, tmp_path):
    assert_lean(replace(FC2, **options), tmp_path)


def test_the_check_sees_a_serialised_loop(tmp_path):
    """Two slices of 64 columns need more than 112 registers."""
    knobs = KernelKnobs(
        num_math_warpgroups=4,
        slices_per_item=2,
        tile_widths=(48, 64),
        stages=4,
        producer_registers=32,
        math_registers=112,
    )
    sass = disassemble(replace(FC1, knobs=knobs).kernel_build(), tmp_path)
    assert any(is_serialised(loop) for loop in wgmma_loops(sass))

"""The fused layer, cross-compiled for sm_90a: K loops as lean as the GEMMs', nothing spilled."""

import ctypes
from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sass import disassemble
from test_grouped_gemm_compiles import is_serialised, wgmma_loops

from moe_ep.megakernel import mega_moe
from moe_ep.megakernel.compile_cache import load
from moe_ep.megakernel.knobs import KNOB_TABLE, KernelKnobs, choose_knobs
from moe_ep.megakernel.mega_moe import Call
from moe_ep.megakernel.mega_spec import MegaSpec
from moe_ep.megakernel.problem import NAMED_ACTIVATIONS, Activation
from moe_ep.megakernel.workspace import Workspace

pytestmark = pytest.mark.compile


def make_spec(
    knobs: KernelKnobs, *, num_ranks: int = 1, num_experts: int = 32, top_k: int = 8, **changed
) -> MegaSpec:
    layout = Workspace(
        num_ranks=num_ranks,
        num_local_experts=-(-num_experts // num_ranks),
        top_k=top_k,
        hidden=7168,
        intermediate=2048,
        max_tokens_per_rank=128,
        max_tile_width=knobs.max_tile_width,
    )
    spec = MegaSpec(
        layout=layout,
        num_experts=num_experts,
        weights_format="nvfp4",
        activation=Activation(),
        has_bias13=False,
        has_bias2=False,
        knobs=knobs,
    )
    return replace(spec, **changed)


def assert_lean(spec: MegaSpec, folder, num_spills: int = 0) -> None:
    knobs = spec.knobs
    sass = disassemble(spec.kernel_build(), folder)
    assert sass.num_registers * knobs.num_threads == knobs.register_pool
    assert sass.count("LDL", "STL") <= num_spills
    loops = wgmma_loops(sass)
    assert len(loops) == len(knobs.tile_widths)  # FC1 and FC2 share them
    for loop in loops:
        assert sum(op.startswith("HGMMA") for op in loop) == 8 * knobs.slices_per_item
        assert not is_serialised(loop)
        assert not [op for op in loop if op.startswith(("R2UR", "BSSY", "LDL", "STL"))]


@pytest.mark.parametrize("row", KNOB_TABLE, ids=lambda row: f"{row.formats[0]}-{row.max_rows}")
def test_every_knob_row_is_lean(row, tmp_path):
    assert_lean(make_spec(row.knobs, weights_format=row.formats[-1]), tmp_path)


DECODE = choose_knobs("nvfp4", 8)


@pytest.mark.parametrize(
    "options",
    [
        {"num_ranks": 8, "num_launched": 8},
        {"num_ranks": 72, "num_experts": 288, "top_k": 22, "ids_are_int64": True},
        {"num_ranks": 2, "num_experts": 256, "is_bounded": False},
    ],
    ids=["R8-virtual", "R72-K22", "R2-bare"],
)
def test_several_ranks_are_lean(options, tmp_path):
    assert_lean(make_spec(DECODE, **options), tmp_path)


@pytest.mark.parametrize(
    "options, num_spills",
    [
        ({"num_ranks": 8, "num_launched": 8, "has_bias2": True}, 0),
        # One address, stored as the kernel starts and loaded as it ends.
        ({"num_ranks": 1, "num_experts": 64, "top_k": 32, "ids_are_int64": True}, 2),
    ],
    ids=["R8-virtual", "R1-K32"],
)
def test_tp_is_lean(options, num_spills, tmp_path):
    spec = make_spec(DECODE, **options)
    layout = replace(spec.layout, parallel="tp", num_local_experts=spec.num_experts)
    assert_lean(replace(spec, layout=replace(layout, intermediate=256)), tmp_path, num_spills)


@pytest.mark.parametrize("kind", ["situ", "relu2"])
def test_the_longest_activation_and_one_without_gate_are_lean_with_a_bias(kind, tmp_path):
    """The GEMMs' own tests take every activation."""
    activation = NAMED_ACTIVATIONS[kind]
    spec = make_spec(DECODE, activation=activation, has_bias13=True, has_bias2=True)
    assert_lean(spec, tmp_path)


def test_the_sum_over_slots_is_not_contracted_and_waits_are_bounded_where_asked(tmp_path):
    bounded = disassemble(make_spec(DECODE).kernel_build(), tmp_path)
    bare = disassemble(make_spec(DECODE, is_bounded=False).kernel_build(), tmp_path)
    assert bounded.count("ATOMG.E.CAS", "ATOM.E.CAS") > 0
    assert bare.count("ATOMG.E.CAS", "ATOM.E.CAS") == 0
    # 8 columns of 8 slots; SwiGLU and scales are products of their own.
    assert bounded.count("FADD") >= 64


def test_cells_hold_what_a_call_with_plain_numbers_would(tmp_path, monkeypatch):
    """The oracle is the conversion that CuTe DSL makes of a call's own arguments."""
    from cuda.bindings.driver import CUstream

    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    # Binding loads the kernel onto a GPU; the cells are what it is given.
    monkeypatch.setattr(mega_moe, "BoundCall", lambda function, cells: cells)
    function = load(make_spec(DECODE).kernel_build())
    addresses, numbers = range(1 << 40, (1 << 40) + 17), (8, -1, 3, 66, 0)
    arguments = (*addresses, *numbers, CUstream(77))
    expected, kept = function.execution_args.generate_execution_args(arguments, {})
    call = Call(
        function,
        weights=tuple(addresses[5:11]),
        heaps=addresses[11],
        local=addresses[12],
        record=addresses[13],
        timeout_ns=addresses[14],
        stamps=addresses[16],
        first_rank=3,
        ctas_per_rank=66,
    )
    changing = (call.x, call.topk_ids, call.topk_weights, call.out, call.token_counts)
    for cell, value in zip(changing, addresses, strict=False):
        cell.value = value
    call.late_ns.value, call.num_tokens.value, call.late_rank.value = addresses[15], 8, -1
    call.stream.value = 77
    pointers = [pointer for cell in call.launch for pointer in cell.__c_pointers__()]
    sizes = [8] * len(addresses) + [4] * len(numbers) + [8]
    found = [
        ctypes.string_at(pointer.value, size) for pointer, size in zip(pointers, sizes, strict=True)
    ]
    assert found == [
        ctypes.string_at(getattr(pointer, "value", pointer), size)
        for pointer, size in zip(expected, sizes, strict=True)
    ]
    del kept

"""Dispatch and combine as one kernel, cross-compiled for sm_90a: registers, spills, sums, waits."""

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sass import disassemble

from moe_ep.megakernel.ping_pong import PingPongSpec, ping_pong_build
from moe_ep.megakernel.transport_sm90 import NUM_THREADS, TransportSpec, transport_build
from moe_ep.megakernel.workspace import Workspace

pytestmark = pytest.mark.compile


def make_spec(num_ranks: int, top_k: int = 8, hidden: int = 7168, **changed) -> TransportSpec:
    layout = Workspace(
        num_ranks=num_ranks,
        num_local_experts=-(-256 // num_ranks),
        top_k=top_k,
        hidden=hidden,
        intermediate=0,
        max_tokens_per_rank=128,
        max_tile_width=32,
    )
    return TransportSpec(layout=layout, num_experts=256, **changed)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(1, ids_are_int64=True),
        make_spec(8, num_launched=8),
        make_spec(2, top_k=6, hidden=2880),
        make_spec(72, top_k=22),
    ],
    ids=["R1", "R8-virtual", "R2-K6-H2880", "R72-K22"],
)
def test_transport_spills_nothing_and_sums_without_fused_multiply_add(spec, tmp_path):
    sass = disassemble(transport_build(spec), tmp_path)
    assert sass.count("LDL", "STL") == 0
    assert sass.num_registers <= 65536 // NUM_THREADS
    assert sass.count("FFMA") == 0
    # At least 8 columns of each slot, and their scale.
    assert sass.count("FADD") >= 8 * spec.layout.top_k
    assert sass.count("FMUL") >= 8 + 8 * spec.layout.top_k


def test_unbounded_waits_read_no_clock_and_leave_no_record(tmp_path):
    bounded = disassemble(transport_build(make_spec(2)), tmp_path)
    bare = disassemble(transport_build(make_spec(2, is_bounded=False)), tmp_path)
    assert bounded.count("ATOMG.E.CAS", "ATOM.E.CAS") > 0
    assert bare.count("ATOMG.E.CAS", "ATOM.E.CAS") == 0


def test_a_ping_pong_signals_and_waits_at_system_scope(tmp_path):
    sass = disassemble(ping_pong_build(PingPongSpec(num_launched=2)), tmp_path)
    assert sass.count("ST.E.STRONG.SYS", "STG.E.STRONG.SYS") > 0
    assert sass.count("LD.E.STRONG.SYS", "LDG.E.STRONG.SYS") > 0

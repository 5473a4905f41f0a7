"""Permutation and combine, cross-compiled for sm_90a: what their machine code holds and lacks."""

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from sass import disassemble

from moe_ep.megakernel.combine_sm90 import CombineConfig, combine_build
from moe_ep.megakernel.permute_sm90 import (
    MAX_SLOTS_PER_CTA,
    NUM_THREADS,
    NUM_VECTORS_IN_FLIGHT,
    PermuteConfig,
    permute_build,
)

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(
    "config",
    [
        PermuteConfig(num_local_experts=32, top_k=8, hidden=7168, ids_are_int64=False),
        PermuteConfig(num_local_experts=384, top_k=6, hidden=7168, ids_are_int64=True),
        PermuteConfig(num_local_experts=128, top_k=1, hidden=2880, ids_are_int64=False),
        PermuteConfig(num_local_experts=1, top_k=22, hidden=None, ids_are_int64=True),
    ],
    ids=repr,
)
def test_permute_spills_nothing_and_loads_before_it_counts(config, tmp_path):
    sass = disassemble(permute_build(config), tmp_path)
    assert sass.count("LDL", "STL") == 0
    assert sass.num_registers <= 65536 // NUM_THREADS // 2  # two CTAs on an SM
    assert sass.count("MATCH.ANY") >= 1
    assert sass.count("ACQBULK") == sass.count("PREEXIT") == 1  # programmatic launch, both sides
    if config.hidden is not None:
        loads = [i for i, opcode in enumerate(sass.opcodes) if opcode == "LDG.E.128"]
        first_count = next(i for i, op in enumerate(sass.opcodes) if op.startswith("ATOMS.POPC"))
        assert sum(i < first_count for i in loads) == NUM_VECTORS_IN_FLIGHT
        assert sass.count("STG.E.128") >= config.top_k * NUM_VECTORS_IN_FLIGHT


@pytest.mark.parametrize("top_k", [1, 8, 10, 22, 32])
def test_combine_has_ten_loads_in_flight_and_no_fused_multiply_add(top_k, tmp_path):
    sass = disassemble(combine_build(CombineConfig(top_k=top_k, hidden=7168)), tmp_path)
    assert sass.count("FFMA") == 0
    assert sass.count("FMUL") == 8 * top_k
    assert sass.count("LDL", "STL") == 0
    loads = [i for i, opcode in enumerate(sass.opcodes) if opcode == "LDG.E.128"]
    first_sum = next(i for i, opcode in enumerate(sass.opcodes) if opcode.startswith("FADD"))
    assert len(loads) == top_k
    assert sum(i < first_sum for i in loads) >= min(top_k, 10)
    assert sass.count("ACQBULK") == sass.count("PREEXIT") == 1


@pytest.mark.parametrize("top_k", [1, 6, 8, 22])
@pytest.mark.parametrize("hidden", [None, 8, 2048, 2880, 7168, 8192, 16384])
def test_permute_grid_covers_every_token_and_column_within_the_limits(top_k, hidden):
    config = PermuteConfig(num_local_experts=8, top_k=top_k, hidden=hidden, ids_are_int64=False)
    for num_tokens in (1, 2, 7, 8, 31, 131, 132, 133, 264, 265, 512, 4095, 8192, 65536):
        tokens_per_group, vectors_per_chunk = config.grid(num_tokens)
        assert 1 <= tokens_per_group * top_k <= MAX_SLOTS_PER_CTA
        assert 1 <= vectors_per_chunk <= NUM_THREADS * NUM_VECTORS_IN_FLIGHT
        num_chunks = -(-max(1, config.num_vectors) // vectors_per_chunk)
        # No CTA without columns: its first vector would lie past the row.
        assert (num_chunks - 1) * vectors_per_chunk < max(1, config.num_vectors)

"""What the grouped GEMM, the permutation and the combination hand to their kernels, by the names
that the kernels give to their arguments; launches are stubbed, so no GPU is needed."""

import ctypes
import gc
import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from layer_cases import make_weights

from moe_ep import MoEShape
from moe_ep.megakernel import bound_call, combine_sm90, grouped_gemm, permute_sm90
from moe_ep.megakernel.formats import prepare
from moe_ep.megakernel.grouped_gemm_sm90 import GroupedGemmSm90

SHAPE = MoEShape(num_experts=4, top_k=2, hidden=64, intermediate=128)
STREAM, NUM_SMS = 77, 132


class FakeCall:
    """`BoundCall` that keeps what a launch was given."""

    made: list["FakeCall"] = []

    def __init__(self, function, cells) -> None:
        self.function, self.cells, self.given = function, cells, []
        FakeCall.made.append(self)

    def __call__(self, *values: int) -> None:
        # As the cells hold them: what does not fit its type is not what was given.
        for cell, value in zip(self.cells, values, strict=True):
            cell.value = value
        self.given.append(tuple(cell.value for cell in self.cells))


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCall.made.clear()
    monkeypatch.setattr(bound_call, "BoundCall", FakeCall)
    monkeypatch.setattr(bound_call, "stream_handle", lambda device: STREAM)
    for module in (grouped_gemm, combine_sm90, permute_sm90):
        monkeypatch.setattr(module, "load", lambda build: build)
    monkeypatch.setattr(grouped_gemm, "BoundCall", FakeCall)
    monkeypatch.setattr(grouped_gemm, "stream_handle", lambda device: STREAM)
    sms = SimpleNamespace(multi_processor_count=NUM_SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)


def launched(kernel: type, call: FakeCall) -> dict[str, int]:
    """The last launch, by the names of the kernel's arguments."""
    names = list(inspect.signature(kernel.__call__).parameters)[1:]
    return dict(zip(names, call.given[-1], strict=True))


def make_gemm(**options) -> grouped_gemm.GroupedGemm:
    return grouped_gemm.GroupedGemm(
        "nvfp4",
        hidden=SHAPE.hidden,
        intermediate=SHAPE.intermediate,
        activation=SHAPE.activation,
        num_local_experts=SHAPE.num_experts,
        device="cpu",
        **options,
    )


def rows(count: int, width: int) -> torch.Tensor:
    return torch.zeros(count, width, dtype=torch.bfloat16)


def test_the_grouped_gemm_gives_its_kernel_every_address_and_size():
    gemm, weights = make_gemm(scatters_terms=True), prepare(make_weights(SHAPE, "nvfp4"))
    offsets, dst = torch.zeros(5, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    x, hidden, terms = rows(9, 64), rows(9, 128), rows(9, 64)
    gemm.fc1(x, offsets, weights, hidden)
    gemm.fc2(hidden, offsets, weights, terms, dst)
    fc1, fc2 = (launched(GroupedGemmSm90, call) for call in FakeCall.made)
    common = {
        "bias": 0,
        "offsets": offsets.data_ptr(),
        "num_pool_rows": 9,
        "zero": 0,
        "num_ctas": NUM_SMS,
        "stream": STREAM,
    }
    assert fc1 == common | {
        "weights": weights.w13.data_ptr(),
        "alpha": weights.w13_alpha.data_ptr(),
        "rows_in": x.data_ptr(),
        "rows_out": hidden.data_ptr(),
        "dst_rows": 0,
        "counters": gemm._counters[0].data_ptr(),
    }
    assert fc2 == common | {
        "weights": weights.w2.data_ptr(),
        "alpha": weights.w2_alpha.data_ptr(),
        "rows_in": hidden.data_ptr(),
        "rows_out": terms.data_ptr(),
        "dst_rows": dst.data_ptr(),
        "counters": gemm._counters[1].data_ptr(),
    }


def test_a_build_is_bound_once_whatever_the_tensors_and_holds_neither_layer_nor_weights():
    gemm = make_gemm()
    offsets = torch.zeros(5, dtype=torch.int32)
    all_weights = [prepare(make_weights(SHAPE, "nvfp4", seed)) for seed in (0, 1)]
    for weights in all_weights:
        for num_rows in (40, 41, 40):
            gemm.fc1(rows(num_rows, 64), offsets, weights, rows(num_rows, 128))
    (call,) = FakeCall.made  # these rows take one build
    given = [given[0] for given in call.given]
    assert given == [weights.w13.data_ptr() for weights in all_weights for _ in range(3)]
    gemm.fc1(rows(4000, 64), offsets, weights, rows(4000, 128))
    assert len(FakeCall.made) == 2
    held = [weakref.ref(gemm), weakref.ref(weights)]
    gc.disable()
    try:
        del gemm, weights, all_weights
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("hidden", [None, 64])
def test_the_permutation_gives_its_kernel_every_address_and_size(hidden):
    config = permute_sm90.PermuteConfig(
        num_local_experts=4, top_k=2, hidden=hidden, ids_are_int64=False
    )
    permute, num_tokens = permute_sm90.Permute(config), 6
    out = {
        name: torch.zeros(12, dtype=torch.int32)
        for name in ("out_counts", "out_offsets", "out_src_slot", "out_pool_row", "status")
    }
    ids, x, pool = torch.zeros(6, 2, dtype=torch.int32), rows(6, 64), rows(12, 64)
    copied = {"hidden_states": x, "out_pool": pool} if hidden else {}
    permute(ids, num_experts=16, first_expert=8, **out, **copied)
    per_group, per_chunk = config.grid(num_tokens)
    assert launched(permute_sm90.PermuteKernel, FakeCall.made[0]) == {
        "topk_ids": ids.data_ptr(),
        **{name.removeprefix("out_"): tensor.data_ptr() for name, tensor in out.items()},
        "hidden_states": x.data_ptr() if hidden else 0,
        "pool": pool.data_ptr() if hidden else 0,
        "num_tokens": num_tokens,
        "tokens_per_group": per_group,
        "vectors_per_chunk": per_chunk,
        "num_experts": 16,
        "first_expert": 8,
        "stream": STREAM,
    }


def test_the_combination_gives_its_kernel_every_address_and_size():
    combine = combine_sm90.Combine(combine_sm90.CombineConfig(top_k=2, hidden=64))
    terms, out = rows(12, 64), rows(6, 64)
    pool_row, weights = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(6, 2)
    combine(terms, pool_row, weights, out)
    assert launched(combine_sm90.CombineKernel, FakeCall.made[0]) == {
        "terms": terms.data_ptr(),
        "pool_row": pool_row.data_ptr(),
        "topk_weights": weights.data_ptr(),
        "out": out.data_ptr(),
        "num_tokens": 6,
        "stream": STREAM,
    }


def test_a_bound_call_writes_the_first_cells_and_launches_with_them(monkeypatch):
    """The real one, over an executor that notes what the cells hold at the launch."""
    monkeypatch.undo()
    cells = [bound_call.Int64(), bound_call.Int32(), bound_call.Int64(9)]
    launches = []

    class Executor:
        cuda_result = SimpleNamespace(value=0)

        def generate_execution_args(self, *cells):
            return [pointer for cell in cells for pointer in cell.__c_pointers__()], []

        def _get_invoke_packed_args(self, pointers):
            assert [p.value for p in pointers] == [ctypes.addressof(cell) for cell in cells]
            return pointers

        def capi_func(self, pointers):
            launches.append([cell.value for cell in cells])

    call = bound_call.BoundCall(SimpleNamespace(to=lambda device: Executor()), cells)
    call(2**40, 5)
    call(1)
    call()
    assert launches == [[2**40, 5, 9], [1, 5, 9], [1, 5, 9]]

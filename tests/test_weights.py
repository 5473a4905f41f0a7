"""`MoEWeights` refuses what it cannot use exactly, and cuts and quantises without loss or waste."""

import gc
import math
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep import MoEWeights
from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel.problem import WEIGHT_FORMATS, owned_experts, weight_format

FORMATS = tuple(WEIGHT_FORMATS)
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 3, 256, 384


def dense(
    num_experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    is_gated: bool = True,
) -> MoEWeights:
    """Every matrix of every expert has a size of its own, so that scales differ."""
    generator = torch.Generator().manual_seed(0)
    halves = 2 if is_gated else 1
    size = 1 + torch.arange(num_experts * (halves + 1)).view(num_experts, halves + 1)
    w13 = torch.randn(num_experts, halves, intermediate, hidden, generator=generator)
    w2 = torch.randn(num_experts, hidden, intermediate, generator=generator)
    return MoEWeights.from_dense(
        (w13 * size[:, :halves, None, None]).flatten(1, 2).bfloat16(),
        (w2 * size[:, halves, None, None]).bfloat16(),
        b13=torch.randn(num_experts, halves * intermediate, generator=generator),
        b2=torch.randn(num_experts, hidden, generator=generator).bfloat16(),
        is_gated=is_gated,
    )


def assert_same_weights(got: MoEWeights, want: MoEWeights) -> None:
    for one, other in zip(
        got.dequantize(torch.float64), want.dequantize(torch.float64), strict=True
    ):
        assert torch.equal(one, other)


# Quantising and decoding


def test_gate_up_and_down_of_every_expert_have_their_own_scale():
    weights = dense()
    q = weights.quantize("nvfp4")
    gate, up = weights.w13.float().unflatten(1, (2, INTERMEDIATE)).abs().amax(dim=(2, 3)).unbind(1)
    down = weights.w2.float().abs().amax(dim=(1, 2))
    for scale, amax in ((q.gate_scale, gate), (q.up_scale, up), (q.down_scale, down)):
        assert torch.equal(scale, torch.from_numpy(oracles.nvfp4_scales(amax.numpy(), 448)[1]))
    assert (
        len({*q.gate_scale.tolist(), *q.up_scale.tolist(), *q.down_scale.tolist()})
        == 3 * NUM_EXPERTS
    )


def test_nvfp4_decodes_to_code_times_block_scale_times_global_scale():
    q = dense().quantize("nvfp4")
    w13, w2 = q.dequantize(torch.float64)
    values = oracles.unpack_e2m1(q.w13.numpy()).astype(np.float64)
    values *= np.repeat(oracles.to_numpy(q.w13_sf), 16, axis=2)
    scales = torch.stack([q.gate_scale, q.up_scale], 1).double().numpy()
    assert np.array_equal(w13.numpy(), values * np.repeat(scales, INTERMEDIATE, axis=1)[..., None])
    values = oracles.unpack_e2m1(q.w2.numpy()).astype(np.float64)
    values *= np.repeat(oracles.to_numpy(q.w2_sf), 16, axis=2)
    assert np.array_equal(w2.numpy(), values * q.down_scale.double().numpy()[:, None, None])


@pytest.mark.parametrize("format_name", ["mxfp4", "mxfp8"])
def test_mx_decodes_to_code_times_power_of_two(format_name):
    q = dense().quantize(format_name)
    for codes, sf, got in zip((q.w13, q.w2), (q.w13_sf, q.w2_sf), q.dequantize(), strict=True):
        is_packed = codes.dtype == torch.uint8
        values = oracles.unpack_e2m1(codes.numpy()) if is_packed else oracles.to_numpy(codes)
        assert np.array_equal(got.numpy(), values * np.repeat(oracles.e8m0(sf.numpy()), 32, axis=2))


def test_fp8_block_decodes_gate_and_up_by_blocks_of_their_own():
    ragged = dense(hidden=200, intermediate=150).quantize("fp8_block")
    assert ragged.w13_sf.shape == (NUM_EXPERTS, 2 * 2, 2)
    w13, w2 = ragged.dequantize(torch.float64)
    for row, col in ((0, 0), (127, 127), (128, 128), (149, 199), (150, 0), (277, 5), (278, 128)):
        half, row_in_half = divmod(row, 150)
        sf = ragged.w13_sf[1, 2 * half + row_in_half // 128, col // 128]
        assert w13[1, row, col] == ragged.w13[1, row, col].double() * sf.double()
    assert w2[2, 130, 149] == ragged.w2[2, 130, 149].double() * ragged.w2_sf[2, 1, 1].double()


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("format_name", FORMATS)
def test_bytes_are_those_of_the_format(format_name, is_gated):
    q = dense(is_gated=is_gated).quantize(format_name)
    halves = 2 if is_gated else 1
    fmt = weight_format(format_name)
    matrices = halves * fmt.num_bytes(INTERMEDIATE, HIDDEN) + fmt.num_bytes(HIDDEN, INTERMEDIATE)
    scales = 4 * (halves + 1) * fmt.has_global_scale
    assert q.num_bytes == NUM_EXPERTS * (matrices + scales + 4 * halves * INTERMEDIATE + 2 * HIDDEN)


def test_quantize_names_the_bad_matrix():
    weights = dense()
    weights.w13[2, INTERMEDIATE + 7, 3] = math.nan
    with pytest.raises(MoEEpConfigError, match="up matrix of expert 2 holds NaN or Inf"):
        weights.quantize("mxfp8")


def test_quantize_refuses_what_is_quantised_and_a_tp_part_in_nvfp4():
    with pytest.raises(MoEEpConfigError, match="quantised already"):
        dense().quantize("mxfp4").quantize("nvfp4")
    with pytest.raises(MoEEpConfigError, match="quantize first, then shard"):
        dense().shard("tp", 0, 2).quantize("nvfp4")


def test_a_zero_expert_quantises_to_zero():
    weights = dense()
    weights.w2[1] = 0
    for format_name in FORMATS:
        assert weights.quantize(format_name).dequantize()[1][1].abs().max() == 0


# Memory


def test_views_with_any_expert_stride_are_taken_without_a_copy():
    weights = dense()
    one_buffer = torch.cat([weights.w13.flatten(1), weights.w2.flatten(1)], dim=1)
    w13 = one_buffer[:, : 2 * INTERMEDIATE * HIDDEN].unflatten(1, (2 * INTERMEDIATE, HIDDEN))
    w2 = one_buffer[:, 2 * INTERMEDIATE * HIDDEN :].unflatten(1, (HIDDEN, INTERMEDIATE))
    views = MoEWeights.from_dense(w13, w2)
    assert (views.w13.data_ptr(), views.w2.data_ptr()) == (w13.data_ptr(), w2.data_ptr())
    assert_same_weights(views, weights)
    assert_same_weights(views.quantize("nvfp4"), weights.quantize("nvfp4"))
    assert_same_weights(views.shard("tp", 1, 2), weights.shard("tp", 1, 2))


@pytest.mark.parametrize("parallel", ["ep", "tp"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_parts_hold_their_own_bytes_and_let_the_originals_go(format_name, parallel):
    full = dense().quantize(format_name)
    part = full.shard(parallel, 0, 3)
    for tensor in part.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    originals = [weakref.ref(tensor) for tensor in full.tensors.values()]
    del full
    gc.collect()
    assert [ref() for ref in originals] == [None] * len(originals)


@pytest.mark.parametrize("format_name", FORMATS[1:])
def test_quantize_lets_the_originals_go(format_name):
    weights = replace(dense(), b13=None, b2=None)
    originals = [weakref.ref(tensor) for tensor in weights.tensors.values()]
    q = weights.quantize(format_name)
    del weights
    gc.collect()
    assert [ref() for ref in originals] == [None, None]
    assert all(t.untyped_storage().nbytes() <= 2 * t.nbytes for t in q.tensors.values())


PEAK = """
import re, torch
from moe_ep import MoEWeights
def memory(name):  # VmRSS now, VmHWM at most; ru_maxrss would count the parent that forked us
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
torch.set_num_threads(1)
tiny = MoEWeights.from_dense(torch.ones(1, 256, 128).bfloat16(), torch.ones(1, 128, 128).bfloat16())
tiny.quantize("{name}")  # code and allocator are warm
before = memory("VmRSS")
w13 = torch.ones({e}, 2 * {i}, 2048, dtype=torch.bfloat16)
w2 = torch.ones({e}, 2048, {i}, dtype=torch.bfloat16)
weights = MoEWeights.from_dense(w13, w2)
q = weights.quantize("{name}")
peak = memory("VmHWM")
print((peak - before) / (weights.num_bytes + q.num_bytes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("num_experts", [1, 12])
@pytest.mark.parametrize("format_name", ["nvfp4", "fp8_block"])
def test_quantize_peaks_below_1_2_times_input_and_output(format_name, num_experts):
    script = PEAK.format(name=format_name, e=num_experts, i=12 * 1024 // num_experts)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert 0.95 < float(done.stdout) < 1.2


# Parts


@given(
    num_experts=st.integers(1, 9),
    num_ranks=st.integers(1, 12),
    format_name=st.sampled_from(FORMATS),
)
@settings(max_examples=40, deadline=None)
def test_ep_parts_are_every_expert_once_in_order(num_experts, num_ranks, format_name):
    full = dense(num_experts, 64, 32).quantize(format_name)
    parts = [full.shard("ep", rank, num_ranks) for rank in range(num_ranks)]
    split = torch.tensor_split(torch.arange(num_experts), num_ranks)
    assert [list(part.expert_ids) for part in parts] == [ids.tolist() for ids in split]
    for name, tensor in full.tensors.items():
        joined = torch.cat([part.tensors[name].view(torch.uint8) for part in parts])
        assert torch.equal(joined, tensor.view(torch.uint8))


@given(
    num_ranks=st.integers(1, 4),
    blocks_per_rank=st.integers(1, 3),
    format_name=st.sampled_from(FORMATS),
    is_gated=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_tp_parts_are_every_channel_once(num_ranks, blocks_per_rank, format_name, is_gated):
    block = max(1, weight_format(format_name).sf_cols)
    intermediate = num_ranks * blocks_per_rank * block
    full = dense(2, 160, intermediate, is_gated).quantize(format_name)
    w13, w2 = full.dequantize(torch.float64)
    parts = [full.shard("tp", rank, num_ranks) for rank in range(num_ranks)]
    halves = 2 if is_gated else 1
    part_w13 = [p.dequantize(torch.float64)[0].unflatten(1, (halves, -1)) for p in parts]
    assert torch.equal(torch.cat(part_w13, dim=2).flatten(1, 2), w13)
    assert torch.equal(torch.cat([p.dequantize(torch.float64)[1] for p in parts], dim=2), w2)
    part_b13 = torch.cat([p.b13.unflatten(1, (halves, -1)) for p in parts], dim=2)
    assert torch.equal(part_b13.flatten(1, 2), full.b13)
    assert torch.equal(parts[0].b2, full.b2)
    assert all(part.b2 is None for part in parts[1:])
    assert all(part.expert_ids == (0, 1) for part in parts)


@pytest.mark.parametrize(
    ("format_name", "num_ranks", "message"),
    [
        ("bf16", 5, "intermediate 384 does not divide over 5 tp ranks; it must be a multiple of 5"),
        ("nvfp4", 5, "whole nvfp4 scale blocks of 16; it must be a multiple of 80"),
        ("mxfp8", 8, "whole mxfp8 scale blocks of 32; it must be a multiple of 256"),
        ("fp8_block", 2, "whole fp8_block scale blocks of 128; it must be a multiple of 256"),
    ],
)
def test_tp_refuses_to_cut_a_scale_block(format_name, num_ranks, message):
    with pytest.raises(MoEEpConfigError, match=message):
        dense().quantize(format_name).shard("tp", 0, num_ranks)


def test_shard_refuses_a_part_a_rank_out_of_range_and_an_unknown_mode():
    with pytest.raises(MoEEpConfigError, match="these are rank 1 of 2"):
        dense().shard("ep", 1, 2).shard("ep", 0, 2)
    with pytest.raises(MoEEpConfigError, match="rank must be 0 to 1, got 2"):
        dense().shard("ep", 2, 2)
    with pytest.raises(MoEEpConfigError, match="'ep', 'tp'.*got 'dp'"):
        dense().shard("dp", 0, 2)


def test_only_tp_rank_0_may_hold_b2():
    full, part = dense(), dense().shard("tp", 1, 2)
    with pytest.raises(MoEEpConfigError, match="b2 must be None on tp rank 1: rank 0 alone"):
        replace(part, b2=full.b2)


def test_a_rank_may_hold_no_expert():
    part = dense().quantize("nvfp4").shard("ep", 4, 5)
    assert (part.num_local_experts, tuple(owned_experts(NUM_EXPERTS, 5, 4))) == (0, ())
    assert part.dequantize()[0].shape == (0, 2 * INTERMEDIATE, HIDDEN)


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w13": torch.zeros(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN)},
            "w13 must be torch.bfloat16, got torch.float32",
        ),
        (
            {"w13": torch.zeros(NUM_EXPERTS, INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)},
            r"w13 must have shape \(3, 768, 256\), got \(3, 384, 256\)",
        ),
        (
            {"w2": torch.zeros(NUM_EXPERTS + 1, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)},
            r"w2 must have shape \(3, 256, 384\), got \(4, 256, 384\)",
        ),
        (
            {"w13": torch.zeros(NUM_EXPERTS, HIDDEN, 2 * INTERMEDIATE, dtype=torch.bfloat16).mT},
            "w13 must be row-major within an expert",
        ),
        (
            {"b2": torch.zeros(NUM_EXPERTS, HIDDEN, dtype=torch.float16)},
            "b2 must be torch.float32 or torch.bf",
        ),
        (
            {"b13": torch.zeros(NUM_EXPERTS, INTERMEDIATE)},
            r"b13 must have shape \(3, 768\), got \(3, 384\)",
        ),
        ({"up_scale": torch.ones(NUM_EXPERTS)}, "up_scale must be None for bf16 weights"),
        ({"expert_ids": (0, 1, 3)}, "expert_ids must be different ids below num_experts 3"),
        ({"expert_ids": (0, 1)}, r"w13 must have shape \(2, 768, 256\), got \(3, 768, 256\)"),
        ({"rank": 1}, "rank must be 0 to 0, got 1"),
        ({"weights_format": "int4"}, "'int4' is not known; allowed: bf16, nvfp4"),
    ],
)
def test_dense_weights_are_checked(change, message):
    with pytest.raises(MoEEpConfigError, match=message):
        replace(dense(), **change)


@pytest.mark.parametrize("name", ["gate_scale", "up_scale", "down_scale"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_global_scale_names_tensor_and_expert(name, bad):
    q = dense().shard("ep", 1, 2).quantize("nvfp4")  # expert 2 alone
    with pytest.raises(MoEEpConfigError, match=rf"{name}\[0\] of expert 2 is {bad}"):
        replace(q, **{name: torch.tensor([bad])})


@pytest.mark.parametrize("name", ["w13_sf", "w2_sf"])
@pytest.mark.parametrize(
    ("format_name", "bad"),
    [
        ("nvfp4", math.nan),
        ("nvfp4", -2.0),
        ("fp8_block", math.nan),
        ("fp8_block", math.inf),
        ("fp8_block", -1.0),
        ("fp8_block", 0.0),
    ],
)
def test_a_bad_block_scale_names_tensor_and_expert(format_name, name, bad):
    q = dense().quantize(format_name)
    sf = q.tensors[name].clone()
    sf[1, 1, 1] = bad
    with pytest.raises(MoEEpConfigError, match=rf"{name}\[1, 1, 1\] of expert 1 is {bad}"):
        replace(q, **{name: sf})


@pytest.mark.parametrize(
    ("format_name", "byte", "code", "is_exact"),
    [
        ("mxfp4", 255, 0x00, False),  # NaN
        ("mxfp4", 254, 0x44, False),  # 2 * 2^127
        ("mxfp4", 254, 0x33, True),
        ("mxfp4", 252, 0x77, True),  # 6 * 2^125
        ("mxfp4", 253, 0x77, False),  # 6 * 2^126
        ("mxfp4", 0, 0x11, True),  # 0.5 * 2^-127, a BF16 subnormal
        ("mxfp8", 255, 0x00, False),
        ("mxfp8", 0, 0x00, True),  # a zero block
        ("mxfp8", 0, 0x38, True),  # 1.0 * 2^-127
        ("mxfp8", 0, 0x01, False),  # 2^-9 * 2^-127
        ("mxfp8", 3, 0x01, True),
        ("mxfp8", 247, 0x7E, False),  # 448 * 2^120
        ("mxfp8", 246, 0x7E, True),
    ],
)
def test_an_mx_scale_is_refused_where_a_product_is_not_exact(format_name, byte, code, is_exact):
    q = dense().quantize(format_name)
    codes, sf = q.w2.clone(), q.w2_sf.clone()
    width = codes.shape[2] // sf.shape[2]
    codes.view(torch.uint8)[2, 9, 3 * width : 4 * width] = code
    sf[2, 9, 3] = byte
    if is_exact:
        replace(q, w2=codes, w2_sf=sf)
    else:
        with pytest.raises(MoEEpConfigError, match=rf"w2_sf\[2, 9, 3\] of expert 2 is {byte}"):
            replace(q, w2=codes, w2_sf=sf)


@pytest.mark.parametrize("format_name", ["mxfp4", "mxfp8"])
def test_every_mx_byte_between_the_risky_ones_is_exact(format_name):
    from moe_ep.weight_checks import _RISKY_BYTES

    first, last = _RISKY_BYTES[format_name]
    if format_name == "mxfp4":
        q = oracles.E2M1.astype(np.float64)
    else:
        q = np.arange(127, dtype=np.uint8)
        q = torch.from_numpy(q).view(torch.float8_e4m3fn).double().numpy()
    products = torch.from_numpy(q * oracles.e8m0(np.arange(first, last + 1))[:, None])
    assert torch.equal(products.bfloat16().double(), products)


def test_missing_scales_are_named():
    q = dense().quantize("nvfp4")
    with pytest.raises(MoEEpConfigError, match=r"gate_scale is missing; nvfp4 weights need it"):
        replace(q, gate_scale=None)
    with pytest.raises(MoEEpConfigError, match=r"w2_sf is missing"):
        replace(q, w2_sf=None)


@pytest.mark.parametrize("format_name", FORMATS[1:])
def test_class_methods_take_what_quantize_gives(format_name):
    q = dense().quantize(format_name)
    again = getattr(MoEWeights, format_name)(**q.tensors)
    assert (again.hidden, again.intermediate, again.num_experts) == (
        HIDDEN,
        INTERMEDIATE,
        NUM_EXPERTS,
    )
    assert_same_weights(again, q)


def test_columns_that_are_no_whole_blocks_are_refused_with_the_multiple():
    with pytest.raises(
        MoEEpConfigError,
        match="gate matrix of expert 0 has 40 columns; nvfp4 takes multiples of 16",
    ):
        dense(hidden=40, intermediate=32).quantize("nvfp4")
    with pytest.raises(
        MoEEpConfigError,
        match="down matrix of expert 0 has 48 columns; mxfp4 takes multiples of 32",
    ):
        dense(hidden=64, intermediate=48).quantize("mxfp4")


def test_what_is_no_tensor_is_named():
    w13, w2 = torch.zeros(2, 8, 4).bfloat16(), torch.zeros(2, 4, 4).bfloat16()
    with pytest.raises(MoEEpConfigError, match="w13 must be a tensor, got list"):
        MoEWeights.from_dense([w13], w2)
    with pytest.raises(MoEEpConfigError, match="w2 must be a tensor, got ndarray"):
        MoEWeights.from_dense(w13, np.zeros((2, 4, 4)))


@pytest.mark.parametrize("parallel", ["ep", "tp"])
def test_shards_of_no_ranks_are_refused(parallel):
    with pytest.raises(MoEEpConfigError, match="num_ranks must be at least 1, got 0"):
        dense().shard(parallel, 0, 0)


def test_the_repr_shows_no_numbers():
    assert repr(dense().shard("ep", 1, 2)) == (
        "MoEWeights(bf16, 1 of 3 experts, hidden 256, intermediate 384, ep rank 1 of 2, on cpu)"
    )

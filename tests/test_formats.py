"""Prepared weights hold exactly the checkpoint's numbers. CPU, no kernel.

The oracle of the register order is a model of the fragment written here from PTX's picture of
WGMMA's A operand; that of the numbers is torch's own float8 and the E2M1 table.
"""

import math
from dataclasses import replace

import pytest
import torch

from moe_ep.comm.errors import MoEEpConfigError
from moe_ep.megakernel import formats, tiles
from moe_ep.weights import MoEWeights

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])
# hidden, intermediate: aligned, rows and columns that need padding, one block.
SHAPES = [(512, 256), (288, 160), (128, 128), (640, 96)]


def random_weights(
    name: str, hidden: int, intermediate: int, *, is_gated: bool = True, num_experts: int = 2
) -> MoEWeights:
    generator = torch.Generator().manual_seed(hidden + intermediate)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    halves = 2 if is_gated else 1
    tensors = {}
    for key, rows, cols in (
        ("w13", halves * intermediate, hidden),
        ("w2", hidden, intermediate),
    ):
        if name == "bf16":
            codes = torch.randn(num_experts, rows, cols, generator=generator).bfloat16()
        elif name in ("nvfp4", "mxfp4"):
            codes = integers(0, 256, num_experts, rows, cols // 2).to(torch.uint8)
        else:
            codes = integers(0, 0x7F, num_experts, rows, cols)
            codes += 128 * integers(0, 2, num_experts, rows, cols)
            codes = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        tensors[key] = codes
        if name == "nvfp4":
            sf = integers(1, 0x7F, num_experts, rows, cols // 16)
            tensors[f"{key}_sf"] = sf.to(torch.uint8).view(torch.float8_e4m3fn)
        elif name in ("mxfp4", "mxfp8"):
            sf = integers(100, 130, num_experts, rows, cols // 32)
            tensors[f"{key}_sf"] = sf.to(torch.uint8)
        elif name == "fp8_block":
            part = halves if key == "w13" else 1
            shape = (num_experts, part * math.ceil(rows / part / 128), math.ceil(cols / 128))
            tensors[f"{key}_sf"] = torch.rand(shape, generator=generator)
    if name == "nvfp4":
        for key in ("gate_scale", "up_scale", "down_scale"):
            tensors[key] = torch.rand(num_experts, generator=generator) + 0.5
        if not is_gated:
            tensors["gate_scale"] = None
    return MoEWeights(
        weights_format=name,
        num_experts=num_experts,
        expert_ids=tuple(range(num_experts)),
        hidden=hidden,
        intermediate=intermediate,
        is_gated=is_gated,
        **tensors,
    )


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("hidden, intermediate", SHAPES)
@pytest.mark.parametrize("name", tiles.TILE_FORMATS)
def test_restore_gives_back_every_byte(name, hidden, intermediate, is_gated):
    weights = random_weights(name, hidden, intermediate, is_gated=is_gated)
    prepared = formats.prepare(weights)
    for key, paired in (("w13", is_gated), ("w2", False)):
        for expert in range(2):
            source, sf = getattr(weights, key)[expert], getattr(weights, f"{key}_sf")
            largest = int(as_bytes(sf[expert]).max()) if name.startswith("mx") else None
            codes, restored_sf = formats.restore(
                getattr(prepared, key)[expert],
                name,
                source.shape[0],
                hidden if key == "w13" else intermediate,
                is_paired=paired,
                max_e8m0=largest,
            )
            assert torch.equal(as_bytes(codes), as_bytes(source))
            if name == "fp8_block":
                part = 2 if paired else 1
                rows = source.shape[0] // part
                expected = sf[expert].unflatten(0, (part, -1)).repeat_interleave(128, 1)
                assert torch.equal(restored_sf, expected[:, :rows].flatten(0, 1))
            elif sf is not None:
                assert torch.equal(as_bytes(restored_sf), as_bytes(sf[expert]))


def test_codes_under_a_zero_scale_come_back_as_zero_and_the_others_unchanged():
    weights = random_weights("nvfp4", 256, 128)
    as_bytes(weights.w2_sf)
    sf = weights.w2_sf.view(torch.uint8).clone()
    sf[1, 5, 3] = 0
    weights = replace(weights, w2_sf=sf.view(torch.float8_e4m3fn))
    prepared = formats.prepare(weights)
    codes, restored_sf = formats.restore(prepared.w2[1], "nvfp4", 256, 128, is_paired=False)
    expected = weights.w2[1].clone()
    expected[5, 24:32] = 0
    assert torch.equal(codes, expected)
    assert torch.equal(as_bytes(restored_sf), sf[1])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "bf16"])
def test_a_thread_finds_its_fragment_in_its_sixteen_bytes(name):
    """Each thread's words, decoded by the documented bit tricks, are WGMMA's A registers."""
    weights = random_weights(name, 256, 128, num_experts=1)
    fmt = tiles.TILE_FORMATS[name]
    tile = formats.prepare(weights).w2[0].view(1, 1, 4, -1)[0, 0, 2]  # rows 128..191
    order = tiles.row_order(256, is_paired=False).view(4, 4, 2, 8)[2]
    words = tile[: fmt.code_bytes].view(torch.int32).view(-1, 128, 4).long() & 0xFFFFFFFF
    values = (
        weights.w2[0].float()
        if name == "bf16"
        else E2M1[torch.stack([weights.w2[0] & 15, weights.w2[0] >> 4], -1).flatten(1).long()]
        if fmt.code_bits == 4
        else weights.w2[0].float()
    )
    for thread in (0, 1, 37, 127):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        for step in range(8):
            pairs = fragment_pairs(words[:, thread], step, fmt.code_bits)
            for register in range(4):
                row = order[warp, register % 2, g]
                k = 16 * step + 2 * q + 8 * (register // 2)
                assert torch.equal(pairs[register], values[row, k : k + 2]), (step, register)


def fragment_pairs(words: torch.Tensor, step: int, code_bits: int) -> list[torch.Tensor]:
    """The four register pairs of a k16 step, as numbers without block scale factor."""

    def rotl(word: int, bits: int) -> int:
        return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF

    def numbers(raw: int, log2: int) -> torch.Tensor:
        halves = torch.tensor([raw & 0xFFFF, raw >> 16], dtype=torch.int32).to(torch.uint16)
        return halves.view(torch.bfloat16).double().mul(2.0**log2).float()

    if code_bits == 16:
        return [numbers(int(word), 0) for word in words[step]]
    if code_bits == 8:
        a, b = (int(w) for w in words[step // 2].view(2, 2)[step % 2])
        raw = []
        for word in (a, b):
            raw += [word & 0x87F087F0, (word << 4) & 0x80F080F0 | (word >> 4) & 0x07000700]
        return [numbers(pair, 120) for pair in raw]
    a, b = (int(w) for w in words[step // 4].view(2, 2)[step % 4 // 2])
    merged = a & 0x03060306 | b & ~0x03060306
    shifts = ((a, 2), (a, 8), (a, 12), (merged, 0), (b, 4), (b, 10), (b, 14), (merged, 6))
    raw = [rotl(word, bits) & 0x81C081C0 for word, bits in shifts]
    return [numbers(pair, 126) for pair in raw[4 * (step % 2) :][:4]]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_scale_words_decode_to_the_scale_times_the_documented_constant(name):
    weights = random_weights(name, 256, 128, num_experts=1)
    fmt = tiles.TILE_FORMATS[name]
    prepared = formats.prepare(weights)
    tile = prepared.w2[0].view(4, -1)[1]
    words = tile[fmt.code_bytes :].view(torch.int32).view(32, -1).long() & 0xFFFFFFFF
    order = tiles.row_order(256, is_paired=False).view(4, 4, 2, 8)[1]
    sf = weights.w2_sf[0]
    scale = sf.float() if name == "nvfp4" else torch.exp2(sf.float() - 127)
    mask, ones = (0x0FF00FF0, 0x70007000) if name == "nvfp4" else (0x7F807F80, 0)
    raw_log2 = 126  # q as read from its bits is q * 2^-126
    for quad in (0, 9, 31):
        for index in range(words.shape[1] * 2):
            word = int(words[quad, index // 2])
            if index % 2:
                word = (word << 8 | word >> 24) & 0xFFFFFFFF
            word = word & mask | ones
            for half in (0, 1):
                bits = torch.tensor([word >> 16 * half & 0xFFFF], dtype=torch.int32)
                decoded = bits.to(torch.uint16).view(torch.bfloat16).double()
                row = order[quad // 8, half, quad % 8]
                decoded = decoded * 2.0**-raw_log2 * prepared.w2_alpha[0, 0].double()
                expected = scale[row, index].double()
                if weights.down_scale is not None:
                    expected = expected * weights.down_scale[0].double()
                assert float(decoded) == float(expected)


def test_views_of_larger_tensors_give_the_same_bytes():
    weights = random_weights("nvfp4", 256, 128)
    expected = formats.prepare(weights).w13
    wide = torch.zeros(2, 2, *weights.w13.shape[1:], dtype=torch.uint8)
    wide[:, 1] = weights.w13
    assert torch.equal(formats.prepare(replace(weights, w13=wide[:, 1])).w13, expected)


def test_preparing_into_given_tensors_writes_in_place_and_refuses_another_shape():
    first, second = (random_weights("mxfp8", 256, 128) for _ in range(2))
    out = formats.prepare(first)
    address = out.w13.data_ptr()
    second = replace(second, w13=second.w13.flip(1))
    assert formats.prepare(second, out) is out and out.w13.data_ptr() == address
    assert torch.equal(out.w13, formats.prepare(second).w13)
    with pytest.raises(MoEEpConfigError, match="bf16"):
        formats.prepare(random_weights("bf16", 256, 128), out)


@pytest.mark.parametrize("name, key", [("mxfp8", "w13"), ("fp8_block", "w2")])
def test_nan_codes_are_refused_by_name_and_index(name, key):
    weights = random_weights(name, 256, 128)
    getattr(weights, key).view(torch.uint8)[1, 6, 1] = 0xFF
    with pytest.raises(MoEEpConfigError, match=rf"{key}\[1, 6, 1\].*NaN"):
        formats.prepare(weights)


def test_scales_too_far_apart_are_refused_where_codes_are_not_zero():
    weights = random_weights("mxfp4", 256, 128)
    weights.w2_sf[0, 0, 0] = 233
    weights.w2_sf[0, 4, 2] = 90
    weights.w2[0, 4, 32:48] = 0x80  # -0 and 0
    weights.w2_sf[0, 7, 3] = 90
    with pytest.raises(MoEEpConfigError, match=r"w2_sf\[0, 7, 3\].*233.*from 100"):
        formats.prepare(weights)


def test_tile_bytes_are_the_checkpoints():
    sizes = {name: fmt.tile_bytes for name, fmt in tiles.TILE_FORMATS.items()}
    assert sizes == {
        "nvfp4": 4608,
        "mxfp4": 4352,
        "mxfp8": 8448,
        "fp8_block": 8208,
        "bf16": 16384,
    }

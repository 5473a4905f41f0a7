"""From accumulators to rows of the output: scale, bias, activation, one rounding, stores.

An accumulator tile is [64 weight rows, n tokens]; a thread holds rows g and g + 8 of its warp's
16 and tokens 8 j + 2 q, 8 j + 2 q + 1. `movmatrix` transposes 8 x 8 blocks of rounded values, after
which lane 4 n + q holds token 8 j + n and two neighbouring channels (`formats.row_order` made the
rows of a tile such channels):

    paired   gate and up of one channel in one thread: 32 channels a tile, 4 bytes a lane
    plain    64 channels a tile, 8 bytes a lane
    FP32     plain and not rounded: 16 bytes a lane, both halves of a word transposed apart

Every FP32 operation is rounded by itself or is an explicit FMA, so that all token tile widths give
the same bits whatever the compiler contracts.
"""

import math

from cutlass import Constexpr, Float32, Int32, Int64, const_expr, cute, range_constexpr

from moe_ep.comm.ptx import (
    add_rn,
    byte_permute,
    cvt_bf16x2,
    ex2_approx,
    float_bits,
    fma_rn,
    max_nan,
    min_nan,
    movmatrix_trans,
    mul_rn,
    rcp_approx,
    select_below,
    st_global,
)
from moe_ep.megakernel.problem import Activation

LOG2_E = math.log2(math.e)
# Below it tanh is a polynomial: 1 - 2 / (1 + e^2x) would cancel.
TANH_SMALL = 0.25
TANH_TERMS = (62 / 2835, -17 / 315, 2 / 15, -1 / 3)


class EpilogueSm90:
    """Epilogue of one GEMM. `activation` None: the sums themselves (FC2), BF16 or FP32."""

    def __init__(
        self,
        activation: Activation | None,
        num_channels: int,
        *,
        has_bias: bool,
        is_fp32: bool = False,
    ) -> None:
        assert activation is None or not is_fp32, "an activation is rounded to BF16"
        self.activation = activation
        self.num_channels = num_channels
        self.has_bias = has_bias
        self.is_paired = activation is not None and activation.is_gated
        self.element_bytes = 4 if is_fp32 else 2

    @cute.jit
    def store_tile(
        self,
        accumulator,
        width: Constexpr,
        tile_idx: Int32,
        warp: Int32,
        lane: Int32,
        alpha,
        bias,
        num_rows: Int32,
        row_addresses,
    ):
        """One warp's part of a tile.

        alpha           (gate, up) scales of the accumulator
        bias            FP32 pointer to the expert's bias, or None
        row_addresses   address of output row 8 j + lane // 4 of the token tile, for each j
        """
        sums = cute.make_tensor(accumulator.iterator, cute.make_layout(width // 2))
        group = lane // 4
        if const_expr(self.is_paired):
            first = tile_idx * 32 + warp * 8
            held = (first + group, first + group + self.num_channels)
            stored = first + 2 * (lane % 4)
        else:
            first = tile_idx * 64 + warp * 16
            held = first + 4 * (group // 2) + group % 2
            held = (held, held + 2)
            stored = first + 4 * (lane % 4)
        offsets = [Float32(0.0), Float32(0.0)]
        if const_expr(self.has_bias):
            if first < self.num_channels:
                offsets = [Float32(bias[held[0]]), Float32(bias[held[1]])]
        scales = alpha if const_expr(self.is_paired) else (alpha[1], alpha[1])
        for j in range_constexpr(width // 8):
            values = [
                [self._scaled(sums[4 * j + 2 * r + c], scales[r], offsets[r]) for c in range(2)]
                for r in range(2)
            ]
            words = self._transposed(self._activated(values))
            if (8 * j + group < num_rows) & (stored < self.num_channels):
                st_global(row_addresses[j] + Int64(stored) * self.element_bytes, words)

    def _scaled(self, value, scale, offset):
        return fma_rn(value, scale, offset) if self.has_bias else mul_rn(value, scale)

    def _transposed(self, pairs):
        """Pairs of tokens -> pairs of channels, rounded to BF16 or as they are."""
        if self.element_bytes == 2:
            return [movmatrix_trans(cvt_bf16x2(*pair)) for pair in pairs]
        words = []
        for pair in pairs:
            first, second = (float_bits(value) for value in pair)
            low = movmatrix_trans(byte_permute(first, second, 0x5410))
            high = movmatrix_trans(byte_permute(first, second, 0x7632))
            words += [byte_permute(low, high, 0x5410), byte_permute(low, high, 0x7632)]
        return words

    def _activated(self, values):
        """values[row half][token] -> the pairs of tokens to store."""
        if self.activation is None:
            return values
        if not self.is_paired:
            return [[_square_relu(value) for value in pair] for pair in values]
        gate, up = values
        return [[_activate(self.activation, gate[c], up[c]) for c in range(2)]]


def _square_relu(value):
    value = max_nan(value, Float32(0.0))
    return mul_rn(value, value)


def _activate(activation: Activation, gate, up):
    """`Activation`'s formula on one gate and up pre-activation."""
    if activation.limit is not None:
        limit = Float32(activation.limit)
        gate = min_nan(gate, limit)
        up = min_nan(max_nan(up, Float32(-activation.limit)), limit)
    alpha, beta = activation.alpha, activation.beta
    if activation.kind == "swiglu":
        if beta != 0:
            up = add_rn(up, Float32(beta))
        return mul_rn(mul_rn(gate, _sigmoid(gate, alpha)), up)
    if activation.kind == "geglu_tanh":
        # 0.5 (1 + tanh(z)) = sigmoid(2 z)
        cube = mul_rn(mul_rn(gate, gate), gate)
        inner = fma_rn(cube, Float32(0.044715), gate)
        return mul_rn(mul_rn(gate, _sigmoid(inner, 2 * math.sqrt(2 / math.pi))), up)
    if activation.kind == "reglu":
        return mul_rn(max_nan(gate, Float32(0.0)), up)
    if activation.kind == "situ":
        if beta > 0:
            up = _scaled_tanh(up, beta)
        return mul_rn(mul_rn(_scaled_tanh(gate, alpha), _sigmoid(gate, 1.0)), up)
    raise AssertionError(activation.kind)


def _sigmoid(x, scale: float):
    """1 / (1 + exp(-scale x)), within 2 ulp of FP32 per approximate step."""
    power = ex2_approx(mul_rn(x, Float32(-scale * LOG2_E)))
    return rcp_approx(add_rn(power, Float32(1.0)))


def _scaled_tanh(x, scale: float):
    """scale * tanh(x / scale)"""
    z = mul_rn(x, Float32(1 / scale))
    square = mul_rn(z, z)
    series = Float32(TANH_TERMS[0])
    for term in TANH_TERMS[1:]:
        series = fma_rn(series, square, Float32(term))
    small = fma_rn(mul_rn(series, square), z, z)
    power = ex2_approx(mul_rn(z, Float32(2 * LOG2_E)))
    large = fma_rn(rcp_approx(add_rn(power, Float32(1.0))), Float32(-2.0), Float32(1.0))
    return mul_rn(Float32(scale), select_below(z, TANH_SMALL, small, large))

"""Inline PTX, one instruction (or one idiom that must stay together) per function.

Only kernel modules import this file: it needs CuTe DSL.
"""

import struct
from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# L2 policies of a copy, as `createpolicy` makes them for all of its lines.
EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000


def _asm(result, operands, text, constraints, loc, ip, *, pure=False):
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    return llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


# ---- integer and BF16 arithmetic ---------------------------------------------------------------


@dsl_user_op
def rotate_left(
    word: Uint32,
    num_bits: int,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """shf.l.wrap: `word` rotated left."""
    text = f"shf.l.wrap.b32 $0, $1, $1, {num_bits};"
    return Uint32(_asm(T.i32(), [word], text, "=r,r", loc, ip, pure=True))


@dsl_user_op
def select_bits(
    ones: Uint32,
    zeros: Uint32,
    mask: Uint32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """lop3: each bit from `ones` where `mask` is 1, else from `zeros`."""
    text = "lop3.b32 $0, $1, $2, $3, 0xE4;"
    return Uint32(_asm(T.i32(), [ones, zeros, mask], text, "=r,r,r,r", loc, ip, pure=True))


@dsl_user_op
def mul_bf16x2(
    pair: Uint32,
    scales: Uint32,
    half: int,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """mul.rn.bf16x2 of both halves of `pair` by one half (0 low, 1 high) of `scales`.

    ptxas folds the broadcast into the multiply's operand selector.
    """
    part = "lh"[half]
    text = (
        "{ .reg .b16 l, h; .reg .b32 t; mov.b32 {l, h}, $2; "
        f"mov.b32 t, {{{part}, {part}}}; mul.rn.bf16x2 $0, $1, t; }}"
    )
    return Uint32(_asm(T.i32(), [pair, scales], text, "=r,r,r", loc, ip, pure=True))


@dsl_user_op
def cvt_bf16x2(
    low: Float32,
    high: Float32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """cvt.rn.bf16x2.f32: two FP32 rounded into one word."""
    text = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return Uint32(_asm(T.i32(), [high, low], text, "=r,f,f", loc, ip, pure=True))


@dsl_user_op
def movmatrix_trans(
    word: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Uint32:
    """movmatrix: an 8 x 8 matrix of 16-bit elements held by a warp, transposed."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(_asm(T.i32(), [word], text, "=r,r", loc, ip))


@dsl_user_op
def byte_permute(
    first: Uint32,
    second: Uint32,
    selector: int,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Uint32:
    """prmt: bytes 0-3 are `first`'s, 4-7 `second`'s; nibbles of `selector` pick, lowest first."""
    text = f"prmt.b32 $0, $1, $2, {selector:#06x};"
    return Uint32(_asm(T.i32(), [first, second], text, "=r,r,r", loc, ip, pure=True))


# ---- FP32 ---------------------------------------------------------------------------------------


def _unary(instruction: str):
    @dsl_user_op
    def op(
        x: Float32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
    ) -> Float32:
        return Float32(_asm(T.f32(), [x], f"{instruction} $0, $1;", "=f,f", loc, ip, pure=True))

    op.__doc__ = f"{instruction}"
    return op


def _binary(instruction: str):
    @dsl_user_op
    def op(
        x: Float32,
        y: Float32,
        *,
        loc: ir.Location | None = None,
        ip: ir.InsertionPoint | None = None,
    ) -> Float32:
        text = f"{instruction} $0, $1, $2;"
        return Float32(_asm(T.f32(), [x, y], text, "=f,f,f", loc, ip, pure=True))

    op.__doc__ = f"{instruction}"
    return op


ex2_approx = _unary("ex2.approx.f32")
rcp_approx = _unary("rcp.approx.f32")
# NaN in, NaN out: plain min and max drop it.
min_nan = _binary("min.NaN.f32")
max_nan = _binary("max.NaN.f32")
# Rounded by themselves: nothing may contract them to an FMA.
mul_rn = _binary("mul.rn.f32")
add_rn = _binary("add.rn.f32")


@dsl_user_op
def fma_rn(
    x: Float32,
    y: Float32,
    z: Float32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Float32:
    """fma.rn.f32: x * y + z, rounded once."""
    text = "fma.rn.f32 $0, $1, $2, $3;"
    return Float32(_asm(T.f32(), [x, y, z], text, "=f,f,f,f", loc, ip, pure=True))


@dsl_user_op
def select_below(
    x: Float32,
    limit: float,
    below: Float32,
    other: Float32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> Float32:
    """setp and selp: `below` where |x| < limit, else `other` (also for NaN)."""
    bits = struct.pack(">f", limit).hex().upper()
    text = (
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; "
        f"setp.lt.f32 p, a, 0f{bits}; selp.f32 $0, $2, $3, p; }}"
    )
    return Float32(_asm(T.f32(), [x, below, other], text, "=f,f,f,f", loc, ip, pure=True))


@dsl_user_op
def as_float(
    word: Uint32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Float32:
    """The FP32 number with those bits."""
    return Float32(_asm(T.f32(), [word], "mov.b32 $0, $1;", "=f,r", loc, ip, pure=True))


@dsl_user_op
def float_bits(
    value: Float32, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> Uint32:
    """The bits of an FP32 number."""
    return Uint32(_asm(T.i32(), [value], "mov.b32 $0, $1;", "=r,f", loc, ip, pure=True))


# ---- memory -------------------------------------------------------------------------------------


@dsl_user_op
def st_global(
    address: Int64,
    words: Sequence[Uint32],
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """st.global of 1, 2 or 4 words; `address` is aligned to their size."""
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    vector, value = ("", names) if count == 1 else (f".v{count}", f"{{{names}}}")
    text = f"st.global{vector}.b32 [$0], {value};"
    _asm(None, [address, *words], text, "l" + ",r" * count + ",~{memory}", loc, ip)


@dsl_user_op
def st_shared_v4(
    address: Int32,
    words: Sequence[Uint32],
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """st.shared.v4.b32; `address` is aligned to 16 bytes."""
    text = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm(None, [address, *words], text, "r,r,r,r,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_copy_g2s(
    dst_smem: Int32,
    src: Int64,
    num_bytes: Int32,
    mbarrier: Int32,
    policy: int | Int64 = EVICT_NORMAL,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """cp.async.bulk global -> shared; completes `num_bytes` (a multiple of 16) on `mbarrier`.
    `policy`: what L2 does with the lines."""
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    operands = [dst_smem, src, num_bytes, mbarrier, Int64(policy)]
    _asm(None, operands, f"{name} [$0], [$1], $2, [$3], $4;", "r,l,r,r,l,~{memory}", loc, ip)


@dsl_user_op
def bulk_copy_s2g(
    dst: Int64,
    src_smem: Int32,
    num_bytes: Int32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """cp.async.bulk shared -> global, in this thread's open bulk group; 16-byte multiples."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(None, [dst, src_smem, num_bytes], text, "l,r,r,~{memory}", loc, ip)


# ---- 16-byte rows: permutation and combine ------------------------------------------------------


@dsl_user_op
def ld_global_v4(
    address: Int64, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> tuple[Uint32, ...]:
    """ld.global.v4.b32: 4 words; `address` is aligned to 16 bytes."""
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    loaded = _asm(struct, [address], text, "=r,=r,=r,=r,l,~{memory}", loc, ip)
    return tuple(Uint32(llvm.extractvalue(T.i32(), loaded, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def ld_global_v4_once(
    address: Int64, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> tuple[Uint32, ...]:
    """`ld_global_v4` of what nobody reads again: its lines are the first that leave L2."""
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    text = "ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], $5;"
    operands = [address, Int64(EVICT_FIRST)]
    loaded = _asm(struct, operands, text, "=r,=r,=r,=r,l,l,~{memory}", loc, ip)
    return tuple(Uint32(llvm.extractvalue(T.i32(), loaded, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def bulk_prefetch_l2(
    address: Int64,
    num_bytes: Int32,
    *,
    loc: ir.Location | None = None,
    ip: ir.InsertionPoint | None = None,
) -> None:
    """cp.async.bulk.prefetch.L2 of `num_bytes`, a multiple of 16."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    _asm(None, [address, num_bytes], text, "l,r,~{memory}", loc, ip)


@dsl_user_op
def prefetch_l2(
    address: Int64, *, loc: ir.Location | None = None, ip: ir.InsertionPoint | None = None
) -> None:
    """prefetch.global.L2 of the line at `address`."""
    _asm(None, [address], "prefetch.global.L2 [$0];", "l", loc, ip)

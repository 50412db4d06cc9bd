"""PTX instructions for arithmetic and for the tensor cores; as in ptx.py, each function is one
instruction or a short fixed sequence."""

from cutlass import Float32, Int64, Uint32

from .ptx import asm

# a, b = the two bf16 of the packed word $1, low half first
_SPLIT = (
    ".reg .f32 a, b; .reg .b32 t; shl.b32 t, $1, 16; mov.b32 a, t; "
    "and.b32 t, $1, 0xffff0000; mov.b32 b, t; "
)


def bits(value):
    return asm("mov.b32 $0, $1;", (value,), (Uint32,), pure=True)


def float_of(word):
    return asm("mov.b32 $0, $1;", (word,), (Float32,), pure=True)


def widen_bf16(half):
    return asm(
        "{ .reg .b16 z; mov.u16 z, 0; mov.b32 $0, {z, $1}; }", (half,), (Float32,), pure=True
    )


def round_bf16(value):
    return asm(
        "{ .reg .b16 h, z; mov.u16 z, 0; cvt.rn.bf16.f32 h, $1; mov.b32 $0, {z, h}; }",
        (value,),
        (Float32,),
        pure=True,
    )


def bf16_bits(value):
    """The value rounded to bf16, in the low half of the word."""
    return asm(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", (value,), (Uint32,), pure=True
    )


def bf16_pair(low, high):
    """Both values rounded to bf16, packed."""
    return asm("cvt.rn.bf16x2.f32 $0, $2, $1;", (low, high), (Uint32,), pure=True)


def sum_squares(pair, total):
    """total + lo * lo + hi * hi of a bf16 pair.

    Splits with prmt where `norm_pair` shifts: with equal instructions the assembler would keep both
    widened halves in registers from here to there, twice the packed form, and spill."""
    code = "{ .reg .f32 a, b; .reg .b32 t; prmt.b32 t, $1, 0, 0x1044; mov.b32 a, t; "
    code += (
        "prmt.b32 t, $1, 0, 0x3244; mov.b32 b, t; fma.rn.f32 a, a, a, $2; fma.rn.f32 $0, b, b, a; }"
    )
    return asm(code, (pair, total), (Float32,), pure=True)


def norm_pair(pair, gamma, rr):
    """bf16((x * rr) * gamma) of both halves: two roundings to fp32, then one to bf16."""
    code = "{ " + _SPLIT + ".reg .f32 c, d; shl.b32 t, $2, 16; mov.b32 c, t; "
    code += "and.b32 t, $2, 0xffff0000; mov.b32 d, t; mul.rn.f32 a, a, $3; mul.rn.f32 b, b, $3; "
    code += "mul.rn.f32 a, a, c; mul.rn.f32 b, b, d; cvt.rn.bf16x2.f32 $0, b, a; }"
    return asm(code, (pair, gamma, rr), (Uint32,), pure=True)


def f16_pair(low, high):
    """Both values rounded to fp16, packed."""
    return asm("cvt.rn.f16x2.f32 $0, $2, $1;", (low, high), (Uint32,), pure=True)


def permute(low, high, selector):
    """Four of the eight bytes of two words; a nibble of `selector` names each."""
    return asm("prmt.b32 $0, $1, $2, $3;", (low, high, Uint32(selector)), (Uint32,), pure=True)


def reciprocal_sqrt(value):
    return asm("rsqrt.approx.f32 $0, $1;", (value,), (Float32,), pure=True)


def multiply(left, right):
    """Rounded to nearest, subnormals kept, never contracted into an fma."""
    return asm("mul.rn.f32 $0, $1, $2;", (left, right), (Float32,), pure=True)


def fma(left, right, addend):
    return asm("fma.rn.f32 $0, $1, $2, $3;", (left, right, addend), (Float32,), pure=True)


def twice_positive(value):
    """2 * max(value, 0), NaN for NaN: an addition runs at twice the rate of a maximum, which would
    also make 0 of NaN."""
    code = "{ .reg .f32 t; abs.f32 t, $1; add.rn.f32 $0, $1, t; }"
    return asm(code, (value,), (Float32,), pure=True)


def max_u32(left, right):
    return asm("max.u32 $0, $1, $2;", (left, right), (Uint32,), pure=True)


def max_u16x2(left, right):
    return asm("max.u16x2 $0, $1, $2;", (left, right), (Uint32,), pure=True)


def multiply_bf16_pair(left, right):
    """Two products, rounded to nearest, subnormals kept."""
    return asm("mul.rn.bf16x2 $0, $1, $2;", (left, right), (Uint32,), pure=True)


def e4m3_pair(low, high):
    """Two e4m3fn codes, nearest even and saturating; NaN gives 0x7f."""
    code = "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, $2, $1; cvt.u32.u16 $0, t; }"
    return asm(code, (low, high), (Uint32,), pure=True)


def e2m1_word(values):
    """Four e2m1 codes in 16 bits, nearest even, the sign kept on zero; sm_100a and later."""
    code = "{ .reg .b8 p, q; cvt.rn.satfinite.e2m1x2.f32 p, $2, $1; "
    code += (
        "cvt.rn.satfinite.e2m1x2.f32 q, $4, $3; mov.b32 $0, {p, q, p, q}; and.b32 $0, $0, 0xffff; }"
    )
    return asm(code, tuple(values), (Uint32,), pure=True)


# Tensor cores -------------------------------------------------------------------------------------


def mma_16x8x16(accumulator, a, b):
    """accumulator[16, 8] + a[16, 16] b[16, 8] in bf16, this lane's part of each."""
    code = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    code += "{$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
    return asm(code, (*accumulator, *a, *b), (Float32,) * 4, pure=True)


def wgmma_64xnx64(accumulator, a, b, columns):
    """Starts accumulator[64, n] += a[64, 64] b[n, 64]^T as one group of four wgmma; `a`, `b` are
    descriptors."""
    count = len(accumulator)
    registers = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    step = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {registers}, "
    step += "a, b, 1, 1, 1, 0, 0; "
    code = f"{{ .reg .b64 a, b; mov.b64 a, ${2 * count}; mov.b64 b, ${2 * count + 1}; "
    code += "wgmma.fence.sync.aligned; "
    # The next 16 columns lie 32 bytes further; descriptors count in 16 bytes.
    code += "add.s64 a, a, 2; add.s64 b, b, 2; ".join([step] * 4)
    code += "wgmma.commit_group.sync.aligned; }"
    return asm(code, (*accumulator, a, b), (Float32,) * count, tied=count)


def wgmma_64xnx128_e4m3(a, b, columns):
    """Starts a[64, 128] b[columns, 128]^T of e4m3 codes as one group of four wgmma and returns the
    accumulator; `a`, `b` are descriptors."""
    count = columns // 2
    registers = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    step = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {registers}, a, b, p, 1, 1; "
    )
    code = f"{{ .reg .b64 a, b; .reg .pred p; mov.b64 a, ${count}; mov.b64 b, ${count + 1}; "
    code += "setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned; "
    # The next 32 columns lie 32 bytes further; descriptors count in 16 bytes.
    advance = "add.s64 a, a, 2; add.s64 b, b, 2; "
    code += step + "setp.eq.b32 p, 0, 0; " + advance + advance.join([step] * 3)
    code += "wgmma.commit_group.sync.aligned; }"
    return asm(code, (a, b), (Float32,) * count, early=True)


def wgmma_64xnx128_bf16(a, b, columns):
    """Starts a[64, 128] b[columns, 128]^T of bf16 as one group of eight wgmma and returns the
    accumulator. `a` are the registers of the eight steps, four each; `b` is the descriptor of the
    first of two halves of 64 columns of b."""
    count = columns // 2
    registers = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    code = f"{{ .reg .b64 b; .reg .pred p; mov.b64 b, ${count + 32}; "
    code += "setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned; "
    for step in range(8):
        operand = "{" + ",".join(f"${count + 4 * step + i}" for i in range(4)) + "}"
        code += f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {registers}, "
        code += f"{operand}, b, p, 1, 1, 0; "
        if step == 0:
            code += "setp.eq.b32 p, 0, 0; "
        # The next 16 columns lie 32 bytes further, the other half behind all rows of the first;
        # descriptors count in 16 bytes.
        code += f"add.s64 b, b, {2 if step != 3 else columns * 8 - 6}; "
    code += "wgmma.commit_group.sync.aligned; }"
    return asm(code, (*a, b), (Float32,) * count, early=True)


def wgmma_wait(accumulator, pending):
    """Waits until at most `pending` groups run; the accumulator passes through, so that its reads
    stay behind."""
    count = len(accumulator)
    return asm(
        f"wgmma.wait_group.sync.aligned {pending};",
        tuple(accumulator),
        (Float32,) * count,
        tied=count,
    )


def swizzled_descriptor(shared):
    """K-major operand in shared memory, 128-byte swizzle, groups of 8 rows 1,024 bytes apart."""
    return ((Int64(shared) & 0x3FFFF) >> 4) | Int64((1 << 16) | (64 << 32) | (1 << 62))

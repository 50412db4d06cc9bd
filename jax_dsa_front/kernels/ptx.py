"""PTX instructions that the kernels use and CuTe DSL does not offer in the exact form they need:
barriers, copies and memory here, the others in arithmetic.py.

Every function is one instruction or a short fixed sequence. Addresses are integers: 32 bits for
shared memory (of this CTA, or of the cluster where `cluster` is in the name), 64 bits for global
memory.  Functions without side effects are marked `pure`, so that the compiler may move or drop
them; the others keep their order among each other.
Instructions that a whole warp must execute together (shuffles, reductions, barriers inside a CTA)
are the DSL's own, which the compiler knows not to duplicate into diverging branches.
"""

from cutlass import Float32, Int16, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_CONSTRAINT = {Float32: "f", Uint32: "r", Int32: "r", Int64: "l", Int16: "h"}


@dsl_user_op
def asm(code, operands=(), results=(), *, pure=False, tied=0, early=False, loc=None, ip=None):
    """Inlines `code`; `$0..` are the results, then the operands, of which the first `tied` share a
    result's register.

    `early` marks results that are written before every operand has been read.
    """
    constraints = [("=&" if early else "=") + _CONSTRAINT[t] for t in results]
    constraints += [str(i) if i < tied else _CONSTRAINT[type(o)] for i, o in enumerate(operands)]
    if not pure:
        constraints.append("~{memory}")
    types = [t.mlir_type for t in results]
    result_type = None
    if types:
        result_type = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    value = llvm.inline_asm(
        result_type,
        [o.ir_value(loc=loc, ip=ip) for o in operands],
        code,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(types) <= 1:
        return results[0](value) if types else None
    return [
        t(llvm.extractvalue(m, value, [i], loc=loc, ip=ip))
        for i, (t, m) in enumerate(zip(results, types, strict=True))
    ]


# Barriers -----------------------------------------------------------------------------------------


def mbarrier_init(bar, arrivals):
    asm("mbarrier.init.shared::cta.b64 [$0], $1;", (Int32(bar), Int32(arrivals)))


def mbarrier_init_fence():
    asm("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive(bar):
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", (Int32(bar),))


def mbarrier_arrive_cluster(bar):
    """On a barrier of any CTA of the cluster (`peer_address`); orders nothing: release would be a
    fence of the whole GPU."""
    asm("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [$0];", (Int32(bar),))


def mbarrier_expect(bar, nbytes):
    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", (Int32(bar), Int32(nbytes)))


def mbarrier_wait(bar, parity, scope="cta"):
    """Waits for the phase; `scope` is "cluster" where a peer's stores complete it."""
    asm(
        "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire."
        + scope
        + ".shared::cta.b64 p, [$0], $1; @!p bra WAIT; }",
        (Int32(bar), Int32(parity)),
    )


def cluster_arrive_relaxed():
    asm("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait():
    asm("barrier.cluster.wait.acquire.aligned;")


def fence_async_shared():
    """Makes this thread's shared-memory stores visible to wgmma and the copy engine."""
    asm("fence.proxy.async.shared::cta;")


# Copies and memory --------------------------------------------------------------------------------


def evict_first_policy():
    """L2 policy for bytes that are read once: the weights of a layer are not needed again before
    the next step."""
    return asm("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", (), (Int64,), pure=True)


def evict_normal_policy():
    return asm("createpolicy.fractional.L2::evict_normal.b64 $0, 1.0;", (), (Int64,), pure=True)


def evict_last_policy():
    """For what the next kernel reads."""
    return asm("createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", (), (Int64,), pure=True)


def bulk_copy(shared, source, nbytes, bar, policy=None):
    operands = (Int32(shared), Int64(source), Int32(nbytes), Int32(bar))
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    if policy is None:
        asm(code + " [$0], [$1], $2, [$3];", operands)
    else:
        asm(code + ".L2::cache_hint [$0], [$1], $2, [$3], $4;", (*operands, policy))


def bulk_copy_multicast(shared, source, nbytes, bar, ctas):
    """To the same place in each CTA of the cluster whose bit is set, counted on its own barrier."""
    code = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    code = "{ .reg .b16 m; cvt.u16.u32 m, $4; " + code + " [$0], [$1], $2, [$3], m; }"
    asm(code, (Int32(shared), Int64(source), Int32(nbytes), Int32(bar), Int32(ctas)))


def tensor_copy_2d(shared, tensor_map, column, row, bar):
    code = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    operands = (Int32(shared), Int64(tensor_map), Int32(column), Int32(row), Int32(bar))
    asm(code + " [$0], [$1, {$2,$3}], [$4];", operands)


def tensor_copy_4d(shared, tensor_map, outer, bar, policy):
    """The box at (0, 0, *outer)."""
    code = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    code += ".L2::cache_hint [$0], [$1, {$6,$6,$2,$3}], [$4], $5;"
    second, third = outer
    operands = (Int32(shared), Int64(tensor_map), Int32(second), Int32(third), Int32(bar))
    asm(code, (*operands, policy, Int32(0)))


def prefetch_tensor_map(tensor_map):
    asm("prefetch.tensormap [$0];", (Int64(tensor_map),))


def peer_address(shared, rank):
    """The address in the cluster of `shared` in CTA `rank`."""
    return asm(
        "mapa.shared::cluster.u32 $0, $1, $2;", (Int32(shared), Int32(rank)), (Int32,), pure=True
    )


def store_cluster_async(address, word, bar):
    """Stores 4 bytes in a CTA of the cluster and counts them on its barrier."""
    asm(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];",
        (Int32(address), word, Int32(bar)),
    )


def store_cluster_async_f32x2(address, first, second, bar):
    asm(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$1,$2}, [$3];",
        (Int32(address), first, second, Int32(bar)),
    )


def load_global_16b_if(address, predicate):
    """Zeros where the predicate is false; nothing is read then."""
    code = "{ .reg .pred q; setp.ne.s32 q, $5, 0; "
    code += "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    code += "@q ld.global.v4.u32 {$0,$1,$2,$3}, [$4]; }"
    return asm(code, (Int64(address), Int32(predicate)), (Uint32,) * 4, early=True)


def load_global_f32x4(address):
    return asm("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", (Int64(address),), (Float32,) * 4)


def load_global_i32(address):
    return asm("ld.global.s32 $0, [$1];", (Int64(address),), (Int32,))


def load_global_i64(address):
    return asm("ld.global.s64 $0, [$1];", (Int64(address),), (Int64,))


def load_global_words(base, index, is_wide):
    """Element `index` of an array of 4-byte integers, or of 8-byte ones if `is_wide` is not 0: (low
    word, high word or 0), both as they came, so that nothing waits for them here."""
    code = "{ .reg .pred p; .reg .b64 a; .reg .b32 s; setp.ne.s32 p, $4, 0; "
    code += "selp.b32 s, 3, 2, p; shl.b64 a, $3, s; add.s64 a, a, $2; mov.b32 $1, 0; "
    code += "ld.global.b32 $0, [a]; @p ld.global.b32 $1, [a+4]; }"
    return asm(code, (Int64(base), Int64(index), Int32(is_wide)), (Int32, Int32), early=True)


def load_global_16bit(address):
    """Two bytes, kept as they came: widening them here would make the warp wait for them here."""
    return asm("ld.global.u16 $0, [$1];", (Int64(address),), (Int16,))


def store_global_16b(address, words):
    asm("st.global.v4.u32 [$0], {$1,$2,$3,$4};", (Int64(address), *words))


def store_global_f32(address, value, policy=None):
    if policy is None:
        return asm("st.global.f32 [$0], $1;", (Int64(address), value))
    asm("st.global.L2::cache_hint.f32 [$0], $1, $2;", (Int64(address), value, policy))


def store_global_u32(address, word):
    asm("st.global.u32 [$0], $1;", (Int64(address), word))


def store_global_words(address, words):
    """One word, or two as one store."""
    if len(words) == 1:
        return store_global_u32(address, words[0])
    asm("st.global.v2.u32 [$0], {$1,$2};", (Int64(address), *words))


def store_global_u16(address, word):
    asm("{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.b16 [$0], t; }", (Int64(address), word))


def store_global_u8(address, word):
    asm("st.global.u8 [$0], $1;", (Int64(address), word))


def load_shared_16b(address):
    return asm("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", (Int32(address),), (Uint32,) * 4)


def load_shared_i32(address):
    return asm("ld.shared.s32 $0, [$1];", (Int32(address),), (Int32,))


def load_shared_i32x4(address):
    return asm("ld.shared.v4.s32 {$0,$1,$2,$3}, [$4];", (Int32(address),), (Int32,) * 4)


def load_shared_u32(address):
    return asm("ld.shared.u32 $0, [$1];", (Int32(address),), (Uint32,))


def load_shared_f32(address):
    return asm("ld.shared.f32 $0, [$1];", (Int32(address),), (Float32,))


def load_shared_f32x2(address):
    return asm("ld.shared.v2.f32 {$0,$1}, [$2];", (Int32(address),), (Float32,) * 2)


def load_shared_f32x4(address):
    return asm("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", (Int32(address),), (Float32,) * 4)


def store_shared_i32(address, word):
    asm("st.shared.s32 [$0], $1;", (Int32(address), Int32(word)))


def store_shared_u32(address, word):
    asm("st.shared.u32 [$0], $1;", (Int32(address), word))


def store_shared_f32(address, value):
    asm("st.shared.f32 [$0], $1;", (Int32(address), value))


def store_shared_f32x2(address, first, second):
    asm("st.shared.v2.f32 [$0], {$1,$2};", (Int32(address), first, second))


def store_shared_16b(address, words):
    asm("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", (Int32(address), *words))

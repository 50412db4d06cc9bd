"""The front kernels' parameter list, and what every schedule reads of it: layer, heads, weights."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import arithmetic, ptx
from ..arithmetic import multiply

HEAD_DIM = 128

# Bits of FrontArguments.flags (csrc_glue/front_params.h has the same)
FLAG_SLOTS_64 = 1
FLAG_HEAD_WEIGHTS_F32 = 2
FLAG_WEIGHTS_F32 = 4
FLAG_MXFP8 = 8
FLAG_MXFP4 = 16


class FrontArguments(NamedTuple):
    """The kernels' parameters in the order of csrc_glue/front_params.h.

    Int64 members are device addresses unless said otherwise; pitches and strides are in bytes.
    `key`, `head_weights` and the stacked operands come with the host's offsets (columns, a layer
    that the host knows) already added."""

    # What the first loads need, together: parameters come from a cold constant cache, 64 bytes at a
    # time
    projected: Int64  # bf16 [batch, >= K], 16-byte aligned rows
    q_norm: Int64  # bf16 [K]
    wq_b: Int64  # bf16 [heads * 128, K]
    layer: Int64  # i32 scalar, or 0: no layer operand
    projected_pitch: Int32
    batch: Int32
    num_layers: Int32
    flags: Int32
    q_norm_layer_stride: Int32  # the strides are 0 for operands that are not stacked
    wq_b_layer_rows: Int32  # rows of wq_b from one layer to the next

    eps: Float32
    key_eps: Float32
    weight_scale: Float32
    head_weights_pitch: Int32
    head_weights: Int64  # bf16 or f32 [batch, heads]
    head_start: Int64  # i32 scalar, or 0: no head_start operand
    query: Int64  # e4m3fn [batch, heads, 128], or packed e2m1 [batch, heads, 64]
    query_scale: Int64  # u32 [batch, heads] (mxfp4)
    weights: Int64  # bf16 or f32 [batch, heads]
    key: Int64  # bf16 [batch, 128]
    key_norm_weight: Int64  # f32 [128]
    key_norm_bias: Int64  # f32 [128]
    cache: Int64  # u8 [pages, page_size * 132 or 68]
    slots: Int64  # i32 or i64 [batch]
    num_slots: Int64  # pages * page_size
    cache_layer_stride: Int64
    key_pitch: Int32
    page_size: Int32
    key_norm_weight_layer_stride: Int32
    key_norm_bias_layer_stride: Int32
    rows: Int64  # scratch: bf16 [batch, K], the normalised rows between two launches
    head_start_limit: Int32  # num_heads of the model - heads of this call


def front_arguments(**given):
    """The parameters with these values; 0, which stands for absent operands, for all others."""
    kinds = FrontArguments.__annotations__
    return FrontArguments(**{name: kind(given.get(name, 0)) for name, kind in kinds.items()})


@cute.jit
def chosen_layer(arguments):
    """(layer clamped to the stack, 1 if it lies in the stack); (0, 1) without a layer operand."""
    layer, inside = Int32(0), Int32(1)
    if arguments.layer != 0:
        wanted = ptx.load_global_i32(arguments.layer)
        layer = cutlass.max(Int32(0), cutlass.min(wanted, arguments.num_layers - 1))
        if wanted != layer:
            inside = Int32(0)
    return layer, inside


@cute.jit
def first_head(arguments):
    """Column of this call's head 0 among the head weights, relative to `arguments.head_weights`."""
    start = Int32(0)
    if arguments.head_start != 0:
        wanted = ptx.load_global_i32(arguments.head_start)
        start = cutlass.max(Int32(0), cutlass.min(wanted, arguments.head_start_limit))
    return start


def load_head_weight(arguments, row, column):
    """The raw bytes of a head weight as (4-byte word, 2-byte word), one of them zero;
    `store_weight` joins them.

    Joining or widening here would make the warp wait here, behind the weight stream: 4 k clocks at
    B = 64."""
    is_f32 = arguments.flags & FLAG_HEAD_WEIGHTS_F32
    width = 2 + is_f32  # 2 or 4 bytes, as the flag's value is 2
    address = arguments.head_weights + Int64(row) * arguments.head_weights_pitch + column * width
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
    code += "@p ld.global.b32 $0, [$2]; @!p ld.global.u16 $1, [$2]; }"
    return ptx.asm(code, (address, is_f32), (Uint32, Uint32), early=True)


@cute.jit
def store_weight(arguments, index, raw, scale):
    """weights[index] = (head weight * scale) * weight_scale, with index = row * heads + head."""
    head_weight = arithmetic.float_of(raw[0] | (raw[1] << 16))
    value = multiply(multiply(head_weight, scale), arguments.weight_scale)
    if (arguments.flags & FLAG_WEIGHTS_F32) != 0:
        ptx.store_global_f32(arguments.weights + index * 4, value)
    else:
        ptx.store_global_u16(arguments.weights + index * 2, arithmetic.bf16_bits(value))

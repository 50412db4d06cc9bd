"""The key of a row: normalised, quantised and put into its page, by one warp.

The numbers are those of _front/reference.py; all arithmetic is fp32."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from .. import arithmetic, ptx
from ..arithmetic import multiply
from ..cta import lane_max, lane_sum
from .arguments import FLAG_MXFP4, FLAG_MXFP8, FLAG_SLOTS_64, HEAD_DIM
from .quantise import FP8_KEY_FLOOR, fp4_codes, fp4_scale, fp8_scale, fp8_word, largest


@cute.jit
def insert_key(arguments, row, layer, inside, lane, converts_fp4: cutlass.Constexpr = False):
    """Normalises, quantises and stores the key of one row; one warp, 4 columns a lane."""
    slot = Int64(0)
    if (arguments.flags & FLAG_SLOTS_64) != 0:
        slot = ptx.load_global_i64(arguments.slots + Int64(row) * 8)
    else:
        slot = Int64(ptx.load_global_i32(arguments.slots + Int64(row) * 4))
    if (inside != 0) & (slot >= 0) & (slot < arguments.num_slots):
        key = arguments.key + Int64(row) * arguments.key_pitch + lane * 8
        gain = arguments.key_norm_weight + Int64(layer) * arguments.key_norm_weight_layer_stride
        shift = arguments.key_norm_bias + Int64(layer) * arguments.key_norm_bias_layer_stride
        raw = [ptx.load_global_16bit(key + 2 * i) for i in range(4)]  # any column: 2-byte aligned
        gain = ptx.load_global_f32x4(gain + lane * 16)
        shift = ptx.load_global_f32x4(shift + lane * 16)
        values = [arithmetic.widen_bf16(half) for half in raw]
        total = ((values[0] + values[1]) + values[2]) + values[3]
        total = lane_sum(total)
        centred = [value - total * Float32(1 / HEAD_DIM) for value in values]
        total = (
            (centred[0] * centred[0] + centred[1] * centred[1]) + centred[2] * centred[2]
        ) + centred[3] * centred[3]
        total = lane_sum(total)
        rr = arithmetic.reciprocal_sqrt(total * Float32(1 / HEAD_DIM) + arguments.key_eps)
        values = [
            arithmetic.round_bf16(multiply(centred[i], rr) * gain[i] + shift[i]) for i in range(4)
        ]
        amax = largest(values)

        page = slot // Int64(arguments.page_size)
        token = Int32(slot - page * Int64(arguments.page_size))
        base = arguments.cache + Int64(layer) * arguments.cache_layer_stride
        if (arguments.flags & FLAG_MXFP4) != 0:
            exponent, inverse = fp4_scale(lane_max(amax, (1, 2, 4)))  # 8 lanes hold a group
            base = base + page * (Int64(arguments.page_size) * 68)
            word = fp4_codes(values, inverse, converts_fp4)
            ptx.store_global_u16(base + Int64(token) * 64 + lane * 2, word)
            if lane % 8 == 0:
                scales = base + Int64(arguments.page_size) * 64
                ptx.store_global_u8(scales + Int64(token) * 4 + lane // 8, exponent)
        else:
            scale, inverse = fp8_scale(
                arithmetic.max_u32(cute.arch.warp_redux_sync(amax, "max"), Uint32(FP8_KEY_FLOOR))
            )
            base = base + page * (Int64(arguments.page_size) * 132)
            ptx.store_global_u32(base + Int64(token) * 128 + lane * 4, fp8_word(values, inverse))
            if lane == 0:
                if (arguments.flags & FLAG_MXFP8) != 0:
                    scale = (scale >> 23) * Uint32(0x01010101)
                scales = base + Int64(arguments.page_size) * 128
                ptx.store_global_u32(scales + Int64(token) * 4, scale)

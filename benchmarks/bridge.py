"""`index_front` through `cutlass.jax.cutlass_call`, for side_by_side.py: the kernel source of this
package (`split_n`; fp8, nothing stacked) behind the thinnest launcher that the bridge takes."""

from functools import cache, partial

import cutlass.cute as cute
import jax
import jax.numpy as jnp
from cutlass import Constexpr, Int32
from cutlass.jax import cutlass_call

from jax_dsa_front import IndexFront
from jax_dsa_front.kernels.front.arguments import front_arguments
from jax_dsa_front.kernels.front.split_n import CLUSTER, THREADS, TILE, SplitN

# The name of the shipped kernel: under another one ptxas makes other machine code of the same PTX.
NAME = "index_front_sm_90a_k1536_split_n_b8"
SplitN.kernel.set_name_prefix(NAME, remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch(
    stream,
    projected,
    q_norm,
    wq_b,
    key_norm_weight,
    key_norm_bias,
    cache,
    slots,
    query,
    weights,
    k: Constexpr,
    weight_scale: Constexpr,
    key_offset: Constexpr,
    weight_offset: Constexpr,
    eps: Constexpr,
    key_eps: Constexpr,
):
    batch, width = projected.shape
    pages, page_size, _ = cache.shape
    rows = projected.iterator.toint()
    arguments = front_arguments(
        projected=rows,
        q_norm=q_norm.iterator.toint(),
        wq_b=wq_b.iterator.toint(),
        projected_pitch=2 * width,
        batch=batch,
        eps=eps,
        key_eps=key_eps,
        weight_scale=weight_scale,
        head_weights_pitch=2 * width,
        head_weights=rows + 2 * weight_offset,
        query=query.iterator.toint(),
        weights=weights.iterator.toint(),
        key=rows + 2 * key_offset,
        key_norm_weight=key_norm_weight.iterator.toint(),
        key_norm_bias=key_norm_bias.iterator.toint(),
        cache=cache.iterator.toint(),
        slots=slots.iterator.toint(),
        num_slots=pages * page_size,
        key_pitch=2 * width,
        page_size=page_size,
    )
    SplitN(k).kernel(arguments).launch(
        grid=(CLUSTER, wq_b.shape[0] // 128, (Int32(batch) + TILE - 1) // TILE),
        block=(THREADS, 1, 1),
        cluster=(CLUSTER, 1, 1),
        stream=stream,
        min_blocks_per_mp=2,
        preferred_smem_carveout=100,
    )


@cache
def bridged(batch, heads, k, cache_shape, compile_key, **scalars):
    """One `cutlass_call` per shape, so that call sites share JAX's tracing of it."""
    query = jax.ShapeDtypeStruct((batch, heads, 128), jnp.float8_e4m3fn)
    weights = jax.ShapeDtypeStruct((batch, heads), jnp.bfloat16)
    return cutlass_call(
        launch,
        output_shape_dtype=(query, weights, jax.ShapeDtypeStruct(cache_shape, jnp.uint8)),
        input_output_aliases={5: 2},
        compile_key=compile_key,
        k=k,
        weight_scale=(heads * 128) ** -0.5,
        **scalars,
    )


def index_front(*operands, compile_key=None, implementation=None, **scalars):
    """`jax_dsa_front.index_front` for these operands; `implementation` is there to be ignored."""
    (batch, _), (rows, k), cache_shape = (operands[i].shape for i in (0, 2, 5))
    call = bridged(batch, rows // 128, k, cache_shape, compile_key, **scalars)
    query, weights, kv_cache = call(*operands)
    return IndexFront(query, None, weights, kv_cache)


# With the key that spares the bridge generating the IR of a call that it has compiled before
keyed_front = partial(index_front, compile_key=NAME)

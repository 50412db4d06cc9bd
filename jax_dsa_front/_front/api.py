"""The public operator `index_front`."""

from typing import Any, Literal, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from jax_dsa_front._front.checks import front_arguments
from jax_dsa_front._front.lowering import OPERATOR
from jax_dsa_front._operator import explains

Index = jax.Array | int
Implementation = Literal["cuda", "jnp"]


class IndexFront(NamedTuple):
    """What `index_front` returns; B rows, H heads.

    query        float8_e4m3fn [B, H, 128], or for mxfp4 uint8 [B, H, 64] (column 2j in the low
                 nibble of byte j, 2j+1 in the high one)
    query_scale  None, or for mxfp4 uint32 [B, H]: four UE8M0 exponents, columns 0..31 lowest
    weights      [B, H] in `weights_dtype`; for fp8 and mxfp8 the query's scale is folded in
    cache        the updated cache
    """

    query: jax.Array
    query_scale: jax.Array | None
    weights: jax.Array
    cache: jax.Array


jax.export.register_namedtuple_serialization(IndexFront, serialized_name="jax_dsa_front.IndexFront")


@explains(OPERATOR, front_arguments)
def index_front(
    projected: jax.Array,
    q_norm: jax.Array,
    wq_b: jax.Array,
    key_norm_weight: jax.Array,
    key_norm_bias: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    layer: Index | None = None,
    *,
    key: jax.Array | None = None,
    head_weights: jax.Array | None = None,
    key_offset: int,
    weight_offset: int,
    eps: float,
    key_eps: float,
    cache_format: str,
    weights_dtype: Any = jnp.bfloat16,
    num_heads: int | None = None,
    head_start: Index = 0,
    weight_scale: float | None = None,
    implementation: Implementation | None = None,
) -> IndexFront:
    """Indexer query, head weights and cached key of DeepSeek Sparse Attention, for one decode step.

        y       = bf16((x * rsqrt(mean(x * x) + eps)) * q_norm)         x = projected[:, :K]
        q       = bf16(y @ wq_b.T)                                      H heads of 128
        query   = e4m3fn(q / scale)     scale = pow2_ceil(max(amax(|q|), 1e-10) / 448), per head
        weights = (w * scale) * weight_scale     w = head_weights[:, weight_offset + head_start + h]
        key     = bf16(LayerNorm(key[:, key_offset:key_offset + 128]))  quantised into cache[slot]

    Arithmetic is fp32 where no rounding is written. For "mxfp4" query and key have one scale per 32
    columns, `2**(e-127) = pow2_ceil(max(amax, 6*2**-126) / 6)`, and weights fold none. The formats
    are those of DeepGEMM's paged MQA-logits kernels; `index_scores` is that scorer.

    Axes: B rows (tokens), P packed columns, K query latent, H heads here, L layers, R bytes per
    cached token (132; mxfp4 68). Any B >= 0, K a multiple of 128.

    projected        bfloat16 [B, P], the query latent in columns 0..K-1
    q_norm           bfloat16 [K] or [L, K]: gamma of the RMSNorm
    wq_b             bfloat16 [H*128, K] or [L, H*128, K]: (out, in), as in checkpoints
    key_norm_weight  float32 [128] or [L, 128]
    key_norm_bias    float32 [128] or [L, 128]
    cache            uint8 [pages, page_size, R] or [L, pages, page_size, R], see `empty_cache`;
                     donate it (or carry it through a loop) and it is updated in place
    slots            int32 or int64 [B]: the token slot of each row's key, page = slot // page_size;
                     a slot that is negative or past the end stores nothing
    layer            which layer of the stacked operands: an int, or an integer scalar array.
                     Needed as soon as one is stacked. Pass stacks whole: most slices are copied.
                     An array out of range reads the nearest layer and stores nothing. An int is
                     part of the program: outside of jit each one is compiled anew, where an array,
                     `jnp.int32(layer)`, shares one program
    key              bfloat16 [B, >= key_offset + 128], default `projected`
    head_weights     bfloat16 or float32 [B, >= weight_offset + H], default `projected`. Without
                     them key and head weights are columns of `projected` of their own; where they
                     are to overlap, pass `projected` itself
    key_offset       first column of the key
    weight_offset    first column of the whole model's head weights
    eps, key_eps     epsilons of RMSNorm and LayerNorm, added to the mean square and the variance;
                     like weight_scale positive, finite and normal in float32
    cache_format     "fp8" (one fp32 scale per key), "mxfp8" (one UE8M0 exponent, four times) or
                     "mxfp4" (one per 32 columns)
    weights_dtype    bfloat16 or float32. Hopper's scorers of other projects take float32. bfloat16
                     loses nothing where num_heads * 128 is a power of four and the head weights are
                     bfloat16 (32 heads: yes, 64: no)
    num_heads        heads of the whole model if H is one shard of them, default H
    head_start       first head of this shard: an int, or with num_heads an integer scalar array
                     (clamped to range)
    weight_scale     default `(num_heads * 128) ** -0.5`
    implementation   None: the CUDA kernel where one is shipped for the device and these shapes and
                     is the faster one, else plain JAX. "cuda" and "jnp" are commands

    Rows are independent. A head (or 32-column group) that is not finite gets NaN codes and a NaN
    weight (or the exponent 0xFF), a key that is not finite likewise. Rows that share a slot leave
    its bytes unspecified, and nothing else.

    Raises TypeError or ValueError for arguments of a wrong type, shape or range, and
    NotImplementedError under vmap, under differentiation, and for "cuda" where it cannot run.
    """
    config, operands = front_arguments(locals())  # its names are the signature's
    query, weights, new_cache, *scale = OPERATOR.bind(config, operands)
    return IndexFront(query, scale[0] if scale else None, weights, new_cache)

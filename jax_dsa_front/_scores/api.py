"""The public operator `index_scores`."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from jax_dsa_front._operator import explains
from jax_dsa_front._scores.checks import FRONT_AS_QUERY, scores_arguments
from jax_dsa_front._scores.lowering import OPERATOR


def _says_how_to_pass_a_front(function: Callable[..., Any]) -> Any:
    """With the whole result of `index_front` for the query, Python would only count what is
    missing."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], tuple):
            raise TypeError(FRONT_AS_QUERY)
        return function(*args, **kwargs)

    return call


@explains(OPERATOR, scores_arguments)
@_says_how_to_pass_a_front
def index_scores(
    query: jax.Array,
    query_scale: jax.Array | None,
    weights: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    cache_format: str,
    implementation: Literal["cuda", "jnp"] | None = None,
) -> jax.Array:
    """Scores of the cached keys for every row: f32 `[B, max_len]`, -inf past each length.

        fp8, mxfp8:  score[b, n] = key_scale[n] * sum_h relu(query[b, h] . key[n]) * weights[b, h]
        mxfp4:       score[b, n] = sum_h relu(query[b, h] . key[n]) * weights[b, h]

    with B rows, H heads and `max_len = N * page_size`; for mxfp4 both scales are inside the dot.
    The first four arguments are `index_front`'s result: `index_scores(*front, block_table, ...)`.

    query           float8_e4m3fn [B, H, 128], for mxfp4 uint8 [B, H, 64]
    query_scale     uint32 [B, H] for mxfp4, else None
    weights         bfloat16 or float32 [B, H]
    cache           uint8 [pages, page_size, R], or [L, pages, page_size, R] with `layer`
    block_table     int32 or int64 [S, N]: the page that holds tokens n*page_size onwards of a
                    sequence. B is a multiple of S: B / S rows in a row belong to one sequence
    context_lens    int32 or int64 [B]: valid tokens of the row, the newest included; 0 for a
                    padding row. Clamped to [0, max_len]
    layer           int or integer scalar, needed for a stacked cache; a traced one is clamped. An
                    int is part of the program: outside of jit each one is compiled anew, where an
                    array, `jnp.int32(layer)`, shares one program
    cache_format    "fp8", "mxfp8" or "mxfp4", with which the keys were written. fp8 and mxfp8
                    caches look alike
    implementation  None: the CUDA kernel where one is shipped for the device and these shapes, else
                    plain JAX. "cuda" and "jnp" are commands

    This is what DeepGEMM's paged MQA-logits kernels compute. In plain JAX products are exact and
    sums fp32; scratch is bounded by 64 MB, and the time follows the longest length of each piece of
    work. The kernel needs no scratch; for fp8 and mxfp8 its products keep fewer bits, so that a
    score is within 1e-3 of `key_scale * sum_h |weights| * sum_d |query * key|`. Positions whose
    block table entry is no page score -inf; keys that are not finite score NaN. A row's scores do
    not depend on other rows.

    Raises TypeError or ValueError for arguments of a wrong type, shape or range, and
    NotImplementedError under vmap, under differentiation, for operands on explicit mesh axes, and
    for "cuda" where it cannot run.
    """
    config, operands = scores_arguments(locals())  # its names are the signature's
    (scores,) = OPERATOR.bind(config, operands)
    return scores

"""A small decode step, for tests of the programs around the call rather than of its numbers."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_dsa_front as dsa
from cases import ROW

LAYERS, PAGE, BATCH, HEADS = 3, 64, 4, 8
BF16, F32, U8, I32 = jnp.bfloat16, jnp.float32, jnp.uint8, jnp.int32


def operands(seed=0, stacked=False, fmt="fp8", pages=256, k=256, batch=BATCH):
    """(projected, the four parameter arrays, cache); the cache holds garbage, so changes show."""
    rng = np.random.default_rng(seed)
    lead = (LAYERS,) if stacked else ()

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    weights = (
        normal(*lead, k).astype(jnp.bfloat16),
        normal(*lead, HEADS * 128, k).astype(jnp.bfloat16),
        normal(*lead, 128),
        normal(*lead, 128),
    )
    cache = rng.integers(0, 256, (*lead, pages, PAGE, ROW[fmt]), dtype=np.uint8)
    return normal(batch, k + 128 + HEADS).astype(jnp.bfloat16), weights, jnp.array(cache)


def abstract(rows, **keywords):
    """Shapes of `operands(**keywords)`, stacked, with slots and a layer; `rows` may be symbolic."""
    projected, weights, cache = operands(stacked=True, **keywords)
    weights, cache = jax.tree.map(lambda a: shape(*a.shape, dtype=a.dtype), (weights, cache))
    return shape(rows, projected.shape[1]), weights, cache, shape(rows, dtype=I32), shape(dtype=I32)


def by_way_of_six_kernels(rows):
    """The same rows: an even number of negations, each a kernel of its own, so that XLA records a
    graph, which takes five in a row."""
    for _ in range(6):
        rows = lax.optimization_barrier(-rows)
    return rows


def step(projected, weights, cache, slots, layer=None, fmt="fp8", implementation=None):
    """One call; K follows from the weights, key and head weights stand behind q_a."""
    k = weights[1].shape[-1]
    return dsa.index_front(
        projected,
        *weights,
        cache,
        slots,
        layer,
        key_offset=k,
        weight_offset=k + 128,
        eps=1e-6,
        key_eps=1e-6,
        cache_format=fmt,
        implementation=implementation,
    )


# Whole programs around the step, each a function of (projected, weights, cache, fmt).


def plain(projected, weights, cache, fmt):
    return step(projected, weights, cache, jnp.arange(BATCH), fmt=fmt)


def token_scan(projected, weights, cache, fmt):
    def body(cache, token):
        front = step(projected, weights, cache, token * BATCH + jnp.arange(BATCH), fmt=fmt)
        return front.cache, front.weights

    return lax.scan(body, cache, jnp.arange(5))


def token_while(projected, weights, cache, fmt):
    def body(state):
        token, cache = state
        return token + 1, step(projected, weights, cache, token + jnp.arange(BATCH), fmt=fmt).cache

    return lax.while_loop(lambda state: state[0] < 5, body, (jnp.int32(0), cache))


def layer_scan(projected, weights, cache, fmt):
    def body(cache, layer):
        front = step(projected, weights, cache, jnp.arange(BATCH), layer, fmt)
        return front.cache, front.query

    return lax.scan(body, cache, jnp.arange(LAYERS))


def token_and_layer_scan(projected, weights, cache, fmt):
    return lax.scan(lambda cache, _: layer_scan(projected, weights, cache, fmt), cache, length=3)


def layer_scan_that_reads(projected, weights, cache, fmt):
    """The results are stacked, and the next layer's rows are made of them too."""

    def body(carry, layer):
        rows, cache = carry
        front = step(rows, weights, cache, jnp.arange(BATCH), layer, fmt)
        query = lax.bitcast_convert_type(front.query, jnp.uint8)
        rows = rows.at[:, 0].add(front.weights[:, 0])
        rows = rows.at[:, 1].add((query[:, 0, 0] % 8).astype(rows.dtype))
        return (rows, front.cache), (front.query, front.weights)

    return lax.scan(body, (projected, cache), jnp.arange(LAYERS))


def rows_as_xs(projected, weights, cache, fmt):
    """Rows and slots of three tokens stand in one array each; a scan slices them."""

    def body(cache, token):
        front = step(token[0], weights, cache, token[1], fmt=fmt)
        return front.cache, front.weights

    rows = jnp.stack([projected, -projected, projected * 2])
    return lax.scan(body, cache, (rows, jnp.arange(3 * BATCH).reshape(3, BATCH)))


def layers_as_xs(projected, weights, cache, fmt):
    """Weights and cache sliced and put together by a scan: right, but XLA copies the cache's
    layers."""

    def body(_, layer):
        front = step(projected, layer[:-1], layer[-1], jnp.arange(BATCH), fmt=fmt)
        return None, (front.cache, front.query)

    return lax.scan(body, None, (*weights, cache))[1]


def weights_as_xs(projected, weights, cache, fmt):
    """The scan slices the weights and carries the cache."""

    def body(cache, xs):
        front = step(projected, xs[1], cache, jnp.arange(BATCH), xs[0], fmt)
        return front.cache, front.query

    return lax.scan(body, cache, (jnp.arange(LAYERS), weights))


def unrolled_layers(projected, weights, cache, fmt):
    return unrolled(projected, [weights] * LAYERS, cache, fmt)


def unrolled_weights(projected, weights, cache, fmt):
    """The layers' weights are slices at constant places; the cache is whole."""
    own = [[stack[layer] for stack in weights] for layer in range(LAYERS)]
    return unrolled(projected, own, cache, fmt)


def unrolled(projected, weights_of_layers, cache, fmt):
    queries = []
    for layer, weights in enumerate(weights_of_layers):
        front = step(projected, weights, cache, jnp.arange(BATCH), layer, fmt)
        cache = front.cache
        queries.append(front.query)
    return cache, queries


def packed_vectors(projected, weights, cache, fmt):
    """Norms at places of larger arrays that no 16 bytes are aligned to."""
    gamma, wq_b, gain, bias = weights
    flat = jnp.concatenate([jnp.zeros(3, BF16), gamma]), jnp.concatenate([gain, gain[:1], bias])
    gamma, norm = lax.optimization_barrier(flat)
    own = gamma[3:], wq_b, norm[1:129], norm[129:]
    return step(projected, own, cache, jnp.arange(BATCH), fmt=fmt)


def nested_jit(projected, weights, cache, fmt):
    inner = jax.jit(step, static_argnames=("layer", "fmt"))
    cache = inner(projected, weights, cache, jnp.arange(BATCH), fmt=fmt).cache
    return inner(projected, weights, cache, jnp.arange(BATCH) + 9, fmt=fmt)


def remat(projected, weights, cache, fmt):
    return jax.checkpoint(lambda p, c: step(p, weights, c, jnp.arange(BATCH), fmt=fmt))(
        projected, cache
    )


def cond(projected, weights, cache, fmt):
    return lax.cond(
        projected[0, 0] > -100,
        lambda cache: step(projected, weights, cache, jnp.arange(BATCH), fmt=fmt).cache,
        lambda cache: cache,
        cache,
    )


def cond_of_two_calls(projected, weights, cache, fmt):
    return lax.cond(
        projected[0, 0] > 0,
        lambda cache: step(projected, weights, cache, jnp.arange(BATCH), fmt=fmt).cache,
        lambda cache: step(-projected, weights, cache, jnp.arange(BATCH) + 9, fmt=fmt).cache,
        cache,
    )


def page_cleared_behind(projected, weights, cache, fmt):
    front = step(projected, weights, cache, jnp.arange(BATCH), fmt=fmt)
    return front.query, front.cache.at[3].set(0)


def old_cache_read_in_order(projected, weights, cache, fmt):
    """Without this barrier XLA 0.12 writes to a copy, as docs/integration.md says."""
    old = dsa.read_keys(cache, jnp.arange(64), cache_format=fmt)
    cache, old = lax.optimization_barrier((cache, old))
    return old, step(projected, weights, cache, jnp.arange(BATCH), fmt=fmt)


def scores_behind(projected, weights, cache, fmt):
    """Row r scores the keys of rows 0..r, which this call has stored; the rest of the cache is
    garbage."""
    front = step(projected, weights, cache, jnp.arange(BATCH), fmt=fmt)
    scores = dsa.index_scores(
        *(front.query, front.query_scale, front.weights, front.cache),
        *(jnp.tile(jnp.arange(8), (BATCH, 1)), jnp.arange(BATCH) + 1),
        cache_format=fmt,
    )
    # Rounded, because their sums have another order in each program
    return scores.astype(jnp.bfloat16), front.cache


def reference(projected, weights, cache, fmt):
    ref = jax.new_ref(cache)
    for token in range(2):
        front = step(projected, weights, ref[...], token + jnp.arange(BATCH), fmt=fmt)
        ref[...] = front.cache
    return front.weights, ref[...]


IN_PLACE_STACKED = [layer_scan, layer_scan_that_reads, token_and_layer_scan, unrolled_layers]
SLICED_WEIGHTS = [weights_as_xs, unrolled_weights, layers_as_xs]
STACKED = {*IN_PLACE_STACKED, *SLICED_WEIGHTS}
PROGRAMS = [
    *(plain, token_scan, rows_as_xs, token_while, nested_jit, remat, page_cleared_behind),
    packed_vectors,
    *IN_PLACE_STACKED,
]
# XLA's GPU compiler keeps these in place too; for some the CPU compiler has tests of its own.
GPU_PROGRAMS = [
    *(*PROGRAMS, cond, cond_of_two_calls, reference, scores_behind),
    *(old_cache_read_in_order, weights_as_xs, unrolled_weights),
]
if jax.__version_info__ >= (0, 11):  # XLA's GPU compiler reads slices of weights where they lie
    READ_IN_PLACE, COPIED = SLICED_WEIGHTS, [layers_as_xs]
else:  # it copies them, and the cache around lax.cond
    READ_IN_PLACE, COPIED = [], [*SLICED_WEIGHTS, cond, cond_of_two_calls]


def layer_bytes(cache):
    """Bytes of one layer of a cache."""
    return int(np.prod(cache.shape[-3:]))


def digest(outputs):
    """One hash over the bytes of all arrays of a tree."""
    leaves = jax.tree.leaves(outputs)
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()


def shape(*dims, dtype=BF16):
    """An operand of which nothing but shape and dtype matters."""
    return jax.ShapeDtypeStruct(dims, dtype)


def arrays_and_rest(arguments):
    """Two dictionaries of them: the `shape(...)` values, and all others."""
    arrays = {k: v for k, v in arguments.items() if isinstance(v, jax.ShapeDtypeStruct)}
    return arrays, {k: v for k, v in arguments.items() if k not in arrays}


def trace(fn, arguments):
    """Abstract results of `fn(**arguments)`, whose `shape(...)` values need not exist."""
    arrays, rest = arrays_and_rest(arguments)
    return jax.eval_shape(lambda arrays: fn(**arrays, **rest), arrays)

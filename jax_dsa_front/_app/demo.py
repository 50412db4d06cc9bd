"""The demo: a jitted decode loop over DSA layers, its recall, and the recorded original outputs.

The loop is what a serving engine compiles, with the weights of no model: `lax.scan` over tokens and
inside it over layers, stacked weights, one stacked cache that is donated. Each layer runs
`index_front`, scores the cache with `index_scores` and takes the top k; the mean of the chosen
tokens stands for attention and the rest of the layer.
"""

import functools
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_dsa_front as dsa
from jax_dsa_front._app import recorded, terminal
from jax_dsa_front._front.api import Implementation
from jax_dsa_front._runtime.library import INDEX_FRONT

HEADS, K, WIDTH = 32, 1536, 256  # indexer heads, query latent, hidden state (columns)
LAYERS, BATCH, PAGE = 4, 8, 64
CONTEXT, STEPS, TOP = 4096, 64, 256  # tokens
LENGTH = CONTEXT + STEPS
CHUNK = 8  # steps per call of the jitted loop, and pages per call of the prefill
EPS = 1e-6
HIGHEST = lax.Precision.HIGHEST
FRONT = dict(key_offset=K, weight_offset=K + 128, eps=EPS, key_eps=EPS)


class Model(NamedTuple):
    """Stacked weights of L = LAYERS layers; `project` is the packed projection in front of ours."""

    project: jax.Array  # bf16 [L, WIDTH, K + 128 + HEADS]
    q_norm: jax.Array  # bf16 [L, K]
    wq_b: jax.Array  # bf16 [L, HEADS * 128, K]
    key_norm_weight: jax.Array  # f32 [L, 128]
    key_norm_bias: jax.Array  # f32 [L, 128]


def make_model(seed: int) -> Model:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((LAYERS, *shape), np.float32))

    return Model(
        (normal(WIDTH, K + 128 + HEADS) * WIDTH**-0.5).astype(jnp.bfloat16),
        (1 + 0.1 * normal(K)).astype(jnp.bfloat16),
        (normal(HEADS * 128, K) * K**-0.5).astype(jnp.bfloat16),
        1 + 0.1 * normal(128),
        0.1 * normal(128),
    )


def make_history(seed: int) -> jax.Array:
    """Hidden states of all tokens, bf16 [BATCH, LENGTH, WIDTH]: clusters, noise, heavy channels."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((64, WIDTH), np.float32)
    states = rng.standard_normal((BATCH, LENGTH, WIDTH), np.float32)
    states += centres[rng.integers(0, 64, (BATCH, LENGTH))]
    states[..., ::128] *= 12
    return jnp.asarray(states).astype(jnp.bfloat16)


def front(model: Model, hidden: jax.Array, cache: jax.Array, slots: jax.Array, layer: Any, **more):
    """(packed rows, results of `index_front`) of one layer for hidden states [B, WIDTH]."""
    rows = hidden @ model.project[layer]
    return rows, dsa.index_front(rows, *model[1:], cache, slots, layer, **FRONT, **more)


@functools.partial(jax.jit, static_argnames="cache_format", donate_argnames="cache")
def prefill(
    model: Model, history: jax.Array, cache: jax.Array, slots: jax.Array, cache_format: str
) -> jax.Array:
    """Inserts the keys of tokens [n, WIDTH] in every layer. One head does: no query is needed."""
    model = model._replace(wq_b=model.wq_b[:, :128])

    def layer_step(cache: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
        return front(model, history, cache, slots, layer, cache_format=cache_format)[1].cache, None

    return lax.scan(layer_step, cache, jnp.arange(LAYERS))[0]


@functools.partial(jax.jit, static_argnames="cache_format", donate_argnames="cache")
def decode(
    model: Model,
    history: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    position: jax.Array,
    cache_format: str,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """CHUNK tokens of every sequence from `position` on.

    Returns the cache, and of each step and layer the packed rows and the TOP chosen positions.
    """

    def token_step(cache: jax.Array, position: jax.Array) -> tuple[jax.Array, Any]:
        slots = dsa.slots_of(block_table, jnp.full(BATCH, position), PAGE)

        def layer_step(carry: tuple[jax.Array, jax.Array], layer: jax.Array):
            hidden, cache = carry
            rows, out = front(model, hidden, cache, slots, layer, cache_format=cache_format)
            scores = dsa.index_scores(
                *(out.query, out.query_scale, out.weights, out.cache, block_table),
                *(jnp.full(BATCH, position + 1), layer),
                cache_format=cache_format,
            )
            _, chosen = lax.top_k(scores, TOP)
            attended = jnp.take_along_axis(history, chosen[..., None], axis=1).mean(axis=1)
            return (hidden + attended, out.cache), (rows, chosen)

        (_, cache), record = lax.scan(layer_step, (history[:, position], cache), jnp.arange(LAYERS))
        return cache, record

    return lax.scan(token_step, cache, position + jnp.arange(CHUNK))


@jax.jit
def unquantised_top(model: Model, rows: jax.Array, keys: jax.Array) -> jax.Array:
    """The TOP best positions, [L, BATCH, TOP], by fp32 scores of unrounded queries and keys.

    `rows` [L, BATCH, P] are the packed rows of the newest token, `keys` [L, BATCH, LENGTH, 128] the
    keys of all tokens before their LayerNorm.
    """

    def of_layer(operands: Any) -> jax.Array:
        model, rows, keys = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
        x = rows[:, :K]
        y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * model.q_norm
        query = jnp.dot(y, model.wq_b.T, precision=HIGHEST).reshape(BATCH, HEADS, 128)
        keys = keys - keys.mean(axis=-1, keepdims=True)
        keys = keys * lax.rsqrt(jnp.mean(keys * keys, axis=-1, keepdims=True) + EPS)
        keys = keys * model.key_norm_weight + model.key_norm_bias
        dots = jnp.einsum("bhd,bnd->bhn", query, keys, precision=HIGHEST)
        scores = jnp.einsum("bhn,bh->bn", jax.nn.relu(dots), rows[:, K + 128 :], precision=HIGHEST)
        return lax.top_k(scores, TOP)[1]

    return lax.map(of_layer, (model, rows, keys))


def recall_of(model: Model, history: jax.Array, rows: jax.Array, chosen: jax.Array) -> float:
    """Share of the unquantised top k that the last step chose; `rows` [STEPS, L, BATCH, P]."""
    old = jnp.einsum("bnw,lwd->lbnd", history[:, :CONTEXT], model.project[..., K : K + 128])
    new = jnp.moveaxis(rows[..., K : K + 128], 0, 2)
    best = unquantised_top(model, rows[-1], jnp.concatenate([old, new], axis=2))
    found = (chosen[-1][..., :, None] == best[..., None, :]).any(axis=-1)
    return float(found.mean())


def run(cache_format: str) -> int:
    """Runs everything and prints a table; 0 if the recorded outputs are reproduced, else 1."""
    start = time.perf_counter()
    pages = BATCH * LENGTH // PAGE
    shuffled = np.random.default_rng(2).permutation(pages).astype(np.int32)
    block_table = jnp.asarray(shuffled.reshape(BATCH, -1))
    cache = dsa.empty_cache(pages, PAGE, cache_format=cache_format, layers=LAYERS)
    device = next(iter(cache.devices()))
    print(f"jax_dsa_front {dsa.__version__} on {device.device_kind} with jax {jax.__version__}")
    print(
        f"{LAYERS} layers, {BATCH} sequences of {CONTEXT} tokens, {STEPS} steps, {cache_format}\n"
    )

    model, history = make_model(0), make_history(1)
    with terminal.Progress("fill the cache", CONTEXT // (PAGE * CHUNK)) as progress:
        for first in range(0, CONTEXT, PAGE * CHUNK):
            positions = jnp.arange(first, first + PAGE * CHUNK)
            tokens = history[:, positions].reshape(-1, WIDTH)
            slots = dsa.slots_of(block_table, jnp.tile(positions, (BATCH, 1)), PAGE).ravel()
            cache = jax.block_until_ready(prefill(model, tokens, cache, slots, cache_format))
            progress.advance()

    with terminal.Progress("compile", 1) as progress:
        arguments = (model, history, cache, block_table, jnp.int32(CONTEXT))
        compiled = decode.lower(*arguments, cache_format).compile()
        progress.advance()

    seconds, records = [], []
    address = cache.unsafe_buffer_pointer()
    with terminal.Progress("decode", STEPS // CHUNK) as progress:
        for position in range(CONTEXT, LENGTH, CHUNK):
            before = time.perf_counter()
            cache, record = compiled(model, history, cache, block_table, jnp.int32(position))
            jax.block_until_ready(cache)
            seconds.append((time.perf_counter() - before) / CHUNK)
            records.append(record)
            progress.advance()
    in_place = cache.unsafe_buffer_pointer() == address
    rows, chosen = (jnp.concatenate(part) for part in zip(*records, strict=True))
    with terminal.Progress("measure recall", 1) as progress:
        recall = recall_of(model, history, rows, chosen)
        progress.advance()

    explanation = dsa.explain(
        dsa.index_front,
        *(rows[0, 0], *model[1:], cache, jnp.zeros(BATCH, jnp.int32), jnp.int32(0)),
        **FRONT,
        cache_format=cache_format,
    )
    calls = (compiled.as_text() or "").count(f'"{INDEX_FRONT}"')
    checks = []
    implementations: list[Implementation] = ["jnp"]
    if explanation.implementation == "cuda":
        implementations.insert(0, "cuda")
    for implementation in implementations:
        with terminal.Progress(f"golden ({implementation})", len(recorded.cases())) as progress:
            checks.append(recorded.check(implementation, progress.advance))

    step = statistics.median(seconds)
    kept = "updated in place" if in_place else "MOVED: it was copied"
    lines = [
        ("implementation", str(explanation)),
        (
            "compiled program",
            f"{calls or 'no'} kernel call{'' if calls == 1 else 's'}, cache of "
            f"{cache.nbytes / 1e6:.1f} MB {kept}",
        ),
        (
            "time per step",
            f"{step * 1e3:.2f} ms, {step / LAYERS * 1e3:.3f} ms per layer "
            f"(front, scores, top k; median of {len(seconds)} x {CHUNK} steps)",
        ),
        (
            "recall",
            f"{recall:.4f} of the unquantised top {TOP} of {LENGTH} keys, "
            f"mean over {LAYERS} layers and {BATCH} sequences of the last step",
        ),
        *(("golden vectors", str(check)) for check in checks),
        ("total time", f"{time.perf_counter() - start:.1f} s"),
    ]
    print("\n" + terminal.table("jax_dsa_front demo", lines))
    if all(check.passed for check in checks):
        return 0
    print("FAILED: query and weights of the original kernel are not reproduced", file=sys.stderr)
    return 1

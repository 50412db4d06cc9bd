"""Random calls of `index_scores` made and judged on the device, hundreds per program.

The kernel is judged by the jnp form, whose products are exact: each score within 1e-3 of
`key_scale * sum_h |w_h| * sum_d |q k|`, which the jnp form computes as well, from codes without
their signs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_dsa_front as dsa

BOUND = 1e-3
MUST_BE_ZERO = ("mask_differs", "nan_differs", "too_far", "rerun_differs")


@dataclasses.dataclass(frozen=True)
class Shape:
    fmt: str
    heads: int
    page_size: int
    rows: int  # of a sequence
    sequences: int
    table: int  # pages in a row of the block table
    pages: int
    layers: int | None
    traced: bool
    weights: str
    integer: str


FORMATS, HEADS = ("fp8", "mxfp8", "mxfp4"), (8, 16, 32, 64)


def random_shapes(count, seed):
    """Formats, heads, page sizes and rows are dealt out in turn; the rest is drawn."""
    rng = np.random.default_rng(seed)
    rows = (1, 2, 3, 4, 5, 8, 1, 2, 17, 130)
    shapes = []
    for i in range(count):
        own = rows[i % len(rows)]
        layers = [None, 1, 3][rng.integers(3)]
        shapes.append(
            Shape(
                fmt=FORMATS[i % 3],
                heads=HEADS[(i // 3) % 4],
                page_size=(64, 64, 32, 128)[i % 4],
                rows=own,
                sequences=int(rng.integers(1, 3 if own > 8 else 24)),
                table=int(rng.integers(1, 40)),
                pages=int(rng.integers(1, 90)),
                layers=layers,
                traced=layers is not None and bool(rng.integers(2)),
                weights=["float32", "bfloat16"][rng.integers(2)],
                integer=["int32", "int64"][rng.integers(2)],
            )
        )
    return shapes


def drawn(shape, key):
    """(operands of a call with every code that is a number, where keys hold NaN in some scales)"""
    keys = jax.random.split(key, 8)
    batch, four = shape.sequences * shape.rows, shape.fmt == "mxfp4"
    columns, lead = 64 if four else 128, (shape.layers or 1, shape.pages)
    tokens = shape.page_size

    def codes(key, *dims):
        raw = jax.random.bits(key, dims, jnp.uint8)
        return raw if four else jnp.where((raw & 0x7F) == 0x7F, raw - jnp.uint8(1), raw)

    def exponents(key, *dims):
        return jax.random.randint(key, dims, 118, 137).astype(jnp.uint8)

    values = codes(keys[0], *lead, tokens * columns)
    if four:
        scales = exponents(keys[1], *lead, tokens, 4)
    else:
        scales = jnp.broadcast_to(exponents(keys[1], *lead, tokens, 1), (*lead, tokens, 4))
        if shape.fmt == "fp8":
            wide = scales.astype(jnp.uint32) << 23
            shifts = jnp.array([0, 8, 16, 24], jnp.uint32)
            scales = (wide >> shifts).astype(jnp.uint8)
    nan = jax.random.bernoulli(keys[2], 0.01, (*lead, tokens))[..., None]
    scales = jnp.where(nan, jnp.uint8(0xFF), scales)
    flat = jnp.concatenate([values, scales.reshape(*lead, tokens * 4)], axis=-1)
    cache = flat.reshape(*lead, tokens, columns + 4)
    query = codes(keys[3], batch, shape.heads, columns)
    query_scale = None
    if four:
        four_bytes = exponents(keys[4], batch, shape.heads, 4)
        query_scale = lax.bitcast_convert_type(four_bytes, jnp.uint32)
    weights = jax.random.normal(keys[5], (batch, shape.heads)).astype(shape.weights)
    kind = jnp.dtype(shape.integer)
    table = jax.random.randint(keys[6], (shape.sequences, shape.table), -1, shape.pages + 1)
    table = table.astype(kind).at[0, 0].set(jnp.iinfo(kind).min)
    longest = shape.table * shape.page_size
    lens = jax.random.randint(keys[7], (batch,), -9, longest + 9).astype(kind)
    lens = lens.at[-1].set(jnp.iinfo(kind).max)
    return query, query_scale, weights, cache if shape.layers else cache[0], table, lens


def signless(query, query_scale, weights, cache, *rest):
    """The same without signs, so that nothing cancels."""
    tokens, width = cache.shape[-2:]
    mask = jnp.uint8(0x77 if width == 68 else 0x7F)
    flat = cache.reshape(*cache.shape[:-2], tokens * width)
    split = tokens * (width - 4)
    flat = jnp.concatenate([flat[..., :split] & mask, flat[..., split:]], axis=-1)
    return query & mask, query_scale, jnp.abs(weights), flat.reshape(cache.shape), *rest


def scorer(shape, implementation):
    def run(operands, layer):
        query, *rest = operands
        if shape.fmt != "mxfp4":
            query = lax.bitcast_convert_type(query, jnp.float8_e4m3fn)
        static = dict(cache_format=shape.fmt, implementation=implementation)
        return dsa.index_scores(query, *rest, layer, **static)

    return run


class Program:
    """Judges `count` calls of one shape at a time."""

    def __init__(self, shape):
        self.shape = shape
        with jax.enable_x64(True):
            self.judge = jax.jit(self._judge).lower(jnp.uint32(0), jnp.int32(1)).compile()

    def run(self, first, count):
        with jax.enable_x64(True):
            found = self.judge(jnp.uint32(first), jnp.int32(count))
        return {name: np.asarray(value).item() for name, value in found.items()}

    def _judge(self, first, count):
        shape = self.shape

        def call(i, found):
            key = jax.random.key(first + i.astype(jnp.uint32))
            operands = lax.optimization_barrier(drawn(shape, key))
            layer = None
            if shape.layers is not None:
                layer = shape.layers - 1
                if shape.traced:
                    layer = jax.random.randint(key, (), -2, shape.layers + 2, jnp.int32)
            got, again = (scorer(shape, "cuda")(operands, layer) for _ in range(2))
            want = scorer(shape, "jnp")(operands, layer)
            size = scorer(shape, "jnp")(signless(*operands), layer)
            bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
            masked, nan = jnp.isneginf(want), jnp.isnan(want)
            off = jnp.where(masked | nan, 0, jnp.abs(got - want))
            share = off / jnp.where(masked | nan, 1, jnp.maximum(size, 1e-30))
            new = dict(
                mask_differs=jnp.sum(jnp.isneginf(got) != masked),
                nan_differs=jnp.sum(jnp.isnan(got) != nan),
                too_far=jnp.sum(~(share <= BOUND)),
                rerun_differs=jnp.sum(bits(got) != bits(again)),
                scores=jnp.sum(~masked),
            )
            total = {name: found[name] + new[name].astype(jnp.int64) for name in new}
            return total | dict(worst=jnp.maximum(found["worst"], jnp.max(share)))

        zeros = {name: jnp.int64(0) for name in (*MUST_BE_ZERO, "scores")}
        zeros["worst"] = jnp.float32(0)
        return lax.fori_loop(0, count, call, zeros)

"""Many random calls in one program: data are drawn, both forms called and compared on the device.

One turn of the loop runs the kernel, the kernel once more on the cache that it returned (which must
change nothing, and cannot be optimised away), and the jnp form. The cache goes from turn to turn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cases
import fuzzing
import jax_dsa_front as dsa
import on_device

GUARD = 0xA5  # every byte of the pages that no slot names
NEVER = np.iinfo(np.int32).max


def draw_rows(key, case, width):
    """bf16 [B, width]: magnitudes that differ by row, zero rows, now and then something not
    finite: one NaN anywhere, or a row whose sum of squares overflows."""
    keys = jax.random.split(key, 6)
    rows = jax.random.normal(keys[0], (case.batch, width), jnp.float32)
    exponent = jax.random.randint(keys[1], (case.batch, 1), -12, 13)
    kind = jax.random.randint(keys[2], (case.batch, 1), 0, 32)
    size = jnp.where(kind < 16, 1.0, jnp.exp2(exponent.astype(jnp.float32)))
    rows = rows * jnp.where(kind == 31, 0.0, size).astype(jnp.float32)
    row, column = jnp.arange(case.batch)[:, None], jnp.arange(width)[None, :]
    luck = jax.random.randint(keys[3], (2,), 0, 8)
    at = jax.random.randint(keys[4], (3,), 0, jnp.array([case.batch, width, case.batch]))
    rows = jnp.where((luck[0] < 2) & (row == at[0]) & (column == at[1]), jnp.nan, rows)
    rows = jnp.where((luck[1] < 1) & (row == at[2]) & (column < 8), 3e38, rows)
    return rows.astype(jnp.bfloat16)


def draw_slots(key, case, first, last):
    """[B] in the case's dtype: mostly different tokens of [first, last), some shared, some out of
    range."""
    keys = jax.random.split(key, 3)
    tokens, dtype = case.pages * case.page_size, np.dtype(case.slot_dtype)
    slots = first + jax.random.permutation(keys[0], last - first)
    slots = slots[jnp.arange(case.batch) % (last - first)].astype(dtype)
    outside = jnp.array(fuzzing.extremes(dtype, tokens), dtype)
    outside = jax.random.choice(keys[1], outside, (case.batch,))
    kind = jax.random.randint(keys[2], (case.batch,), 0, 32)
    return jnp.where(kind < 4, outside, jnp.where(kind == 4, slots[0], slots))


def draw_index(key, size):
    """int32 scalar in [0, size), or one time in five outside."""
    keys = jax.random.split(key, 3)
    outside = jax.random.choice(keys[0], jnp.array(fuzzing.extremes("int32", size), jnp.int32))
    inside = jax.random.randint(keys[1], (), 0, size, jnp.int32)
    return jnp.where(jax.random.randint(keys[2], (), 0, 5) == 0, outside, inside)


def rows_per_token(case, slots, layer):
    """int32 [layers or none, pages, page_size]: how many rows write each token."""
    tokens = case.pages * case.page_size
    valid = (slots >= 0) & (slots < tokens)
    counts = jnp.zeros(tokens + 1, jnp.int32).at[jnp.where(valid, slots, tokens)].add(1)
    counts = counts[:tokens].reshape(case.pages, case.page_size)
    inside = jnp.bool_(layer is None or (layer >= 0) & (layer < case.layers))
    if "cache" not in case.stacked:
        return jnp.where(inside, counts, 0)
    return jnp.where((jnp.arange(case.layers, dtype=jnp.int32) == layer)[:, None, None], counts, 0)


class Program:
    """The compiled loop of one case, and its operands' shapes."""

    def __init__(self, case, implementation="cuda"):
        self.case = case
        self.key_offset, self.weight_offset, self.width = cases.columns(case)
        # Where there are pages to spare, the first and the last one are guards.
        spare = (case.pages - 2) * case.page_size >= case.batch
        self.guards = case.page_size if spare else 0
        with jax.enable_x64(True):
            self.parameters = jax.jit(self.draw_parameters).lower(jax.random.key(0)).compile()
            arguments = jax.eval_shape(lambda: (jax.random.key(0), np.int32(0), np.int32(0)))
            parameters = jax.eval_shape(self.draw_parameters, jax.random.key(0))
            loop = functools.partial(self.loop, implementation)
            loop = jax.jit(loop, donate_argnums=(4,))
            self.compiled = loop.lower(*arguments, *parameters).compile()

    def draw_parameters(self, key):
        """((q_norm, wq_b, key_norm_weight, key_norm_bias), cache): the cache holds garbage and,
        in guard pages, known bytes. One row of wq_b is not finite in the last layer of a stack."""
        case, keys = self.case, jax.random.split(key, 5)

        def normal(key, name, *shape):
            lead = (case.layers,) if name in case.stacked else ()
            return jax.random.normal(key, (*lead, *shape), jnp.float32)

        wq_b = normal(keys[0], "wq_b", case.heads * 128, case.k) * jnp.float32(case.k**-0.5)
        if wq_b.ndim == 3 and case.layers > 1:
            wq_b = wq_b.at[-1, -70, 9].set(jnp.inf)
        pool = (case.pages, case.page_size, cases.ROW[case.fmt])
        lead = (case.layers,) if "cache" in case.stacked else ()
        cache = jax.random.randint(keys[1], (*lead, *pool), 0, 256).astype(jnp.uint8)
        if self.guards:
            cache = cache.at[..., :1, :, :].set(GUARD).at[..., -1:, :, :].set(GUARD)
        parameters = (
            (1 + 0.1 * normal(keys[2], "q_norm", case.k)).astype(jnp.bfloat16),
            wq_b.astype(jnp.bfloat16),
            1 + 0.2 * normal(keys[3], "key_norm_weight", 128),
            0.3 * normal(keys[4], "key_norm_bias", 128),
        )
        return parameters, cache

    def draw_call(self, key):
        """(projected, slots, layer, head_start, keyword arrays)."""
        case, keys = self.case, jax.random.split(key, 6)
        tokens = case.pages * case.page_size
        slots = draw_slots(keys[1], case, self.guards, tokens - self.guards)
        layer, head_start, own = case.layer, case.head_start, {}
        if case.traced_layer:
            layer = draw_index(keys[2], case.layers)
        if case.traced_head_start:
            head_start = draw_index(keys[3], case.head_start + 1)
        if case.own_key:
            own["key"] = draw_rows(keys[4], case, self.key_offset + 128 + case.gap)
        if case.own_weights:
            width = self.weight_offset + case.head_start + case.heads + case.gap
            own["head_weights"] = draw_rows(keys[5], case, width).astype(case.own_weights)
        return draw_rows(keys[0], case, self.width), slots, layer, head_start, own

    def turn(self, implementation, key, parameters, cache):
        """One call: the cache that the kernel left, and the counters."""
        projected, slots, layer, head_start, own = self.draw_call(key)

        def front(cache, implementation):
            keywords = {**cases.static(self.case), **own, "head_start": head_start}
            front = dsa.index_front(
                projected, *parameters, cache, slots, layer,
                implementation=implementation, **keywords,
            )  # fmt: skip
            return lax.optimization_barrier(front)

        kernel = front(cache, implementation)
        again = front(kernel.cache, implementation)
        plain = front(cache, "jnp")
        rows = rows_per_token(self.case, slots, layer)
        x = projected[:, : self.case.k].astype(jnp.float32)
        specified = ~jnp.isinf(jnp.sum(x * x, axis=-1))
        found = {name: jnp.int64(0) for name in (*on_device.MUST_BE_ZERO, *on_device.COUNTED)}
        fmt = self.case.fmt
        for part in (
            on_device.compare_queries(kernel, plain, specified, fmt),
            on_device.compare_caches(kernel.cache, plain.cache, cache, rows, fmt),
            on_device.compare_rerun(kernel, again, rows),
        ):
            found = {name: found[name] + part.get(name, 0) for name in found}
        return again.cache, found

    def loop(self, implementation, key, first, count, parameters, cache):
        """(cache, counters, the first call with a counter that must be zero and is not)."""

        def body(i, state):
            cache, total, first_bad = state
            cache, found = self.turn(implementation, jax.random.fold_in(key, i), parameters, cache)
            wrong = sum(found[name] for name in on_device.MUST_BE_ZERO) > 0
            first_bad = jnp.where(wrong & (first_bad == NEVER), i, first_bad)
            return cache, {name: total[name] + found[name] for name in total}, first_bad

        zero = {name: jnp.int64(0) for name in (*on_device.MUST_BE_ZERO, *on_device.COUNTED)}
        return lax.fori_loop(first, first + count, body, (cache, zero, jnp.int32(NEVER)))

    def run(self, count, chunk, seed):
        """Counters of `count` calls, at most `chunk` of them per execution; stops at a failure."""
        total, first = {}, 0
        with jax.enable_x64(True):
            parameters, cache = self.parameters(jax.random.key(seed))
            while first < count:
                n = min(chunk, count - first)
                key = jax.random.key(seed + 1)
                arguments = key, np.int32(first), np.int32(n), parameters, cache
                cache, found, first_bad = self.compiled(*arguments)
                found = {name: int(value) for name, value in found.items()}
                total = {name: total.get(name, 0) + value for name, value in found.items()}
                total["first_bad"] = int(first_bad)
                if int(first_bad) != NEVER:
                    break
                first += n
            if self.guards:
                cache = np.asarray(cache)
                ends = [cache[..., page, :, :] != GUARD for page in (0, -1)]
                total["guards_changed"] = int(np.sum(ends))
        return total

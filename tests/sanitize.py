"""Every shipped sm_90a kernel at the edges of its arguments, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck python -P tests/sanitize.py

(and racecheck, synccheck, initcheck). Needs nothing but the installed package and a Hopper GPU.

About 250 launches by 180 calls: all K, cache formats and schedules; B on both sides of every tile;
1, 8 and 32 heads; slots of both widths, traced layers and head starts, with the extremes of their
types; odd columns; key and head weights in arrays of their own. Every buffer is an allocation of
its own, so that the sanitizer sees each end of it, and guard pages and guard layers of known bytes
lie around the tokens that slots may name. Launches are plain: it does not look into graphs.
"""

import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_dsa_front as dsa
from jax_dsa_front import _runtime, _variants

ARCH = "sm_90a"
FORMATS = {"fp8": 132, "mxfp8": 132, "mxfp4": 68}
BATCHES = (0, 1, 5, 8, 9, 17, 33, 65, 128, 130, 300)
HEADS = (1, 8, 32)  # in turn; but 32 for those batches, whose tiles are then taken for any format
WITH_ALL_HEADS = (65, 130)
# Each of them once per program and run, so that every program sees inside and outside.
LAYERS = (1, 1, 2**31 - 1, 1, -1, 1, 3, 1, -(2**31), 1)
HEAD_STARTS = (0, 3, -1, 2**31 - 1, 1, -(2**31), 2, 4, 3, 0)
STACK, SHARD = 3, 4  # layers, of which the outer two are guards; num_heads is H + 3
PAGES, GUARD = 12, 0xA5  # the first and the last page are guards
PAGE_SIZES = {"fp8": 64, "mxfp8": 37, "mxfp4": 64}
RUNS = 2


class Loaded:
    """Remembers the kernels that the package loads, to say afterwards which of them ran."""

    def __init__(self):
        self.kernels = {}  # K -> [(name, _Kernel)], in the handler's order of preference
        load = _runtime._kernel

        def remembering(driver, entry, device):
            kernel = load(driver, entry, device)
            self.kernels.setdefault(entry["k"], []).append((entry["name"], kernel))
            return kernel

        _runtime._kernel = remembering

    def chosen(self, k, batch, heads):
        """Names of what the handler launches: the first kernel that runs in one wave, else the
        last, and the normalisation of the rows in front of those that take them normalised."""
        names = {_runtime.SCHEDULES[kernel.schedule]: name for name, kernel in self.kernels[k]}
        for name, kernel in self.kernels[k]:
            schedule = _runtime.SCHEDULES[kernel.schedule]
            if schedule == "row_norm":
                continue
            found = [name, names["row_norm"]] if schedule == "split_k_rows" else [name]
            clusters = -(-batch // kernel.tile) * heads
            small_enough = kernel.max_batch == 0 or batch <= kernel.max_batch
            if small_enough and clusters <= kernel.clusters_per_wave:
                break
        return found


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def bf16(array):
    return array.astype(ml_dtypes.bfloat16)


class Program:
    """The calls of one K and format, all batches in one jitted program with one cache."""

    def __init__(self, k, fmt, weights, rng):
        self.k, self.fmt, self.rng = k, fmt, rng
        turn = list(FORMATS).index(fmt)
        self.heads = [
            HEADS[-1 if batch in WITH_ALL_HEADS else (i + turn) % len(HEADS)]
            for i, batch in enumerate(BATCHES)
        ]
        self.wide_slots = fmt != "mxfp8"
        self.page_size = PAGE_SIZES[fmt]
        self.weights = weights
        self.norms = (
            jnp.asarray(bf16(1 + 0.1 * normal(rng, STACK, k))),
            jnp.asarray(1 + 0.1 * normal(rng, 128)),
            jnp.asarray(0.1 * normal(rng, STACK, 128)),
        )
        shape = (STACK, PAGES, self.page_size, FORMATS[fmt])
        self.before = rng.integers(0, 256, shape, dtype=np.uint8)
        self.before[[0, -1]] = self.before[:, [0, -1]] = GUARD
        self.cache = jnp.array(self.before)
        self.call = jax.jit(self.fronts, donate_argnums=0)

    def fronts(self, cache, norms, weights, rows):
        results = []
        for heads, (projected, slots, layer, head_start, own) in zip(self.heads, rows, strict=True):
            q_norm, gain, bias = norms
            front = dsa.index_front(
                projected, q_norm, weights[heads], gain, bias, cache, slots, layer,
                key_offset=1 if "key" in own else self.k + 3,
                weight_offset=5 if "head_weights" in own else self.k + 132,
                num_heads=heads + SHARD - 1, head_start=head_start,
                eps=1e-6, key_eps=1e-6, cache_format=self.fmt,
                weights_dtype=jnp.float32 if heads == 8 else jnp.bfloat16,
                implementation="cuda", **own,
            )  # fmt: skip
            cache = front.cache
            results.append((front.query, front.query_scale, front.weights))
        return cache, results

    def rows(self, batch, heads, layer, head_start):
        """Operands of one call, and the tokens of layer 1 that it may write."""
        inner = np.arange(self.page_size, (PAGES - 1) * self.page_size)
        slots = self.rng.permutation(inner)[:batch].astype(np.int64)
        tokens = PAGES * self.page_size
        ends = [-1, tokens, -(2**31), 2**31 - 1, 2 * tokens]
        if self.wide_slots:  # whose lower halves name tokens
            ends += [-(2**63), 2**63 - 1, 2**32 + 1, 2**33 + self.page_size, -(2**32) + 2]
        slots[1::3] = np.resize(ends, slots[1::3].size)
        written = slots[(slots >= 0) & (slots < tokens)] if layer == 1 else slots[:0]
        width = -(-(self.k + 132 + heads + SHARD) // 8) * 8
        own = {}
        if batch % 2:
            own["key"] = jnp.asarray(bf16(normal(self.rng, batch, 130)))
            own["head_weights"] = jnp.asarray(normal(self.rng, batch, heads + SHARD + 5))
        operands = (
            jnp.asarray(bf16(normal(self.rng, batch, width))),
            jnp.asarray(slots if self.wide_slots else slots.astype(np.int32)),
            jnp.int32(layer),
            jnp.int32(head_start),
            own,
        )
        return operands, written

    def run(self, turn):
        """Runs all calls, then checks every byte of the cache that no slot names."""
        rows, touched = [], np.zeros(PAGES * self.page_size, bool)
        for i, (batch, heads) in enumerate(zip(BATCHES, self.heads, strict=True)):
            layer, start = (x[(i + 3 * turn) % len(x)] for x in (LAYERS, HEAD_STARTS))
            operands, written = self.rows(batch, heads, layer, start)
            rows.append(operands)
            touched[written] = True
        self.cache, results = self.call(self.cache, self.norms, self.weights, rows)
        jax.block_until_ready(results)
        after = np.asarray(self.cache)
        free = ~touched.reshape(PAGES, self.page_size)
        assert (after[[0, -1]] == self.before[[0, -1]]).all(), "a guard layer changed"
        for new, old in zip(split_page(after[1]), split_page(self.before[1]), strict=True):
            assert (new[free] == old[free]).all(), "a token changed that no slot names"
            assert (new[~free] != old[~free]).any() or not touched.any(), "nothing was stored"
        self.before = after.copy()
        for query, query_scale, weights in results:
            for array in (query, query_scale, weights):
                if array is not None:
                    np.asarray(array)  # initcheck sees a read of every byte


def split_page(cache):
    """Value bytes [pages, page_size, R - 4] and scale bytes [pages, page_size, 4]."""
    pages, page_size, width = cache.shape
    flat = cache.reshape(pages, page_size * width)
    values, scales = np.split(flat, [page_size * (width - 4)], axis=1)
    return values.reshape(pages, page_size, -1), scales.reshape(pages, page_size, 4)


def main():
    start = time.perf_counter()
    jax.config.update("jax_enable_x64", True)  # for slots of 64 bits
    loaded, rng, reached, launches = Loaded(), np.random.default_rng(0), set(), 0
    for k in _variants.LATENT_WIDTHS:
        stack = bf16(normal(rng, STACK, HEADS[-1] * 128, k) * np.float32(k**-0.5))
        weights = {heads: jnp.asarray(stack[:, : heads * 128]) for heads in HEADS}
        for fmt in FORMATS:
            program = Program(k, fmt, weights, rng)
            for turn in range(RUNS):
                program.run(turn)
            for batch, heads in zip(BATCHES, program.heads, strict=True):
                names = loaded.chosen(k, batch, heads) if batch else []
                launches += RUNS * len(names)
                reached |= {(name, fmt) for name in names}
    shipped = {v.name for v in _variants.VARIANTS if v.arch == ARCH}
    missed = sorted({(name, fmt) for name in shipped for fmt in FORMATS} - reached)
    seconds = time.perf_counter() - start
    print(f"{launches} launches of {len(shipped)} kernels, guards untouched, {seconds:.0f} s")
    if missed:
        sys.exit(f"not reached: {missed}")


if __name__ == "__main__":
    main()

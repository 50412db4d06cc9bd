"""Large caches, neighbours, threads and devices."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa_front as dsa
import small
from compare import assert_equal, assert_same_front
from jax_dsa_front._runtime import library, loader, variants
from processes import run_python

pytestmark = pytest.mark.gpu
K = 1536


def test_no_kernel_uses_local_memory():
    """Registers suffice in every kernel for this GPU: nothing spills."""
    driver = library.bindings()
    device = library.check(driver, driver.cuDeviceGet(0))
    context = library.check(driver, driver.cuDevicePrimaryCtxRetain(device))
    library.check(driver, driver.cuCtxPushCurrent(context))
    arch = library.local_cuda_architectures()[0]
    local_bytes = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    entries = [entry for entry in variants.manifest()["kernels"] if entry["arch"] == arch]
    spilled = {}
    try:
        for entry in entries:
            kernel = driver.CUkernel(loader._kernel(driver, entry, device).handle)
            answer = driver.cuKernelGetAttribute(local_bytes, kernel, device)
            spilled[entry["name"]] = library.check(driver, answer)
    finally:
        library.check(driver, driver.cuCtxPopCurrent())
    assert entries
    assert not {name: count for name, count in spilled.items() if count}


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_far_end_of_a_cache_past_4_gib(fmt):
    """A layer of more than 2**32 bytes: the last token is written, nothing at a wrapped offset."""
    pages = 2**32 // (small.PAGE * small.ROW[fmt]) + 64
    projected, weights, _ = small.operands(seed=6, pages=1, k=K)
    cache = jnp.zeros((pages, small.PAGE, small.ROW[fmt]), jnp.uint8)
    slots = jnp.array([pages * small.PAGE - 1, pages * small.PAGE, -1, 5], jnp.int32)
    step = jax.jit(small.step, static_argnames=("fmt", "implementation"), donate_argnums=2)
    cache = step(projected, weights, cache, slots, fmt=fmt, implementation="cuda").cache
    assert_like_one_page(cache, slots, projected, weights, fmt)


def assert_like_one_page(cache, slots, projected, weights, fmt, layer=None):
    """The first and the last token hold the keys of rows 3 and 0, and no other byte is set."""
    one_page = jnp.zeros((1, small.PAGE, small.ROW[fmt]), jnp.uint8)
    near = jnp.array([63, -1, -1, 5], jnp.int32)
    want = small.step(projected, weights, one_page, near, fmt=fmt, implementation="cuda").cache
    got = dsa.read_keys(cache, slots[jnp.array([0, 3])], layer, cache_format=fmt)
    assert_equal(got, dsa.read_keys(want, near[jnp.array([0, 3])], cache_format=fmt), "keys")
    count = jax.jit(lambda cache: jnp.count_nonzero(cache, axis=(-2, -1)))
    assert np.asarray(count(cache)).sum() == np.asarray(count(want)).sum()


@pytest.mark.parametrize("batch", [4, 40, 300])  # split_n, split_k, two launches
def test_last_layer_of_stacks_past_4_gib(batch):
    """Layers of the cache and of wq_b that start past 2**32 bytes."""
    layers, pages = 350, 1500  # 4.4 GB of weights with 32 heads' worth of rows, 4.4 GB of cache
    projected, (gamma, _, *norm), _ = small.operands(seed=7, pages=1, k=K, batch=batch)
    heads = 32
    wq_b = jax.random.normal(jax.random.key(0), (heads * 128, K), jnp.bfloat16)
    stack = jnp.zeros((layers, heads * 128, K), jnp.bfloat16)
    stack = jax.jit(lambda s, w: s.at[-1].set(w), donate_argnums=0)(stack, wq_b)
    cache = jnp.zeros((layers, pages, small.PAGE, 132), jnp.uint8)
    assert stack.nbytes > 2**32 and cache.nbytes > 2**32
    projected = jnp.pad(projected, ((0, 0), (0, heads - small.HEADS)), constant_values=1)
    slots = jnp.full(batch, -1).at[:3].set([pages * small.PAGE - 1, pages * small.PAGE, 5])
    step = jax.jit(functools.partial(small.step, implementation="cuda"), donate_argnums=2)
    front = step(projected, (gamma, stack, *norm), cache, slots, jnp.int32(layers - 1))
    plain = small.step(
        projected, (gamma, wq_b, *norm), jnp.zeros((pages, small.PAGE, 132), jnp.uint8), slots,
        implementation="cuda",
    )  # fmt: skip
    assert_equal(front.query, plain.query, "query")
    assert_equal(front.weights, plain.weights, "weights")
    assert_equal(front.cache[-1], plain.cache, "the last layer")
    assert int(jnp.count_nonzero(front.cache[:-1].max(axis=(1, 2, 3)))) == 0


def test_eight_threads():
    """Concurrent executions, each with inputs of its own, give what they give alone."""
    step = jax.jit(functools.partial(small.step, implementation="cuda"))
    slots = jnp.arange(small.BATCH)
    sets = [small.operands(seed=seed, pages=4, k=K) for seed in range(8)]
    want = [step(*args, slots) for args in sets]

    def work(index):
        return [step(*sets[index], slots) for _ in range(100)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for index, fronts in enumerate(pool.map(work, range(8))):
            for front in fronts[::33]:
                assert_same_front(front, want[index])


RACE = """
import concurrent.futures, functools, threading
import jax, jax.numpy as jnp
import small
devices = jax.devices("cuda")
step = jax.jit(functools.partial(small.step, implementation="cuda"))
sets = [jax.device_put((*small.operands(k=1536, pages=4), jnp.arange(4)), devices[i % len(devices)])
        for i in range(8)]
start = threading.Barrier(8)
def work(index):
    start.wait()
    return small.digest(step(*sets[index]))
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(work, range(8)))), len(devices))
"""


def test_first_use_from_eight_threads_on_every_device(tmp_path):
    """Kernels are loaded once per process and made ready once per device, also under a race."""
    output = run_python(RACE, cwd=tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert output.split() == ["1", str(len(jax.devices("cuda")))]


def test_memory_does_not_grow():
    """Two thousand donated calls leave as many live bytes as twenty."""
    projected, weights, cache = small.operands(k=K, pages=16)
    step = jax.jit(functools.partial(small.step, implementation="cuda"), donate_argnums=2)
    device = cache.devices().pop()
    in_use = []
    for i in range(2000):
        cache = step(projected, weights, cache, jnp.arange(small.BATCH)).cache
        if i in (19, 1999):
            jax.block_until_ready(cache)
            in_use.append(device.memory_stats()["bytes_in_use"])
    assert in_use[0] == in_use[1]

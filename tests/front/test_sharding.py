"""`shard_map` over devices: nothing is gathered, the caches are donated, bits are equal.

Under plain `jit` with sharded operands the results are right; on CUDA their operands are gathered.
"""

import pytest

from processes import run_python

PRELUDE = """
import functools, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_dsa_front as dsa
from compare import assert_equal
from programs import COLLECTIVES

fmt, DEVICES, K = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
assert jax.device_count() == DEVICES
mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
HEADS, PAGES, PAGE = 16, 4, 16
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
static = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format=fmt)
gamma = jnp.asarray(normal(K)).astype(jnp.bfloat16)
wq_b = jnp.asarray(normal(HEADS * 128, K) * K**-0.5).astype(jnp.bfloat16)
norm = jnp.asarray(normal(128)), jnp.asarray(normal(128))
row = dsa.empty_cache(1, 1, cache_format=fmt).shape[-1]

def fields(front):
    scale = () if front.query_scale is None else (front.query_scale,)
    return front.query, front.weights, front.cache, *scale

def assert_local(compiled, cache_bytes):
    text = compiled.as_text()
    assert not COLLECTIVES.findall(text), COLLECTIVES.findall(text)
    assert "input_output_alias" in text.split("\\n", 1)[0]
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
"""

BATCH_PARALLEL = """
batch = DEVICES * 3
projected = jnp.asarray(normal(batch, K + 128 + HEADS)).astype(jnp.bfloat16)
pools = jnp.asarray(rng.integers(0, 256, (DEVICES, PAGES, PAGE, row), dtype=np.uint8))
slots = jnp.asarray(rng.integers(-1, PAGES * PAGE, batch).astype(np.int32))

def local(projected, pool, slots):
    front = dsa.index_front(projected, gamma, wq_b, *norm, pool[0], slots, **static)
    query, weights, cache, *scale = fields(front)
    return query, weights, cache[None], *scale

sharded = jax.jit(
    jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")), donate_argnums=1
)
put = lambda a: jax.device_put(a, NamedSharding(mesh, P("x")))
compiled = sharded.lower(put(projected), put(pools), put(slots)).compile()
assert_local(compiled, PAGES * PAGE * row)
got = sharded(put(projected), put(pools), put(slots))
alone = jax.jit(local)
for device in range(DEVICES):
    rows = slice(device * 3, device * 3 + 3)
    want = alone(projected[rows], pools[device : device + 1], slots[rows])
    for left, right, part in zip(got, want, (rows, rows, slice(device, device + 1), rows)):
        assert_equal(left[part], right, f"device {device}")
"""

HEAD_PARALLEL = """
batch, shard = 5, HEADS // DEVICES
projected = jnp.asarray(normal(batch, K + 128 + HEADS)).astype(jnp.bfloat16)
pool = jnp.asarray(rng.integers(0, 256, (PAGES, PAGE, row), dtype=np.uint8))
slots = jnp.asarray(np.array([3, -1, 17, 63, 64], np.int32))

def local(projected, wq_b, pools, slots):
    front = dsa.index_front(
        projected, gamma, wq_b, *norm, pools[0], slots,
        num_heads=HEADS, head_start=jax.lax.axis_index("x") * shard, **static,
    )
    query, weights, cache, *scale = fields(front)
    return query, weights, cache[None], *scale

heads = P(None, "x")
sharded = jax.jit(
    jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("x"), P("x"), P()),
        out_specs=(heads, heads, P("x"), *((heads,) if fmt == "mxfp4" else ())),
    ),
    donate_argnums=2,
)
put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
pools = jnp.tile(pool[None], (DEVICES, 1, 1, 1))  # every device keeps the whole cache
arguments = put(projected, P()), put(wq_b, P("x")), put(pools, P("x")), put(slots, P())
assert_local(sharded.lower(*arguments).compile(), PAGES * PAGE * row)
got = sharded(*arguments)
want = fields(jax.jit(functools.partial(dsa.index_front, **static))(
    projected, gamma, wq_b, *norm, pool, slots))
for device in range(DEVICES):
    assert_equal(got[2][device], want[2], f"cache of device {device}")
assert_equal(got[1], want[1], "weights")
assert_equal(got[0], want[0], "query")
if fmt == "mxfp4":
    assert_equal(got[3], want[3], "query_scale")
"""

PLAIN_JIT = """
batch = DEVICES * 2
projected = jnp.asarray(normal(batch, K + 128 + HEADS)).astype(jnp.bfloat16)
pool = rng.integers(0, 256, (PAGES, PAGE, row), dtype=np.uint8)
slots = jnp.asarray(rng.integers(-1, PAGES * PAGE, batch).astype(np.int32))
front = jax.jit(functools.partial(dsa.index_front, **static), donate_argnames="cache")
want = front(projected, gamma, wq_b, *norm, jnp.asarray(pool), slots)
put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
for cache_spec in ((), (None, "x")):  # the cache whole on every device, or its pages split
    arguments = (
        put(projected, "x"), put(gamma), put(wq_b, "x"), *map(put, norm),
        put(pool, *cache_spec), put(slots, "x"),
    )
    compiled = front.lower(*arguments).compile()
    if jax.default_backend() == "gpu":  # as docs/integration.md says
        gathers = re.findall(".* all-gather(?:-start)?[(].*", compiled.as_text())
        assert gathers, compiled.as_text()
        assert any("u8[" in line for line in gathers) == bool(cache_spec), gathers
        kept = compiled.memory_analysis().alias_size_in_bytes
        assert kept == (0 if cache_spec else pool.nbytes), kept
    got = compiled(*arguments)
    assert_equal(got.weights, want.weights, "weights")
    assert_equal(got.cache, want.cache, "cache")
    same = np.asarray(got.query) == np.asarray(want.query)
    assert same.mean() >= (1 if jax.default_backend() == "gpu" else 0.999), same.mean()
"""


@pytest.mark.parametrize(
    ("program", "fmt"),
    [(BATCH_PARALLEL, "fp8"), (HEAD_PARALLEL, "mxfp4"), (PLAIN_JIT, "fp8")],
    ids=["batch-fp8", "heads-mxfp4", "plain-fp8"],
)
def test_eight_cpu_devices(program, fmt, tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    code = PRELUDE + program
    run_python(code, fmt, 8, 256, cwd=tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "program", [BATCH_PARALLEL, HEAD_PARALLEL, PLAIN_JIT], ids=["batch", "heads", "plain"]
)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
def test_all_gpus(program, fmt, tmp_path, several_gpus):
    """The same on the CUDA devices of this machine, where the kernel takes K = 1536."""
    devices = len(several_gpus)
    code = PRELUDE + program
    run_python(code, fmt, devices, 1536, cwd=tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")

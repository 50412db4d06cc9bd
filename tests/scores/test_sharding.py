"""`index_scores` over devices by `shard_map`: heads, sequences or keys split; the scores are those
of one device."""

import pytest

from processes import run_python

PRELUDE = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import jax_dsa_front as dsa
from filled_caches import filled
from programs import COLLECTIVES

fmt, DEVICES = sys.argv[1], int(sys.argv[2])
assert jax.device_count() == DEVICES
mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
BATCH, HEADS, PAGES, WIDTH, PAGE = 2 * DEVICES, 8 * DEVICES, 5 * DEVICES, 4, 64
codes, scale, weights, cache = filled(fmt, PAGE, PAGES, 1, BATCH, HEADS)
import ml_dtypes
query = codes if fmt == "mxfp4" else codes.view(ml_dtypes.float8_e4m3fn)
rng = np.random.default_rng(0)
cache, lens = cache[0], rng.integers(0, WIDTH * PAGE + 1, BATCH).astype(np.int32)
score = functools.partial(dsa.index_scores, cache_format=fmt)
shard = functools.partial(jax.shard_map, mesh=mesh)

def assert_near(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (np.isneginf(got) == np.isneginf(want)).all()
    inside = np.isfinite(want)
    np.testing.assert_allclose(got[inside], want[inside], rtol=1e-4, atol=1e-2)
"""

HEADS = """
# Every device has some heads, and all keys. -inf of each sums to -inf.
table = rng.integers(0, PAGES, (BATCH, WIDTH)).astype(np.int32)
def local(query, scale, weights, cache, table, lens):
    return jax.lax.psum(score(query, scale, weights, cache, table, lens), "x")
heads = P(None, "x")
run = jax.jit(shard(local, in_specs=(heads, heads, heads, P(), P(), P()), out_specs=P()))
operands = query, scale, weights, cache, table, lens
assert_near(run(*operands), score(*operands))
"""

SEQUENCES = """
# Every device has some sequences, and a pool of their pages; entries count within it.
own = PAGES // DEVICES
table = rng.integers(0, own, (BATCH, WIDTH)).astype(np.int32)
rows = P("x")
run = jax.jit(shard(score, in_specs=(rows,) * 6, out_specs=rows))
operands = query, scale, weights, cache, table, lens
text = run.lower(*operands).compile().as_text()
assert not COLLECTIVES.findall(text)
whole = table + own * (np.arange(BATCH) // (BATCH // DEVICES))[:, None]
assert_near(run(*operands), score(query, scale, weights, cache, whole.astype(np.int32), lens))
"""

KEYS = """
# Every device has some pages of every sequence: it scores its own, the others are no pages to it.
own = PAGES // DEVICES
table = rng.integers(0, PAGES, (BATCH, WIDTH)).astype(np.int32)
def local(query, scale, weights, cache, table, lens):
    mine = table - own * jax.lax.axis_index("x")  # outside [0, own): on another device
    return jax.lax.pmax(score(query, scale, weights, cache, mine, lens), "x")
specs = (P(), P(), P(), P("x"), P(), P())
run = jax.jit(shard(local, in_specs=specs, out_specs=P()))
operands = query, scale, weights, cache, table, lens
assert_near(run(*operands), score(*operands))
"""


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("program", [HEADS, SEQUENCES, KEYS], ids=["heads", "sequences", "keys"])
def test_eight_cpu_devices(program, fmt, tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    run_python(PRELUDE + program, fmt, 8, cwd=tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("program", [HEADS, SEQUENCES, KEYS], ids=["heads", "sequences", "keys"])
def test_all_gpus(program, fmt, tmp_path, several_gpus):
    """The same on the CUDA devices of this machine, with eight heads for each where heads split."""
    environment = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    run_python(PRELUDE + program, fmt, len(several_gpus), cwd=tmp_path, **environment)

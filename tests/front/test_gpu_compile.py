"""XLA's GPU compiler without a GPU: what it makes of the programs around the call on an H200.

Opt-in, because it needs JAX's CUDA plugin with its libraries (gigabytes): install one of the cuda
extras and run `pytest -m gpu_compile` with JAX_DSA_FRONT_GPU_COMPILE=1. No driver is needed.
h200_target_config.txt describes the card to XLA.
"""

import os
from pathlib import Path

import jax
import pytest

import small
from processes import run_python
from programs import NO_DUMP_OF_GRAPHS

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        os.environ.get("JAX_DSA_FRONT_GPU_COMPILE") != "1",
        reason="needs JAX's CUDA plugin: JAX_DSA_FRONT_GPU_COMPILE=1 runs it",
    ),
]

CONFIG = Path(__file__).parents[1] / "h200_target_config.txt"
PRELUDE = """
import sys, pathlib
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax_dsa_front as dsa
import small
from programs import (
    COLLECTIVES, TARGET, assert_calls_stand_alone, assert_in_place, touched,
)
config, name, fmt = sys.argv[1:]

def devices(count):
    return topologies.get_topology_desc(
        platform="cuda", target_config=pathlib.Path(config).read_text(), topology=f"1x1x{count}"
    ).devices
"""
COMPILE = """
sharding = jax.sharding.SingleDeviceSharding(devices(1)[0])
program = getattr(small, name)
args = small.operands(k=1536, stacked=program in small.STACKED, fmt=fmt)
args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
lowered = jax.jit(program, static_argnums=3, donate_argnums=2).lower(*args, fmt)
compiled = lowered.compile()
assert_calls_stand_alone(compiled.as_text(), sliced=program in small.READ_IN_PLACE)
calls = dict(nested_jit=2, cond_of_two_calls=2, reference=2)
calls |= dict(unrolled_layers=small.LAYERS, unrolled_weights=small.LAYERS)
assert compiled.as_text().count(f'custom_call_target="{TARGET}"') == calls.get(name, 1)
if program not in small.COPIED:
    assert_in_place(compiled, small.layer_bytes(args[2]))
if program not in small.SLICED_WEIGHTS:
    assert not touched(compiled.as_text(), small.HEADS * 128 * 1536 * 2, ("bf16", "f32"))
"""

SHARDED = """
mesh = Mesh(np.array(devices(2)), ("x",))
K, H = 1536, small.HEADS
projected, weights, pool = small.operands(k=K, fmt=fmt)

def local(projected, gamma, wq_b, gain, bias, pools, slots):
    shard = dict(num_heads=H, head_start=jax.lax.axis_index("x") * (H // 2))
    front = dsa.index_front(
        projected, gamma, wq_b, gain, bias, pools[0], slots,
        key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format=fmt,
        **(shard if name == "heads" else {}),
    )
    return front.query, front.weights, front.cache[None]

whole, rows, heads = P(), P("x"), P(None, "x")
here, out = ((whole, rows), heads) if name == "heads" else ((rows, whole), rows)
specs = here[0], whole, here[1], whole, whole, rows, here[0]
program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(out, out, rows))
shapes = [a.shape for a in (projected, *weights)] + [(2, *pool.shape), (small.BATCH,)]
dtypes = [a.dtype for a in (projected, *weights, pool)] + [jnp.int32]
args = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
]
compiled = jax.jit(program, donate_argnums=5).lower(*args).compile()
text = compiled.as_text()
assert_calls_stand_alone(text)
assert_in_place(compiled, small.layer_bytes(pool))
assert not COLLECTIVES.findall(text), COLLECTIVES.findall(text)
"""


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize(
    "program", [*small.GPU_PROGRAMS, small.layers_as_xs], ids=lambda p: p.__name__
)
def test_program_is_in_place(program, fmt, tmp_path):
    """Aliased custom calls, no copy of the cache, a cache layer or a weight layer, but where
    small.COPIED says so."""
    compile_for_h200(COMPILE, program.__name__, fmt, tmp_path)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("split", ["batch", "heads"])
def test_shard_map_is_local(split, fmt, tmp_path):
    """On two devices: no collectives, no copy, the donated pools are aliased."""
    compile_for_h200(SHARDED, split, fmt, tmp_path)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason=NO_DUMP_OF_GRAPHS)
def test_loop_bodies_are_command_buffers(tmp_path):
    compile_for_h200(
        COMPILE, "token_and_layer_scan", "fp8", tmp_path, f"--xla_dump_to={tmp_path}/dump"
    )
    (dump,) = (tmp_path / "dump").glob("*thunk_sequence_after_thunk_passes*")
    lines = dump.read_text().splitlines()
    call = next(i for i, line in enumerate(lines) if "kCustomCall" in line)
    around, depth = [], indentation(lines[call])
    for line in reversed(lines[:call]):
        if indentation(line) < depth:
            around.append(line)
            depth = indentation(line)
    assert any("kCommandBuffer" in line for line in around), dump.read_text()


def indentation(line):
    return len(line) - len(line.lstrip())


def compile_for_h200(code, name, fmt, cwd, flags=""):
    run_python(
        PRELUDE + code,
        *(CONFIG, name, fmt),
        cwd=cwd,
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        XLA_FLAGS=f"--xla_gpu_autotune_level=0 {flags}",
    )

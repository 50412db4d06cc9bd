"""XLA's GPU compiler without a GPU: what it makes of the programs around the call on an H200.

Opt-in, because it needs JAX's CUDA plugin with its libraries (gigabytes): install one of the cuda
extras and run `pytest -m gpu_compile` with JAX_DSA_FRONT_GPU_COMPILE=1. No driver is needed.
h200_target_config.txt describes the card to XLA.
"""

import os
from pathlib import Path

import pytest

import small
from processes import run_python

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        os.environ.get("JAX_DSA_FRONT_GPU_COMPILE") != "1",
        reason="needs JAX's CUDA plugin: JAX_DSA_FRONT_GPU_COMPILE=1 runs it",
    ),
]

CONFIG = Path(__file__).with_name("h200_target_config.txt")
COMPILE = """
import sys, pathlib
import jax
from jax.experimental import topologies
import small
from programs import TARGET, assert_calls_stand_alone, assert_in_place, touched

config, name, fmt = sys.argv[1:]
topology = topologies.get_topology_desc(
    platform="cuda", target_config=pathlib.Path(config).read_text(), topology="1x1x1"
)
sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
program = getattr(small, name)
args = small.operands(k=1536, stacked=program in small.STACKED, fmt=fmt)
args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
lowered = jax.jit(program, static_argnums=3, donate_argnums=2).lower(*args, fmt)
compiled = lowered.compile()
assert_calls_stand_alone(compiled.as_text())
calls = {"nested_jit": 2, "reference": 2, "unrolled_layers": small.LAYERS}.get(name, 1)
assert compiled.as_text().count(f'custom_call_target="{TARGET}"') == calls
if program != small.layers_as_xs:
    assert_in_place(compiled, small.layer_bytes(args[2]))
    assert not touched(compiled.as_text(), small.HEADS * 128 * 1536 * 2, ("bf16", "f32"))
"""


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize(
    "program", [*small.GPU_PROGRAMS, small.layers_as_xs], ids=lambda p: p.__name__
)
def test_program_is_in_place(program, fmt, tmp_path):
    """Aliased custom calls, no copy of the cache, a cache layer or a weight layer, but for layers
    that are a scan's inputs and outputs."""
    compile_for_h200(program.__name__, fmt, tmp_path)


def test_loop_bodies_are_command_buffers(tmp_path):
    compile_for_h200("token_and_layer_scan", "fp8", tmp_path, f"--xla_dump_to={tmp_path}/dump")
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


def compile_for_h200(program, fmt, cwd, flags=""):
    run_python(
        COMPILE,
        *(CONFIG, program, fmt),
        cwd=cwd,
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        XLA_FLAGS=f"--xla_gpu_autotune_level=0 {flags}",
    )

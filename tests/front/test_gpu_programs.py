"""The kernel inside jitted programs: aliased, captured, replayed, exported, profiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dsa_front as dsa
import small
from compare import assert_equal, assert_same_as_eager
from processes import run_python
from programs import NO_DUMP_OF_GRAPHS, assert_calls_stand_alone, assert_in_place, touched

pytestmark = pytest.mark.gpu
K = 1536


def operands(**keywords):
    return small.operands(k=K, **keywords)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("program", small.GPU_PROGRAMS, ids=lambda p: p.__name__)
def test_compiled_program_is_in_place(program, fmt):
    """Aliased custom calls, no copy of cache or weight layer; the bits of eager calls."""
    args = operands(stacked=program in small.STACKED, fmt=fmt)
    compiled = jax.jit(program, static_argnums=3, donate_argnums=2).lower(*args, fmt).compile()
    assert_calls_stand_alone(compiled.as_text(), sliced=program in small.READ_IN_PLACE)
    if program not in small.COPIED:
        assert_in_place(compiled, small.layer_bytes(args[2]))
    if program not in small.SLICED_WEIGHTS:
        weight_layer = small.HEADS * 128 * K * 2
        assert not touched(compiled.as_text(), weight_layer, ("bf16", "f32"))
    assert_same_as_eager(compiled, program, args, fmt)


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4"])
@pytest.mark.parametrize("donated", [(), (2,)], ids=["kept", "donated"])
def test_layers_that_a_scan_slices_are_right(donated, fmt):
    """Weights and cache as inputs and outputs of the scan: XLA copies layers, the bits hold."""
    args = operands(stacked=True, fmt=fmt)
    program = small.layers_as_xs
    compiled = (
        jax.jit(program, static_argnums=3, donate_argnums=donated).lower(*args, fmt).compile()
    )
    assert_calls_stand_alone(compiled.as_text(), sliced=program in small.READ_IN_PLACE)
    assert_same_as_eager(compiled, program, args, fmt)


def bits(tree):
    return [
        lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == jnp.float8_e4m3fn else x
        for x in jax.tree.leaves(tree)
    ]


@jax.jit
def same(left, right):
    """Whether all arrays are equal bit for bit (weights hold no NaN here)."""
    pairs = zip(bits(left), bits(right), strict=True)
    return jnp.all(jnp.stack([jnp.all(a == b) for a, b in pairs]))


@pytest.mark.parametrize(
    ("fmt", "batch"),  # one batch for each way to launch: split_n, split_k, two launches
    [("fp8", 4), ("mxfp8", 4), ("mxfp4", 4), ("fp8", 16), ("mxfp4", 16), ("fp8", 300)],
)
def test_thousand_replays_equal_eager_calls(fmt, batch):
    """Inputs, slots and layer vary; six kernels around the call make XLA record a graph."""
    base, weights, cache = operands(stacked=True, fmt=fmt, pages=8, batch=batch)
    rng = np.random.default_rng(0)

    def step(projected, weights, cache, slots, layer):
        projected = small.by_way_of_six_kernels(projected)
        return small.step(projected, weights, cache, slots, layer, fmt)

    step = jax.jit(step, donate_argnums=2)
    roll = jax.jit(lambda x, by, scale: jnp.roll(x, by, axis=1) * scale)
    eager_cache, equal, pointers = jnp.copy(cache), [], set()
    for i in range(1000):
        projected = roll(base, i, jnp.bfloat16(2.0 ** (i % 5)))
        slots = rng.integers(-2, 8 * small.PAGE + 2, batch)
        slots[0] = i % 500
        slots = jnp.asarray(distinct(slots))
        layer = jnp.int32(i % small.LAYERS)
        front = step(projected, weights, cache, slots, layer)
        eager = small.step(projected, weights, eager_cache, slots, layer, fmt)
        cache, eager_cache = front.cache, eager.cache
        equal.append(same(front, eager))
        pointers.add(cache.unsafe_buffer_pointer())
    assert np.flatnonzero(~np.asarray(jnp.stack(equal))).tolist() == []
    assert len(pointers) == 1, "the donated cache moved"


def distinct(slots):
    """Slots with repetitions made -1, because rows that share a slot have unspecified bytes."""
    _, first = np.unique(slots, return_index=True)
    return np.where(np.isin(np.arange(len(slots)), first), slots, -1).astype(np.int32)


@pytest.mark.parametrize(("batch", "tries"), [(4, 4000), (16, 1000), (300, 1000)])
def test_what_the_kernel_before_has_written_is_seen(batch, tries):
    """wq_b, the rows with keys and head weights, and the slots are made right in front of the call:
    nothing is read before it is complete."""
    projected, (gamma, wq_b, *norm), cache = operands(pages=8, batch=batch)
    wide = projected.astype(jnp.float32), wq_b.astype(jnp.float32)

    def made(wide, scale, shift):
        rows, matrix = ((array * scale).astype(jnp.bfloat16) for array in wide)
        return rows, matrix, jnp.arange(batch) + shift

    def call(rows, matrix, slots):
        return small.step(rows, (gamma, matrix, *norm), cache, slots)

    chained = jax.jit(lambda *arguments: call(*lax.optimization_barrier(made(*arguments))))
    arguments = [(wide, jnp.float32(1 + i / 64), jnp.int32(3 * i)) for i in range(32)]
    want = [call(*jax.jit(made)(*a)) for a in arguments]
    equal = [same(chained(*arguments[i % 32]), want[i % 32]) for i in range(tries)]
    assert np.asarray(jnp.stack(equal)).all()


@pytest.mark.parametrize("program", [small.plain, small.token_scan, small.layer_scan])
def test_caller_who_does_not_donate_keeps_the_cache(program):
    """One copy, in front of any loop; the results are the same."""
    args = operands(seed=1, stacked=program in small.STACKED)
    before = np.asarray(args[2]).copy()
    compiled = jax.jit(program, static_argnums=3).lower(*args, "fp8").compile()
    assert_in_place(compiled, small.layer_bytes(args[2]), copies=["copy"])
    entry = compiled.as_text().split("\nENTRY ")[1]
    assert len(touched(entry, small.layer_bytes(args[2]))) == 1, "the copy is inside a loop"
    got = assert_same_as_eager(compiled, program, args, "fp8")
    assert_equal(args[2], before, "the caller's cache")
    (cache,) = (leaf for leaf in got if leaf.shape == before.shape)
    assert (np.asarray(cache) != before).any()


def test_debug_nans_accepts_finite_input():
    args = *operands(), jnp.arange(small.BATCH)
    want = small.digest(small.step(*args))
    with jax.debug_nans(True):
        assert small.digest(jax.jit(small.step)(*args)) == want


DIGEST = """
import sys, jax, jax.numpy as jnp, small
args = *small.operands(k=1536, stacked=True), jnp.arange(small.BATCH), jnp.int32(1)
def step(projected, *rest):
    return tuple(jax.tree.leaves(small.step(small.by_way_of_six_kernels(projected), *rest)))
fn = jax.jit(step)
for _ in range(4):
    out = fn(*args)
print(small.digest(out))
"""
ENVIRONMENT = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")


def digest_of_eager():
    args = *operands(stacked=True), jnp.arange(small.BATCH), jnp.int32(1)
    return small.digest(small.step(*args)) + "\n"


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason=NO_DUMP_OF_GRAPHS)
def test_call_is_part_of_a_command_buffer(tmp_path):
    """With default flags: the thunk sequence holds a command buffer and no loose custom call."""
    flags = f"--xla_dump_to={tmp_path}/dump --xla_dump_hlo_module_re=jit_step"
    run_python(DIGEST, cwd=tmp_path, XLA_FLAGS=flags, **ENVIRONMENT)
    dumps = sorted((tmp_path / "dump").glob("*jit_step*thunk_sequence_after_thunk_passes*"))
    assert dumps, [path.name for path in (tmp_path / "dump").iterdir()]
    text = dumps[-1].read_text()
    assert "kCommandBuffer" in text
    assert "kCustomCall" in text
    outer = [line for line in text.splitlines() if line and not line[0].isspace()]
    assert not [line for line in outer if "kCustomCall" in line], text


RECORDINGS = """
import os
os.dup2(1, 2)  # XLA's log between our marks, in order
import jax, jax.numpy as jnp, small
def decode(row, weights, cache):
    row = small.by_way_of_six_kernels(row)
    front = small.step(row, weights, cache, jnp.arange(small.BATCH), implementation="cuda")
    return row.at[:, -small.HEADS:].set(front.weights), front.cache
decode = jax.jit(decode, donate_argnums=(0, 2))
row, weights, cache = small.operands(k=1536)
copies = jax.tree.map(jnp.copy, weights)
for phase, parameters, runs in (
    ("first", weights, 3), ("same", weights, 50), ("moved", copies, 1), ("stayed", copies, 50)
):
    print("=== phase", phase, flush=True)
    for _ in range(runs):
        row, cache = jax.block_until_ready(decode(row, parameters, cache))
"""


def test_graph_is_recorded_again_only_when_an_address_changes(tmp_path):
    """XLA's own log: what it records and what it executes, while addresses stay and as they move.

    Everything that a step makes anew is donated to it, and each step is waited for, so that only
    XLA's scratch memory is allocated per step, and that at the same place. A first recording is
    due by the third step: XLA may execute the first without a graph.
    """
    log = run_python(
        RECORDINGS,
        cwd=tmp_path,
        TF_CPP_MIN_LOG_LEVEL="0",
        TF_CPP_VMODULE="command_buffer_thunk=3",
        **ENVIRONMENT,
    )
    phases = dict(part.split("\n", 1) for part in log.split("=== phase ")[1:])
    recorded = {name: count_lines(lines, RECORDED) for name, lines in phases.items()}
    executed = {name: count_lines(lines, EXECUTED) for name, lines in phases.items()}
    graphs = executed["moved"]  # in one step
    counts = f"recorded {recorded}, executed {executed}; the log ends with\n{log[-3000:]}"
    assert graphs >= 1 and executed["same"] == executed["stayed"] == 50 * graphs, counts
    assert recorded["first"] >= 1 and recorded["moved"] >= 1, counts
    assert recorded["same"] == recorded["stayed"] == 0, counts


# Lines of xla/backends/gpu/runtime/command_buffer_thunk.cc (VLOG 3), without what changed in them:
# "Initialize", "Update" or "Create/Update command buffer ... by recoding command buffer cmd
# sequence ...", and "Execute command buffer ...; num_executions=...".
RECORDED = r"^(?!.*skip Initialize).*by recoding command buffer cmd sequence"
EXECUTED = r"Execute command buffer.*num_executions="


def count_lines(text, pattern):
    return len(re.findall(pattern, text, re.M))


@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_command_buffer="], ids=["graph", "none"])
def test_without_command_buffers_the_same_bytes(flags, tmp_path):
    assert run_python(DIGEST, cwd=tmp_path, XLA_FLAGS=flags, **ENVIRONMENT) == digest_of_eager()


LOAD = """
import pathlib, sys
import jax, jax.numpy as jnp
from jax import export
import jax_dsa_front
import small
program = export.deserialize(bytearray(pathlib.Path("program").read_bytes()))
args = *small.operands(k=1536, stacked=True), jnp.arange(small.BATCH), jnp.int32(1)
print(small.digest(program.call(*args)))
"""


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=str)
@pytest.mark.parametrize("rows", [str(small.BATCH), "rows"])
def test_exported_program_finds_its_kernels(rows, platforms, tmp_path):
    """Lowered here, run in a process that never lowers ours and imports the package alone."""
    exported = jax.export.export(
        jax.jit(lambda *args: tuple(jax.tree.leaves(small.step(*args)))),
        platforms=platforms,
        disabled_checks=dsa.export_safety_checks(),
    )(*small.abstract(*jax.export.symbolic_shape(rows), k=K))
    (tmp_path / "program").write_bytes(exported.serialize())
    assert run_python(LOAD, cwd=tmp_path, **ENVIRONMENT) == digest_of_eager()


def test_persistent_cache_hit_finds_its_kernels(tmp_path):
    cache = dict(
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    code = (
        DIGEST.replace("fn = jax.jit(step)", HITS)
        + "print('/jax/compilation_cache/cache_hits' in events)"
    )
    outputs = [run_python(code, cwd=tmp_path, **ENVIRONMENT, **cache) for _ in range(2)]
    assert [out.split()[1] for out in outputs] == ["False", "True"]
    assert outputs[0].split()[0] == outputs[1].split()[0] == digest_of_eager().strip()


HITS = """
import jax._src.monitoring as monitoring
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name))
fn = jax.jit(step)
"""


def test_name_in_a_profile(tmp_path):
    args = *operands(), jnp.arange(small.BATCH)
    step = jax.jit(small.step)
    jax.block_until_ready(step(*args))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(step(*args))
    (trace,) = tmp_path.rglob("*.xplane.pb")
    assert b"index_front_sm_" in trace.read_bytes()  # the kernel's own; the operator's is there too

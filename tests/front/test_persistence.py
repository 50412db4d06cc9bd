"""Programs that outlive their process: `jax.export`, the persistent compilation cache, AOT."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_dsa_front as dsa
import small
from compare import assert_equal
from processes import run_python
from programs import TARGET

COMMON = """
import pathlib
import jax, jax.numpy as jnp
from jax import export
import small
def arguments(fmt, batch=small.BATCH):
    return *small.operands(stacked=True, fmt=fmt, batch=batch), jnp.arange(batch), jnp.int32(1)
"""
WRITE = """
rows, = export.symbolic_shape("rows")
for fmt in ("fp8", "mxfp4"):
    step = jax.jit(lambda *args: tuple(jax.tree.leaves(small.step(*args, fmt=fmt))))
    args, shapes = arguments(fmt), small.abstract(rows, fmt=fmt)
    pathlib.Path(f"fixed-{fmt}").write_bytes(export.export(step)(*args).serialize())
    pathlib.Path(f"symbolic-{fmt}").write_bytes(export.export(step)(*shapes).serialize())
    print(small.digest(step(*args)), small.digest(step(*arguments(fmt, batch=7))))
"""
READ = """
def load(name):
    return export.deserialize(bytearray(pathlib.Path(name).read_bytes()))
for fmt in ("fp8", "mxfp4"):
    fixed = load(f"fixed-{fmt}").call(*arguments(fmt))
    print(small.digest(fixed), small.digest(load(f"symbolic-{fmt}").call(*arguments(fmt, batch=7))))
"""
COMPILE = """
import jax._src.monitoring as monitoring
args = jax.block_until_ready(arguments("fp8"))  # by programs of their own
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name))
out = jax.block_until_ready(jax.jit(small.step)(*args))
found = [name.split("/")[-1] for name in events if "/cache_" in name]
print(small.digest(out), *sorted(set(found)))
"""


def test_export_runs_in_a_process_that_never_lowers(tmp_path):
    """Serialised there, run here: equal bytes, for a fixed and for a symbolic batch."""
    written = run_python(COMMON + WRITE, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert len(set(written.split())) == 4
    assert run_python(COMMON + READ, cwd=tmp_path, JAX_PLATFORMS="cpu") == written


def test_persistent_cache_hits_across_processes(tmp_path):
    """Nothing in a program differs from process to process, so the second compiles nothing."""
    environment = dict(
        cwd=tmp_path,
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    (first, *found), (second, *found_again) = (
        run_python(COMMON + COMPILE, **environment).split() for _ in range(2)
    )
    assert first == second
    assert (found, found_again) == (["cache_misses"], ["cache_hits"])


def test_lowering_is_reproducible_across_processes(tmp_path):
    """The CUDA program is the same text in two processes: no pointer, no counter, no path."""
    code = """
import jax, jax.numpy as jnp, small, programs
args = *small.operands(stacked=True, k=1536, pages=4), jnp.arange(small.BATCH), jnp.int32(1)
print(programs.lowered_for_cuda(small.step, *args))
"""
    text = run_python(code, cwd=tmp_path)
    assert TARGET in text
    assert run_python(code, cwd=tmp_path) == text


def step(*args):
    return tuple(jax.tree.leaves(small.step(*args)))


def test_cuda_export_without_a_gpu():
    """A machine without a GPU exports the call by name; the symbolic batch stays symbolic."""
    for rows in (4, export.symbolic_shape("rows")[0]):
        exported = export.export(
            jax.jit(step), platforms=["cuda"], disabled_checks=dsa.export_safety_checks()
        )(*small.abstract(rows, k=1536))
        assert TARGET in exported.mlir_module()
        serialized = exported.serialize()
        assert TARGET.encode() in serialized
        assert TARGET in export.deserialize(serialized).mlir_module()


def test_symbolic_number_of_pages():
    """JAX has to know that it is at most what 32-bit page numbers hold."""
    projected, weights, cache = small.operands(pages=2)
    args = projected, weights, cache, jnp.arange(small.BATCH)
    shapes = jax.tree.map(lambda x: small.shape(*x.shape, dtype=x.dtype), args)

    def exported_for(pages):
        pool = small.shape(pages, *cache.shape[1:], dtype=cache.dtype)
        return export.export(jax.jit(step))(*shapes[:2], pool, shapes[3])

    with pytest.raises(Exception, match=r"(?s)pages.*inconclusive"):
        exported_for(*export.symbolic_shape("pages"))
    bound = export.symbolic_shape("pages", constraints=["pages <= 1000000"])
    exported = exported_for(*bound)
    for got, want in zip(exported.call(*args), step(*args), strict=True):
        assert_equal(got, want, "exported")


def test_cuda_export_needs_the_safety_checks():
    """What `export_safety_checks` is for: without it JAX refuses a custom call by its name."""
    with pytest.raises(ValueError, match=re.escape(TARGET)):
        export.export(jax.jit(step), platforms=["cuda"])(*small.abstract(4, k=1536))


def test_export_for_both_platforms_runs_here():
    """One artefact for cpu and cuda; on this platform it gives what jit gives."""
    args = *small.operands(k=1536), jnp.arange(small.BATCH)
    exported = export.export(
        jax.jit(step),
        platforms=["cpu", "cuda"],
        disabled_checks=dsa.export_safety_checks(),
    )(*args)
    assert TARGET in exported.mlir_module()
    want = jax.tree.leaves(jax.jit(small.step)(*args))
    for got, right in zip(exported.call(*args), want, strict=True):
        assert_equal(got, right, "exported")


def test_ahead_of_time_compilation():
    args = *small.operands(seed=3), jnp.arange(small.BATCH)
    compiled = jax.jit(small.step).lower(*args).compile()
    assert small.digest(compiled(*args)) == small.digest(small.step(*args))

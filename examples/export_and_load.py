"""`jax.export`: a program for cpu and cuda from a machine without a GPU, run in another process.

The exported program names no kernel. The process that runs it needs `import jax_dsa_front` and
nothing else; it picks the kernel for its own device. Serialising needs the package flatbuffers.
"""

import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import jax_dsa_front as dsa

HEADS, K = 8, 1536
BATCHES = 1, 5
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")


def step(projected, q_norm, wq_b, gain, bias, cache, slots):
    front = dsa.index_front(projected, q_norm, wq_b, gain, bias, cache, slots, **STATIC)
    return front.query, front.weights, front.cache


def inputs(batch: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(batch), 2)
    wq_b = jax.random.normal(keys[0], (HEADS * 128, K), jnp.bfloat16) * K**-0.5
    norms = jnp.ones(K, jnp.bfloat16), wq_b, jnp.ones(128), jnp.zeros(128)
    projected = jax.random.normal(keys[1], (batch, K + 128 + HEADS), jnp.bfloat16)
    cache = dsa.empty_cache(2, 64, cache_format="fp8")
    return [projected, *norms, cache, jnp.arange(batch, dtype=jnp.int32)]


def export(path: pathlib.Path) -> None:
    """Exports with a symbolic batch, so that one program serves every batch."""
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(1)]
    for position in (0, 6):  # projected and slots
        shapes[position] = jax.ShapeDtypeStruct(
            (batch, *shapes[position].shape[1:]), shapes[position].dtype
        )
    exported = jax.export.export(
        jax.jit(step, donate_argnums=5),
        platforms=("cpu", "cuda"),
        disabled_checks=dsa.export_safety_checks(),
    )(*shapes)
    path.write_bytes(exported.serialize())


def load(path: pathlib.Path) -> None:
    """What a serving process does: it deserialises and runs, and traces nothing of its own."""
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    for batch in BATCHES:
        np.savez(path.with_name(f"{batch}.npz"), *as_bytes(exported.call(*inputs(batch))))


def as_bytes(results: tuple[jax.Array, ...]) -> list[np.ndarray]:
    return [np.asarray(x).view(np.uint8) for x in results]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        load(pathlib.Path(sys.argv[1]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "step.bin"
        export(file)
        subprocess.run([sys.executable, __file__, str(file)], check=True)
        for rows in BATCHES:
            expected = as_bytes(jax.jit(step)(*inputs(rows)))
            with np.load(file.with_name(f"{rows}.npz")) as loaded:
                for name, right in zip(loaded.files, expected, strict=True):
                    np.testing.assert_array_equal(loaded[name], right)
        size = file.stat().st_size
    print(f"export_and_load: {size} bytes for cpu and cuda, equal results in a process of its own")

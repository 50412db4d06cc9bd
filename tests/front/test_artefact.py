"""A program that an earlier version exported still runs: tests/artefacts/front_v1.jax.

It was written with jax 0.10.0 for cpu and cuda; `python -P tests/front/test_artefact.py FILE`
writes one with what is installed. Write a new one, beside the old, when the target's version
changes.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa_front as dsa
from programs import custom_calls, lowered_for_cuda

FILE = Path(__file__).parents[1] / "artefacts" / "front_v1.jax"
K, LAYERS, BATCH = 1280, 2, 5


def step(projected, q_norm, wq_b, weight, bias, cache, slots, layer):
    return dsa.index_front(
        *(projected, q_norm, wq_b, weight, bias, cache, slots, layer),
        key_offset=K,
        weight_offset=K + 128,
        eps=1e-6,
        key_eps=1e-6,
        cache_format="fp8",
    )


def arguments():
    rng = np.random.default_rng(7)
    normal = rng.standard_normal
    return (
        jnp.asarray(normal((BATCH, K + 128 + 8)), jnp.bfloat16),
        jnp.asarray(1 + 0.1 * normal((LAYERS, K)), jnp.bfloat16),
        jnp.asarray(normal((LAYERS, 128, K)) * K**-0.5, jnp.bfloat16),
        jnp.asarray(1 + 0.1 * normal((LAYERS, 128)), jnp.float32),
        jnp.asarray(normal((LAYERS, 128)), jnp.float32),
        jnp.asarray(rng.integers(0, 255, (LAYERS, 2, 4, 132)), jnp.uint8),
        jnp.asarray([3, -1, 8, 0, 7], jnp.int32),
        jnp.asarray(1, jnp.int32),
    )


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_stored_program_equals_todays(platform):
    exported = jax.export.deserialize(FILE.read_bytes())
    assert exported.platforms == ("cpu", "cuda")
    args = arguments()
    old, new = jax.jit(exported.call)(*args), jax.jit(step)(*args)
    assert type(old) is type(new) is dsa.IndexFront
    for name in ("query", "weights", "cache"):
        was, now = np.asarray(getattr(old, name)), np.asarray(getattr(new, name))
        assert was.tobytes() == now.tobytes(), name


def test_stored_call_is_todays():
    """Operands, results, attributes and alias: what a version of the target's name stands for. On
    the CPU the stored program does not reach its call."""
    stored = jax.export.deserialize(FILE.read_bytes()).mlir_module()
    calls = [custom_calls(text) for text in (stored, lowered_for_cuda(step, *arguments()))]
    (old,), (new,) = (
        [re.sub(".*mhlo.backend_config| loc.*", "", x) for x in lines] for lines in calls
    )
    assert old == new and "output_operand_alias" in new


def test_stored_program_names_no_file_of_its_machine():
    assert b".py" not in FILE.read_bytes()


def write(path):
    jax.config.update(
        "jax_traceback_in_locations_limit", 0
    )  # they would name files of this machine
    exporter = jax.export.export(
        jax.jit(step, donate_argnums=5),
        platforms=("cpu", "cuda"),
        disabled_checks=dsa.export_safety_checks(),
    )
    Path(path).write_bytes(exporter(*arguments()).serialize())


if __name__ == "__main__":
    write(sys.argv[1])

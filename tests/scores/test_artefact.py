"""A program that an earlier version exported still runs: tests/artefacts/scores_v1.jax.

It was written with jax 0.10.0 for cpu and cuda; `python -P tests/scores/test_artefact.py FILE`
writes one with what is installed. Write a new one, beside the old, when the target's version
changes.
"""

import re
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa_front as dsa
from jax_dsa_front._runtime import library

FILE = Path(__file__).parents[1] / "artefacts" / "scores_v1.jax"
BATCH, HEADS = 4, 8


def score(query, weights, cache, block_table, context_lens, layer):
    operands = query, None, weights, cache, block_table, context_lens, layer
    return dsa.index_scores(*operands, cache_format="mxfp8")


def arguments():
    rng = np.random.default_rng(3)
    cache = rng.integers(0, 0x70, (2, 6, 32, 132), np.uint8)
    cache.reshape(2, 6, -1)[..., 32 * 128 :] = 125
    query = rng.standard_normal((BATCH, HEADS, 128), np.float32)
    return (
        jnp.asarray(query).astype(jnp.float8_e4m3fn),
        jnp.asarray(rng.standard_normal((BATCH, HEADS), np.float32)),
        jnp.asarray(cache),
        jnp.asarray([[3, 1, 5], [0, -1, 2]], jnp.int32),
        jnp.asarray([96, 33, 70, 0], jnp.int32),
        jnp.asarray(1, jnp.int32),
    )


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_stored_program_still_runs(platform):
    exported = jax.export.deserialize(bytearray(FILE.read_bytes()))
    assert platform in exported.platforms
    with jax.default_device(jax.devices(platform)[0]):
        got, want = (np.asarray(f(*arguments())) for f in (exported.call, jax.jit(score)))
    assert (np.isneginf(got) == np.isneginf(want)).all() and np.isfinite(got).any()
    inside = np.isfinite(want)
    np.testing.assert_allclose(got[inside], want[inside], rtol=1e-4, atol=1e-4 * want[inside].max())


def test_its_call_is_todays():
    """Target, operands and attributes, byte for byte."""
    stored = jax.export.deserialize(bytearray(FILE.read_bytes())).mlir_module()
    traced = jax.jit(score).trace(*arguments())
    today = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    lines = [
        [line for line in text.splitlines() if f"custom_call @{library.INDEX_SCORES}(" in line]
        for text in (stored, today)
    ]
    configs, types = (
        [re.search(pattern, own)[1] for (own,) in lines]
        for pattern in (r"mhlo\.backend_config = \{(.*?)\}", r" : (\(.*?\) -> [^ ]*)")
    )
    assert configs[0] == configs[1]
    assert types[0] == types[1]


def main(path):
    exported = jax.export.export(
        jax.jit(score), platforms=("cpu", "cuda"), disabled_checks=dsa.export_safety_checks()
    )(*arguments())
    Path(path).write_bytes(exported.serialize())


if __name__ == "__main__":
    main(sys.argv[1])

"""Writes `exported_v1.bin`: a step lowered for cpu and cuda by version 0.1.0, to be kept.

Later versions must still run it, so this is for the record and not for refreshing:
`PYTHONPATH=tests python -P tests/golden/export.py`.
Operands: `small.operands(stacked=True, k=1536, pages=4)`, slots 0..3, layer 1.
"""

import pathlib

import jax
import jax.numpy as jnp
from jax import export

import jax_dsa_front as dsa
import small


def step(*args):
    return tuple(jax.tree.leaves(small.step(*args)))


args = *small.operands(stacked=True, k=1536, pages=4), jnp.arange(4), jnp.int32(1)
exported = export.export(
    jax.jit(step), platforms=["cpu", "cuda"], disabled_checks=dsa.export_safety_checks()
)(*args)
pathlib.Path(__file__).with_name("exported_v1.bin").write_bytes(exported.serialize())

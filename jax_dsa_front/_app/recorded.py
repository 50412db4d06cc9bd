"""The golden vectors, and how ours compares: query and weights that the original fused kernel
computed on an H200 (fp8, H = 32, K = 1536).

The files are those of tests/golden; the wheel carries them as `jax_dsa_front/golden`.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

import jax_dsa_front as dsa
from jax_dsa_front._front.api import Implementation
from jax_dsa_front._runtime.files import built

FOLDER = built("golden")
ONE_BATCH = 64  # rows of the largest case
LEAST_QUERY_BYTES = 0.999  # equal, in every case; the rest are last-bit ties of a bf16 rounding


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Bytes (query) and values (weights) that equal the recorded ones, over all cases."""

    implementation: str
    cases: int
    weights: int
    weights_equal: int
    query_bytes: int
    query_bytes_equal: int
    lowest_case: float  # the smallest share of equal query bytes of any one case

    @property
    def passed(self) -> bool:
        return self.weights_equal == self.weights and self.lowest_case >= LEAST_QUERY_BYTES

    def __str__(self) -> str:
        share = self.query_bytes_equal / self.query_bytes
        return (
            f"{'PASS' if self.passed else 'FAIL'} ({self.implementation}): "
            f"{self.query_bytes_equal:,} of {self.query_bytes:,} query bytes ({share:.3%}; lowest "
            f"case {self.lowest_case:.3%}) and {self.weights_equal:,} of {self.weights:,} weights "
            f"equal what the original kernel wrote on an H200, {self.cases} cases of query and "
            "weights, fp8, H = 32, K = 1536"
        )


@functools.cache
def _load() -> tuple[ModuleType, dict[str, np.ndarray]]:
    """The generator of the inputs, and the recorded outputs by name."""
    spec = importlib.util.spec_from_file_location("golden_inputs", FOLDER / "inputs.py")
    assert spec is not None and spec.loader is not None
    inputs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(inputs)
    with np.load(FOLDER / "index_front_fp8.npz") as file:
        return inputs, dict(file)


def cases() -> list[str]:
    """Names of the recorded cases, `b{batch}_s{seed}_{style}`."""
    return sorted({name.split("/")[0] for name in _load()[1]})


def check(
    implementation: Implementation, after_each: Callable[[], None] = lambda: None
) -> Comparison:
    """Runs every case with one implementation; RuntimeError if NumPy makes other inputs."""
    inputs, recorded = _load()
    front = jax.jit(
        functools.partial(
            dsa.index_front,
            key_offset=inputs.K,
            weight_offset=inputs.K + inputs.DIM,
            eps=inputs.EPS,
            key_eps=inputs.EPS,
            cache_format="fp8",
            implementation=implementation,
        )
    )
    key_norm = jnp.ones(inputs.DIM), jnp.zeros(inputs.DIM)
    cache = dsa.empty_cache(1, cache_format="fp8")
    weights = weights_equal = query_bytes = query_bytes_equal = 0
    lowest = 1.0
    for case in cases():
        batch, seed, style = case.split("_", 2)
        arrays = inputs.make(int(seed[1:]), int(batch[1:]), style)
        if not np.array_equal(inputs.crc(arrays), recorded[f"{case}/crc"]):
            raise RuntimeError(f"NumPy {np.__version__} makes other inputs than the recorded ones")
        rows = arrays[0].shape[0]
        if implementation == "jnp":  # rows are independent: padded, all cases share one program
            padding = np.zeros((ONE_BATCH - rows, arrays[0].shape[1]), arrays[0].dtype)
            arrays = np.concatenate([arrays[0], padding]), *arrays[1:]
        slots = jnp.arange(arrays[0].shape[0], dtype=jnp.int32)
        out = front(*map(jnp.asarray, arrays), *key_norm, cache, slots)
        query = np.asarray(out.query)[:rows].view(np.uint8) == recorded[f"{case}/query"]
        head_weights = np.asarray(out.weights)[:rows].view(np.uint16) == recorded[f"{case}/weights"]
        weights += head_weights.size
        weights_equal += int(head_weights.sum())
        query_bytes += query.size
        query_bytes_equal += int(query.sum())
        lowest = min(lowest, float(query.mean()))
        after_each()
    return Comparison(
        *(implementation, len(cases()), weights, weights_equal),
        *(query_bytes, query_bytes_equal, lowest),
    )

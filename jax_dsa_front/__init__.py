"""The indexer front of DeepSeek Sparse Attention as one JAX operator."""

from jax_dsa_front import _loader, _runtime
from jax_dsa_front._api import IndexFront, explain, index_front
from jax_dsa_front._primitive import Explanation, export_safety_checks
from jax_dsa_front._scoring import empty_cache, index_scores, read_keys

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "IndexFront",
    "empty_cache",
    "explain",
    "export_safety_checks",
    "index_front",
    "index_scores",
    "read_keys",
]

_runtime.register(_loader.load)

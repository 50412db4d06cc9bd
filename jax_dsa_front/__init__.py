"""The lightning indexer of DeepSeek Sparse Attention for JAX."""

from jax_dsa_front._cache import HEAD_DIM, ROW_BYTES, empty_cache, read_keys, slots_of
from jax_dsa_front._front.api import IndexFront, index_front
from jax_dsa_front._operator import Explanation, explain, export_safety_checks
from jax_dsa_front._runtime import library, loader
from jax_dsa_front._scores.api import index_scores

__version__ = "0.1.0"

__all__ = [
    "HEAD_DIM",
    "ROW_BYTES",
    "Explanation",
    "IndexFront",
    "empty_cache",
    "explain",
    "export_safety_checks",
    "index_front",
    "index_scores",
    "read_keys",
    "slots_of",
]

library.register(loader.load)
del library, loader

"""Deterministic inputs of the recorded scores in this folder.

`make(seed, sequences, n, heads, pages_per_sequence)` returns NumPy arrays by name, as
`index_scores` takes them (fp8 cache, page size 64; B = sequences * n rows):

query         uint8   [B, H, 128]     FP8 E4M3 bit patterns
weights       float32 [B, H]
cache         uint8   [pages, 64, 132]
block_table   int32   [sequences, pages_per_sequence]
context_lens  int32   [B]

`scores_deepgemm.npz` holds, under each name of CASES, the float32 [B, pages_per_sequence * 64]
that DeepGEMM 2.8.1 computed from them on an NVIDIA H200; past a row's length they mean nothing.
"""

import ml_dtypes
import numpy as np

PAGE, DIM = 64, 128
CASES = {  # name: (seed, sequences, rows per sequence, heads, pages per sequence)
    "h32_n1": (1, 5, 1, 32, 12),
    "h64_n1": (2, 3, 1, 64, 9),
    "h32_n2": (3, 3, 2, 32, 7),
    "h64_n2": (4, 2, 2, 64, 11),
}


def pow2_ceil(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


def make(seed, sequences, n, heads, pages_per_sequence):
    rng = np.random.default_rng(seed)
    pages = sequences * pages_per_sequence + 3
    keys = rng.standard_normal((pages, PAGE, DIM), np.float32)
    keys = keys * np.exp2(rng.integers(-3, 4, (pages, PAGE, 1))).astype(np.float32)
    scale = pow2_ceil(np.maximum(np.abs(keys).max(-1), np.float32(1e-4)) / np.float32(448))
    codes = np.clip(keys / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
    parts = codes.view(np.uint8).reshape(pages, -1), scale.view(np.uint8).reshape(pages, -1)
    cache = np.concatenate(parts, axis=1)
    batch = sequences * n
    query = (rng.standard_normal((batch, heads, DIM), np.float32) * 60).clip(-448, 448)
    table = rng.permutation(pages)[: sequences * pages_per_sequence].reshape(sequences, -1)
    longest = rng.integers(n, pages_per_sequence * PAGE + 1, sequences)
    longest[0] = pages_per_sequence * PAGE
    lens = (longest[:, None] - n + 1 + np.arange(n)).reshape(-1).astype(np.int32)
    return {
        "query": query.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        "weights": (rng.standard_normal((batch, heads)) * 0.02).astype(np.float32),
        "cache": cache.reshape(pages, PAGE, DIM + 4),
        "block_table": table.astype(np.int32),
        "context_lens": lens,
    }

r"""Every scorer at the edges of its arguments, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --padding 512 --report-api-errors no --error-exitcode 1 \
        --kernel-name kernel_substring=index_scores python -P tests/sanitize_scores.py

(and synccheck and initcheck, without --padding and --report-api-errors). Needs this clone, the
installed package and an H100 or H200. As in sanitize.py the calls go around XLA, every buffer is an
allocation of its own of exactly the size that the call needs, and results are not initialised.

racecheck does not follow mbarriers through lanes of a warp: it reports also a ring of two warps in
which one lane waits, writes and arrives. docs/kernels.md has the figures.

Without the tool the script checks the scores: within 1e-3 of the magnitudes that were added, -inf
where there is nothing to score, and the same bits in a second run.
"""

import dataclasses
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
from bare import (
    SCORES_FILL,
    SCORES_LENGTHS_64,
    SCORES_MXFP8,
    SCORES_TABLE_64,
    SCORES_WEIGHTS_BF16,
    ScoresParams,
    launch_scores,
)

import oracle
from bare_device import Device, Launches
from filled_caches import filled
from jax_dsa_front._runtime import library, variants

LAYERS = 2
# (sequences, rows of each, pages in the table): one CTA's worth, more groups than CTAs, and rows
# that end inside a group
SHAPES = ((1, 1, 9), (7, 2, 5), (150, 1, 2), (3, 5, 4), (2, 130, 3))
OUTSIDE = (-1, -(2**31), 2**31 - 1, 13)
OUTSIDE_64 = (2**32 + 1, -(2**63), 2**63 - 1, 2**33)


@dataclasses.dataclass
class Call:
    device: Device
    fmt: str
    heads: int
    page_size: int
    shape: tuple[int, int, int]
    turn: int

    def operands(self):
        sequences, rows, width = self.shape
        batch, turn = sequences * rows, self.turn
        codes, scale, weights, cache = filled(
            self.fmt, self.page_size, 13, LAYERS, batch, self.heads, seed=turn
        )
        rng = np.random.default_rng(turn)
        table = rng.integers(0, 13, (sequences, width))
        table_64, lengths_64 = bool(turn & 1), bool(turn & 2)
        outside = OUTSIDE_64 if table_64 else OUTSIDE
        table.flat[:: max(3, table.size // 4)] = outside[turn % 4]
        limit = width * self.page_size
        lengths = rng.integers(0, limit + 1, batch)
        ends = [limit, 0, limit + 1, -5, 1, self.page_size, self.page_size + 1]
        lengths[: len(ends)] = ends[: len(lengths)]
        if lengths_64 and batch > 2:
            lengths[-2:] = 2**63 - 1, -(2**63)
        table = table.astype(np.int64 if table_64 else np.int32)
        lengths = lengths.astype(np.int64 if lengths_64 else np.int32)
        if turn & 4:
            weights = weights.astype(ml_dtypes.bfloat16)
        layer = (None, 1, -3, 2**31 - 1)[turn % 4]  # None: on the host, the last one
        return codes, scale, weights, cache, table, lengths, layer

    def verify(self):
        codes, scale, weights, cache, table, lengths, layer = self.operands()
        device, batch, limit = self.device, len(lengths), table.shape[1] * self.page_size
        flags = SCORES_FILL | SCORES_MXFP8 * (self.fmt == "mxfp8")
        flags |= SCORES_TABLE_64 * (table.itemsize == 8)
        flags |= SCORES_LENGTHS_64 * (lengths.itemsize == 8)
        flags |= SCORES_WEIGHTS_BF16 * (weights.itemsize == 2)
        params = ScoresParams(
            block_table=device.put(table),
            context_lens=device.put(lengths),
            layer=None if layer is None else device.put(np.int32(layer)),
            flags=flags,
            static_layer=LAYERS - 1 if layer is None else 0,
            num_layers=LAYERS,
            pages=cache.shape[1],
            table_width=table.shape[1],
            rows_per_sequence=batch // len(table),
            batch=batch,
            weights=device.put(weights),
            query=device.put(codes),
            query_scale=None if scale is None else device.put(scale),
            cache=device.put(cache),
        )
        runs = []
        for _ in range(2):
            params.scores = device.empty(4 * batch * limit)
            launch_scores(params, self.heads, self.page_size, self.fmt, device.stream)
            device.wait()
            runs.append(device.get(params.scores, 4 * batch * limit))
        assert (runs[0] == runs[1]).all(), f"{self}: two runs differ"
        own = LAYERS - 1 if layer is None else min(max(layer, 0), LAYERS - 1)
        self.compare(runs[0].view(np.float32).reshape(batch, limit), own)

    def compare(self, got, layer):
        codes, scale, weights, cache, table, lengths, _ = self.operands()
        lens = np.clip(lengths, 0, got.shape[1]).astype(int)
        rows = sorted({0, 1 % len(lens), len(lens) // 2, len(lens) - 1})
        known = (table >= 0) & (table < cache.shape[1])
        own = np.repeat(np.where(known, table, 0).astype(int), len(lens) // len(table), axis=0)
        exists = np.repeat(
            np.repeat(known, len(lens) // len(table), axis=0), self.page_size, axis=1
        )
        rest = (
            codes[rows], None if scale is None else scale[rows], weights[rows].astype(np.float32),
            cache, own[rows], lens[rows], self.fmt, layer,
        )  # fmt: skip
        want = np.where(exists[rows], oracle.scores(*rest), -np.inf)
        size, found = oracle.score_magnitudes(*rest), got[rows]
        inside = np.isfinite(want)
        assert (np.isneginf(found) == ~inside).all(), f"{self}: -inf elsewhere"
        past = np.arange(got.shape[1]) >= lens[:, None]
        assert np.isneginf(got[past | ~exists]).all(), f"{self}: -inf elsewhere"
        off = np.abs(found[inside] - want[inside])
        assert (off <= 1e-3 * size[inside]).all(), f"{self}: off by {off.max()}"


def main():
    if library.registration_error() is not None:
        sys.exit(library.registration_error())
    start, launches, device = time.perf_counter(), Launches(), Device()
    shipped = [v for v in variants.VARIANTS if v.operator == "index_scores"]
    turn = 0
    for schedule, formats in (("paged", ("fp8", "mxfp8")), ("paged_fp4", ("mxfp4",))):
        shapes = sorted({(v.heads, v.page_size) for v in shipped if v.schedule == schedule})
        for heads, page_size in shapes:
            for shape in SHAPES:
                Call(device, formats[turn % len(formats)], heads, page_size, shape, turn).verify()
                turn += 1
        seconds = time.perf_counter() - start
        print(f"{schedule}: {len(launches.handles)} launches, {seconds:.0f} s", flush=True)
    missed = {v.name for v in shipped} - {launches.names[h] for h in launches.handles}
    if missed:
        sys.exit(f"not reached: {sorted(missed)}")
    print(f"all {len(shipped)} scorers; scores right, reruns equal")


if __name__ == "__main__":
    main()

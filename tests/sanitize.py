r"""Every shipped sm_90a kernel at the edges of its arguments, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --padding 512 --report-api-errors no --error-exitcode 1 \
        --kernel-name kernel_substring=index_front python -P tests/sanitize.py

(and racecheck, synccheck, initcheck, without --padding and --report-api-errors, which are
memcheck's). Needs this clone, the installed package and an H100 or H200 of 132 SMs; `--k 1536` runs
one K, a third of it.

147 launches by 105 calls: all K, cache formats and schedules; B at and beside multiples of tiles;
1, 8 and 32 heads; slots of both widths, layers and head starts on the device, with the extremes of
their types, and on the host; odd columns; key and head weights in arrays of their own. B = 0 is not
among them: the FFI handler (csrc_glue/front_ffi.cc) answers it without a launch.

XLA would take minutes to start under the tool, so the calls go around it, to the handler's bare
launch: this file does what the FFI handler does with the operands. Every buffer is an allocation of
exactly the size that the call needs, so that memcheck sees each end of it (with padding: cuMemAlloc
puts buffers side by side). Results are not initialised, and read to the last byte, for initcheck.
Without the tool the script still checks that of the whole cache, guard pages and guard layers
included, just the tokens change that slots name, and that a second call gives the same bytes.
"""

import argparse
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
from bare import FORMAT_FLAGS, FrontParams, launch_front

from bare_device import Device, Launches
from jax_dsa_front import HEAD_DIM, ROW_BYTES
from jax_dsa_front._runtime import library, variants

ARCH = "sm_90a"
# (B, H), a schedule per line, which 132 SMs choose by their 66 clusters of 2. A call takes one of
# each line, another for the next format or K.
SHAPES = (
    ((1, 1), (5, 8), (8, 32)),  # split_n; split_k for K = 2048
    ((9, 8), (17, 32), (32, 1)),  # split_k
    ((33, 8), (64, 1), (65, 8)),  # split_k, more than a tile
    ((257, 8), (300, 8), (320, 8)),  # row_norm and split_k_rows, tiles of 64
    ((129, 32), (256, 32), (300, 32)),  # row_norm and split_k_rows, tiles of 128
)
HEADS = (1, 8, 32)
STACK = 3  # layers, of which all but the call's are guards
# On the device the middle one; None: on the host the last one, which ends with its allocation. Any
# three neighbours have both.
LAYERS = (1, None, 1, 1, None, 1, None)
OUTER_LAYERS = (2**31 - 1, -1, STACK, -(2**31))  # nothing is written
HEAD_STARTS = (0, 3, -1, 2**31 - 1, None, -(2**31), 2, 6, 5)  # None: on the host, the largest
PAGES = 12  # the first and the last are guards
PAGE_SIZES = {"fp8": 64, "mxfp8": 37, "mxfp4": 64}
SLOTS_64, HEAD_WEIGHTS_F32, WEIGHTS_F32 = 1, 2, 4  # FrontFlags in csrc_glue/front_params.h


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def bf16(array):
    return array.astype(ml_dtypes.bfloat16)


def slots_of(rng, batch, page_size, wide):
    """Slots of a call, a third of them outside the cache, and the tokens that they name, bool."""
    tokens = PAGES * page_size
    slots = rng.permutation(np.arange(page_size, tokens - page_size))[:batch]
    ends = [-1, tokens, -(2**31), 2**31 - 1, 2 * tokens]
    if wide:  # whose lower halves name tokens of the first page
        ends += [-(2**63), 2**63 - 1, 2**32 + 1, 2**33 + 2, -(2**32) + 3]
    slots[-2::-3] = np.resize(ends, slots[-2::-3].size)  # never the last row: its key ends an array
    named = np.isin(np.arange(tokens), slots)
    return slots.astype(np.int64 if wide else np.int32), named


def token_bytes(cache):
    """The bytes of each token, [layers, tokens, R], from cache [layers, pages, page_size, R]."""
    layers, pages, page_size, width = cache.shape
    values, scales = np.split(cache.reshape(layers, pages, -1), [page_size * (width - 4)], axis=2)
    tokens = [part.reshape(layers, pages * page_size, -1) for part in (values, scales)]
    return np.concatenate(tokens, axis=2)


class Call:
    """A call with operands of its own but for `wq_b`; `turn` chooses what its shape leaves open."""

    def __init__(self, device, rng, k, fmt, batch, heads, wq_b, layer, turn):
        self.device, self.k, self.heads = device, k, heads
        self.described = f"K = {k}, {fmt}, B = {batch}, H = {heads}"
        head_start = HEAD_STARTS[turn % len(HEAD_STARTS)]
        own, weights_f32 = turn % 2, turn // 2 % 2
        slots_64 = own ^ weights_f32  # so that any two of the three come in all combinations
        num_heads = heads // 8 * 8 + 5  # then the last head weight ends the packed rows
        head_start_limit = num_heads - heads
        flags = SLOTS_64 * slots_64 + HEAD_WEIGHTS_F32 * own + WEIGHTS_F32 * weights_f32
        page_size, width = PAGE_SIZES[fmt], k if own else k + 3 + HEAD_DIM + num_heads
        layer_on_host = STACK - 1 if layer is None else 0
        start_on_host = head_start_limit if head_start is None else 0

        projected = device.put(bf16(normal(rng, batch, width)))
        key, key_pitch = projected + 2 * (k + 3), 2 * width
        head_weights, head_weights_pitch, item = key + 2 * HEAD_DIM, 2 * width, 2
        if own:
            key = device.put(bf16(normal(rng, batch, 1 + HEAD_DIM))) + 2 * 1
            key_pitch = 2 * (1 + HEAD_DIM)
            head_weights = device.put(normal(rng, batch, 5 + num_heads)) + 4 * 5
            head_weights_pitch, item = 4 * (5 + num_heads), 4
        slots, named = slots_of(rng, batch, page_size, slots_64)
        written = np.arange(STACK) == (layer_on_host if layer is None else layer)
        self.named = written[:, None] & named  # [layers, tokens]
        shape = (STACK, PAGES, page_size, ROW_BYTES[fmt])
        self.before = rng.integers(0, 256, shape, dtype=np.uint8)
        cache_layer_stride = self.before[0].nbytes
        self.cache_offset = layer_on_host * cache_layer_stride
        q_norm = device.put(bf16(1 + 0.1 * normal(rng, STACK, k)))
        key_norm_bias = device.put(0.1 * normal(rng, STACK, HEAD_DIM))
        self.wq_b_rows = (STACK - layer_on_host) * heads * HEAD_DIM
        self.params = FrontParams(
            projected=projected,
            q_norm=q_norm + layer_on_host * 2 * k,
            wq_b=wq_b + layer_on_host * heads * HEAD_DIM * 2 * k,
            layer=None if layer is None else device.put(np.int32(layer)),
            projected_pitch=2 * width,
            batch=batch,
            num_layers=STACK,
            flags=FORMAT_FLAGS[fmt] + flags,
            q_norm_layer_stride=2 * k,
            wq_b_layer_rows=heads * HEAD_DIM,
            eps=1e-6,
            key_eps=1e-6,
            weight_scale=(num_heads * HEAD_DIM) ** -0.5,
            head_weights_pitch=head_weights_pitch,
            head_weights=head_weights + start_on_host * item,
            head_start=None if head_start is None else device.put(np.int32(head_start)),
            key=key,
            key_norm_weight=device.put(1 + 0.1 * normal(rng, HEAD_DIM)),  # the same in all layers
            key_norm_bias=key_norm_bias + layer_on_host * 4 * HEAD_DIM,
            slots=device.put(slots),
            num_slots=PAGES * page_size,
            cache_layer_stride=cache_layer_stride,
            key_pitch=key_pitch,
            page_size=page_size,
            key_norm_bias_layer_stride=4 * HEAD_DIM,
            head_start_limit=head_start_limit,
        )
        words = batch * heads
        self.results = {"query": words * HEAD_DIM, "weights": words * (4 if weights_f32 else 2)}
        if fmt == "mxfp4":
            self.results |= {"query": words * HEAD_DIM // 2, "query_scale": words * 4}

    def run(self):
        """The bytes of the cache and the results, in buffers of this run alone."""
        device, params = self.device, self.params
        cache = device.put(self.before)
        params.cache = cache + self.cache_offset
        params.rows = device.empty(params.batch * 2 * self.k)
        addresses = {name: device.empty(nbytes) for name, nbytes in self.results.items()}
        for name, address in addresses.items():
            setattr(params, name, address)
        launch_front(self.k, params, self.heads, self.wq_b_rows, device.stream)
        device.wait()
        results = {name: device.get(addresses[name], n) for name, n in self.results.items()}
        return {"cache": device.get(cache, self.before.nbytes), **results}

    def verify(self, rerun):
        """Raises if the cache changed elsewhere than at the slots, or if a second run differs."""
        first = self.run()
        if rerun:
            again = self.run()
            different = [name for name in first if (again[name] != first[name]).any()]
            assert not different, f"{self.described}: two runs differ in {different}"
        after = token_bytes(first["cache"].reshape(self.before.shape))
        changed = (after != token_bytes(self.before)).any(axis=2)
        wrong = np.argwhere(changed != self.named).tolist()  # [layer, token]
        assert not wrong, f"{self.described}: changed, or not, against its slots: {wrong[:5]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=int, choices=variants.LATENT_WIDTHS)
    only = parser.parse_args().k
    if library.registration_error() is not None:
        sys.exit(library.registration_error())
    start, launches, device, reached = time.perf_counter(), Launches(), Device(), set()
    shipped = [
        v
        for v in variants.VARIANTS
        if isinstance(v, variants.FrontVariant) and v.arch == ARCH and only in (None, v.k)
    ]
    for i, k in enumerate(variants.LATENT_WIDTHS):
        if only not in (None, k):
            continue
        rng = np.random.default_rng(k)
        stack = bf16(normal(rng, STACK, HEADS[-1] * HEAD_DIM, k) * np.float32(k**-0.5))
        wq_b = {heads: device.put(stack[:, : heads * HEAD_DIM]) for heads in HEADS}
        for j, fmt in enumerate(FORMAT_FLAGS):
            for line, shapes in enumerate(SHAPES):
                batch, heads = shapes[(i + j) % len(shapes)]
                before, turn = len(launches.handles), 15 * i + 5 * line + j
                operands = device, rng, k, fmt, batch, heads, wq_b[heads]
                Call(*operands, LAYERS[turn % len(LAYERS)], turn).verify(rerun=True)
                if (i + j + line) % len(FORMAT_FLAGS) == 0:  # one format of each kernel
                    outer = OUTER_LAYERS[turn % len(OUTER_LAYERS)]
                    Call(*operands, outer, turn + 3).verify(rerun=False)
                reached |= {(launches.names[h], fmt) for h in launches.handles[before:]}
            seconds = time.perf_counter() - start
            print(f"K = {k}, {fmt}: {len(launches.handles)} launches, {seconds:.0f} s", flush=True)
    missed = sorted({(v.name, fmt) for v in shipped for fmt in FORMAT_FLAGS} - reached)
    if missed:
        sys.exit(f"not reached: {missed}")
    print(f"all {len(shipped)} kernels in all formats; guards untouched, reruns equal")


if __name__ == "__main__":
    main()

"""The scorer's tables of docs/performance.md: `python -P benchmarks/bench_scores.py [OPTIONS]` on a
GPU machine with torch, the installed package and its extra cuda13 (or cuda12).

CUDA graphs of bare launches over page sets of 260 MB in all (L2 is cold), pages in random order,
tables tight. Per cell the replays of the read floor, of the kernel and of DeepGEMM alternate in
an order that changes every time, and the figure is the median. `--peer` is a folder that holds
DeepGEMM's package `deep_gemm` (without its metadata kernel in the figures); without it its columns
stay empty. The SM clock is read by a kernel that spins right behind each replay of ours.
"""

import argparse
import ctypes
import json
import random
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from bare import (
    SCORES_FILL,
    SCORES_LENGTHS_64,
    SCORES_MXFP8,
    SCORES_TABLE_64,
    SCORES_WEIGHTS_BF16,
    ScoresParams,
    check,
    launch_scores,
)
from cuda.bindings import driver, nvrtc

PAGE = 64
SET_BYTES = 260 << 20
CELLS = (
    (1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (8, 131072),
    (32, 4096), (32, 32768), (64, 4096), (64, 32768), (128, 4096), (128, 16384),
)  # fmt: skip
REQUIRED = dict(
    zip(
        CELLS, (1.60, 1.35, 1.32, 1.35, 1.27, 1.17, 1.34, 1.17, 1.27, 1.17, 1.22, 1.15), strict=True
    )
)
OTHER_CELLS = ((1, 131072), (8, 32768), (64, 32768), (128, 4096))
FP4_CELLS = ((8, 131072), (32, 32768), (64, 32768), (128, 16384))
UNEVEN = {
    "one of 32k, seven of 1k": [32768] + [1024] * 7,
    "64 of 200 to 16,200": [random.Random(i).randint(200, 16200) for i in range(64)],
    "four of 64k, sixty of 300": [65536] * 4 + [300] * 60,
    "256 of 50": [50] * 256,
}


class Call:
    """The operands of one call and their parameters.

    query [B, H, 128] e4m3 or u8 [B, H, 64]; cache u8 [layers, pages, page bytes]; table [S, N];
    lengths [B]; scores f32 [B, N * page_size]; layer: int, or an i32 array of one element."""

    def __init__(
        self, cache_format, page_size, query, weights, cache, table, lengths, scores,
        query_scale=None, layer=0, fill=False,
    ):  # fmt: skip
        self.cache_format, self.page_size = cache_format, page_size
        self.operands = [query, weights, cache, table, lengths, scores, query_scale, layer]
        for operand in self.operands:
            assert not isinstance(operand, torch.Tensor) or operand.is_contiguous()
        batch, self.heads = query.shape[:2]
        flags = SCORES_TABLE_64 * (table.dtype == torch.int64)
        flags |= SCORES_LENGTHS_64 * (lengths.dtype == torch.int64)
        flags |= SCORES_WEIGHTS_BF16 * (weights.dtype == torch.bfloat16)
        flags |= SCORES_MXFP8 * (cache_format == "mxfp8") | SCORES_FILL * fill
        traced = isinstance(layer, torch.Tensor)
        self.params = ScoresParams(
            block_table=table.data_ptr(),
            context_lens=lengths.data_ptr(),
            layer=layer.data_ptr() if traced else None,
            flags=flags,
            static_layer=0 if traced else layer,
            num_layers=cache.shape[0],
            pages=cache.shape[1],
            table_width=table.shape[1],
            rows_per_sequence=batch // max(1, table.shape[0]),
            batch=batch,
            weights=weights.data_ptr(),
            scores=scores.data_ptr(),
            query=query.data_ptr(),
            query_scale=None if query_scale is None else query_scale.data_ptr(),
            cache=cache.data_ptr(),
        )

    def __call__(self, layer=None, stream=None):
        if layer is not None:
            self.params.static_layer = layer
        stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        launch_scores(self.params, self.heads, self.page_size, self.cache_format, stream)


def random_codes(shape, generator):
    """e4m3 codes as a quantiser leaves them: normal values, the largest of 128 near 448. Uniform
    bytes draw far more power, which slows the card down."""
    values = torch.empty(shape, device="cuda", dtype=torch.uint8)
    flat = values.view(-1)
    step = 1 << 26
    for first in range(0, flat.numel(), step):
        piece = flat[first : first + step]
        normal = torch.randn(piece.numel(), device="cuda", generator=generator) * 120
        piece.copy_(normal.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    return values


def random_cache(layers, pages, page_size, cache_format, generator):
    """u8 [layers, pages, page bytes] of finite keys."""
    if cache_format == "mxfp4":
        shape = layers, pages, page_size * 68
        cache = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8, generator=generator)
        scales = cache[..., page_size * 64 :]
        scales.copy_(torch.randint(121, 129, scales.shape, device="cuda", generator=generator))
        return cache
    cache = torch.empty((layers, pages, page_size * 132), device="cuda", dtype=torch.uint8)
    for layer in range(layers):
        cache[layer, :, : page_size * 128] = random_codes((pages, page_size * 128), generator)
    shape = layers, pages, page_size
    exponents = torch.randint(119, 125, shape, device="cuda", generator=generator)
    if cache_format == "mxfp8":
        cache[..., page_size * 128 :] = (
            exponents.to(torch.uint8)[..., None].expand(*shape, 4).reshape(layers, pages, -1)
        )
    else:
        fraction = 1 + 0.5 * torch.rand(shape, device="cuda", generator=generator)
        scales = torch.exp2(exponents.float() - 127) * fraction
        cache[..., page_size * 128 :] = scales.view(torch.uint8).reshape(layers, pages, -1)
    return cache


def random_query(batch, heads, cache_format, generator):
    """(query, query_scale or None)"""
    if cache_format != "mxfp4":
        return random_codes((batch, heads, 128), generator), None
    shape = batch, heads, 64
    query = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8, generator=generator)
    scale = torch.randint(
        121, 129, (batch, heads, 4), device="cuda", dtype=torch.uint8, generator=generator
    )
    return query, scale


class Timer:
    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.order = random.Random(0)  # what runs before a graph shifts it by up to 7 %
        module = self.compile("floor_read.cu")
        self.floor_function = check(driver.cuModuleGetFunction(module, b"floor_read"))
        self.clock_function = check(driver.cuModuleGetFunction(module, b"clock_rate"))
        self.clock = torch.zeros(2, device="cuda", dtype=torch.int64)

    def compile(self, name):
        source = Path(__file__).with_name(name).read_bytes()
        program = check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
        check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"]))
        image = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, image))
        return check(driver.cuModuleLoadData(image))

    def clock_rate(self):
        """MHz of an SM, right now."""
        values, types = (self.clock.data_ptr(),), (ctypes.c_void_p,)
        stream = torch.cuda.current_stream().cuda_stream
        check(
            driver.cuLaunchKernel(
                self.clock_function, 1, 1, 1, 1, 1, 1, 0, stream, (values, types), 0
            )
        )
        cycles, nanoseconds = self.clock.tolist()
        return cycles / nanoseconds * 1e3

    def floor(self, address, nbytes, sink):
        values = (address, nbytes // 16, sink.data_ptr())
        types = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)
        stream = torch.cuda.current_stream().cuda_stream
        check(
            driver.cuLaunchKernel(
                self.floor_function, 264, 1, 1, 512, 1, 1, 0, stream, (values, types), 0
            )
        )

    def capture(self, launch, count):
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            launch(0)
            self.stream.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                for i in range(count):
                    launch(i)
        return graph

    def time(self, graphs, count, replays=9):
        """Microseconds per launch, medians; the graphs alternate, in a new order every time."""
        samples, clocks = {name: [] for name in graphs}, []
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for turn in range(replays + 1):
            for name, graph in self.order.sample(list(graphs.items()), len(graphs)):
                events[0].record()
                graph.replay()
                events[1].record()
                if name == "ours":
                    clocks.append(self.clock_rate())
                events[1].synchronize()
                if turn:
                    samples[name].append(events[0].elapsed_time(events[1]) * 1e3 / count)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        return medians | {"clock": statistics.median(clocks)}


class Cell:
    """Operands of one cell: `sets` layers of pages, of which launch i reads layer i % sets."""

    def __init__(self, lengths, n, heads, cache_format, width=None, launches=None, seed=0):
        g = torch.Generator("cuda").manual_seed(seed)
        pages_of = [-(-length // PAGE) for length in lengths]
        self.pages = sum(pages_of)
        self.page_bytes = PAGE * (68 if cache_format == "mxfp4" else 132)
        self.key_bytes = self.pages * self.page_bytes
        self.sets = min(512, max(2, SET_BYTES // self.key_bytes + 1))
        self.launches = launches or min(256, max(64, self.sets))
        self.cache_format, self.heads, self.n = cache_format, heads, n
        self.cache = random_cache(self.sets, self.pages, PAGE, cache_format, g)
        order = torch.randperm(self.pages, device="cuda", generator=g).int()
        self.table = torch.full(
            (len(lengths), width or max(pages_of)), -1, dtype=torch.int32, device="cuda"
        )
        first = 0
        for s, count in enumerate(pages_of):
            self.table[s, :count] = order[first : first + count]
            first += count
        batch = len(lengths) * n
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda").repeat_interleave(n)
        self.query, self.query_scale = random_query(batch, heads, cache_format, g)
        self.weights = torch.randn((batch, heads), device="cuda", generator=g) * 0.05
        self.scores = torch.empty((batch, self.table.shape[1] * PAGE), device="cuda")

    def ours(self, fill=False):
        call = Call(
            self.cache_format, PAGE, self.query, self.weights, self.cache, self.table,
            self.lengths, self.scores, self.query_scale, fill=fill,
        )  # fmt: skip
        return lambda i: call(layer=i % self.sets)

    def floor(self, timer):
        sink = torch.zeros(1, device="cuda", dtype=torch.int32)
        base = self.cache.data_ptr()
        return lambda i: timer.floor(base + i % self.sets * self.key_bytes, self.key_bytes, sink)

    def peer(self, deep_gemm):
        query = self.query.view(torch.float8_e4m3fn).reshape(-1, self.n, self.heads, 128)
        lengths = self.lengths.reshape(-1, self.n).contiguous()
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, sms)
        caches = [self.cache[i].view(self.pages, PAGE, 1, 132) for i in range(self.sets)]
        width = self.table.shape[1] * PAGE

        def launch(i):
            deep_gemm.fp8_fp4_paged_mqa_logits(
                (query, None),
                caches[i % self.sets],
                self.weights,
                lengths,
                self.table,
                schedule,
                width,
            )

        return launch


def measure(timer, cell, deep_gemm, fill=False):
    graphs = {"floor": timer.capture(cell.floor(timer), cell.launches)}
    graphs["ours"] = timer.capture(cell.ours(fill), cell.launches)
    if deep_gemm is not None and cell.cache_format == "fp8":
        graphs["peer"] = timer.capture(cell.peer(deep_gemm), cell.launches)
    return timer.time(graphs, cell.launches)


def line(name, us, required=None, extra=""):
    ratio = us["ours"] / us["floor"]
    text = f"{name:28s} {us['floor']:7.2f} {us['ours']:7.2f} {ratio:6.3f}"
    text += f" {required:5.2f}{'' if ratio <= required else '!'}" if required else "      "
    if "peer" in us:
        text += f" | {us['peer']:7.2f} {us['ours'] / us['peer']:6.3f}"
    print(text, f"{us['clock']:.0f} MHz", extra, flush=True)


def load_peer(folder):
    if folder is None:
        return None
    sys.path.insert(0, str(folder))
    import deep_gemm

    return deep_gemm


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--tables", default="main,other,uneven,fp4,prefill,fill")
    parser.add_argument("--only", help="parts of the names of the cells to run, with commas")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    timer, deep_gemm = Timer(), load_peer(arguments.peer)
    tables = arguments.tables.split(",")
    record = {}

    def show(name, make, required=None, fill=False, peer=True, flop=None):
        if arguments.only and not any(part in name for part in arguments.only.split(",")):
            return
        cell = make()
        us = measure(timer, cell, deep_gemm if peer else None, fill)
        extra = f"{flop / us['ours'] / 1e6:.0f} TFLOPS" if flop else ""
        line(name, us, required, extra)
        record[name] = us

    columns = f"{'S x context':28s} {'floor':>7s} {'ours':>7s} {'ratio':>6s} limit"
    print(columns, f"| {'peer':>7s} ratio   (us)")
    if "main" in tables:
        for s, context in CELLS:
            make = partial(Cell, [context] * s, 1, 32, "fp8")
            show(f"H32 n1 {s}x{context // 1024}k", make, REQUIRED[s, context])
    if "other" in tables:
        for heads, n in ((64, 1), (32, 2), (64, 2)):
            for s, context in OTHER_CELLS:
                make = partial(Cell, [context] * s, n, heads, "fp8")
                show(f"H{heads} n{n} {s}x{context // 1024}k", make)
    if "uneven" in tables:
        for name, lengths in UNEVEN.items():
            show(name, partial(Cell, lengths, 1, 32, "fp8"))
    if "fp4" in tables:
        for s, context in FP4_CELLS:
            for cache_format in ("fp8", "mxfp8", "mxfp4"):
                make = partial(Cell, [context] * s, 1, 32, cache_format)
                show(f"{cache_format} {s}x{context // 1024}k", make, peer=False)
    if "prefill" in tables:
        for heads in (32, 64):
            for rows, keys in ((512, 8192), (512, 65536), (2048, 8192), (2048, 65536)):
                flop = 2 * rows * keys * 128 * heads
                make = partial(Cell, [keys], rows, heads, "fp8", launches=8)
                show(f"prefill H{heads} {rows}x{keys // 1024}k", make, peer=False, flop=flop)
    if "fill" in tables:
        for s in (8, 128):
            make = partial(Cell, [4096] * s, 1, 32, "fp8", width=2048)
            show(f"fill {s}x4k of 2048 pages", make, fill=True, peer=False)
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

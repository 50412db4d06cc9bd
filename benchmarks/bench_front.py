"""The tables of docs/performance.md: `python -P benchmarks/bench_front.py [--output DIR]` on a GPU
machine.

Needs the installed package with the extra for its CUDA version, and matplotlib for the plot.
Prints a table per section and writes front.json and front.png.

kernel    bare kernel against the load floor of the same run, beside the jnp form under XLA; the
          protocol is in bare.py
formats   the bare kernel for the three cache formats
scan      time per layer of a jitted 24-layer scan over stacked weights and cache, kernel
          against jnp, with the results stacked or consumed by the next layer; and the kernel where
          the scan slices the weights instead
dispatch  host time per enqueued call

Inside jit there are two times. *Wall* is what a clock shows while calls are pipelined; a slow host
dominates it. *Device* is the sum of the durations of all kernels, by jax.profiler, without the gaps
between them: a lower bound of what the same program takes on any host.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bare

import jax_dsa_front as dsa

HEADS, K = 32, 1536
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024, 4096)
SCAN_BATCHES = (1, 8, 16, 32, 64, 128)
LAYERS, UNROLLS, UNROLLS_CONSUMED = 24, (1, 8, 24), (1, 8)
FRONTS = {name: partial(dsa.index_front, implementation=name) for name in ("cuda", "jnp")}
OFFSETS = {"key_offset": K, "weight_offset": K + 128, "eps": 1e-6, "key_eps": 1e-6}


def wall_us(step, state, inner, repeats=15, calls=20):
    """Median microseconds of one of `inner` parts of step(state) -> state, pipelined `calls`
    deep."""
    state = jax.tree.map(jnp.copy, state)  # it is donated
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state)
        samples.append((time.perf_counter() - start) * 1e6 / (calls * inner))
    return statistics.median(samples)


def operands(batch, seed=0):
    rng = np.random.default_rng(seed)
    projected = jnp.asarray(rng.standard_normal((batch, K + 128 + HEADS)), jnp.bfloat16)
    q_norm = jnp.asarray(1 + 0.1 * rng.standard_normal(K), jnp.bfloat16)
    pages = max(64, -(-batch // 64))
    slots = jnp.asarray(rng.permutation(pages * 64)[:batch], jnp.int32)
    return projected, q_norm, pages, slots


def device_us(step, state, inner, calls=4):
    """Microseconds that kernels and copies take per part, by the profiler."""
    state = jax.block_until_ready(step(jax.tree.map(jnp.copy, state)))  # it is donated
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                state = step(state)
            jax.block_until_ready(state)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        lines = [line for plane in planes if "GPU:0" in plane.name for line in plane.lines]
        events = [e for line in lines if line.name.startswith("Stream") for e in line.events]
    return sum(event.duration_ns for event in events) / 1e3 / (calls * inner)


def compile_all(programs):
    """{name: (step, state)} of {name: (jitted, arguments, state)}, compiled side by side.

    The jitted function takes the arguments, then the state, and returns the next state first."""

    def compiled(program):
        function, arguments, state = program
        executable = function.lower(*arguments, *state).compile()
        return lambda state: executable(*arguments, *state)[: len(state)], state

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(programs, pool.map(compiled, programs.values()), strict=True))


def chain(weights, batch, index_front):
    """An unrolled chain of as many layers as there are matrices; the next depends on the last."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)

    @partial(jax.jit, donate_argnums=2)
    def run(weights, projected, cache):
        queries = []
        for matrix in weights:
            front = index_front(projected, q_norm, matrix, ones, zeros, cache, slots, **OFFSETS)
            cache = front.cache
            projected = projected + front.weights[:, :1] * jnp.bfloat16(0)
            queries.append(front.query)
        return projected, cache, queries

    return run, (weights,), (projected, dsa.empty_cache(pages, cache_format="fp8"))


def scan(stack, batch, index_front, unroll, consumed, sliced=False):
    """A scan over stacked weights and one stacked, donated cache. The results are stacked, or
    consumed: one small fusion adds them to the next layer's rows. `sliced`: each step gets its
    layer of `wq_b` as a slice."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)

    @partial(jax.jit, donate_argnums=(1, 2))
    def run(stack, rows, cache):
        def body(carry, step):
            rows, cache = carry
            layer, wq_b = step if sliced else (step, stack)
            front = index_front(rows, q_norm, wq_b, ones, zeros, cache, slots, layer, **OFFSETS)
            if not consumed:
                return (rows, front.cache), (front.query, front.weights)
            query = front.query.astype(jnp.bfloat16)
            mixed = jnp.mean(query * front.weights[..., None], axis=1)
            return (rows.at[:, :128].add(mixed), front.cache), None

        layers = jnp.arange(LAYERS)
        steps = (layers, stack) if sliced else layers
        carry, results = jax.lax.scan(body, (rows, cache), steps, unroll=unroll)
        return *carry, results

    cache = dsa.empty_cache(pages, cache_format="fp8", layers=LAYERS)
    return run, (stack,), (projected, cache)


def dispatch_us(weights, batch, index_front, calls=1000):
    """Host microseconds per call of a jitted index_front: the wall time of enqueueing many, before
    any is waited for."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)
    call = jax.jit(
        lambda cache: index_front(
            projected, q_norm, weights[0], ones, zeros, cache, slots, **OFFSETS
        ),
        donate_argnums=0,
    )
    cache = dsa.empty_cache(pages, cache_format="fp8")
    samples = []
    for _ in range(7):
        cache = jax.block_until_ready(cache)
        start = time.perf_counter()
        for _ in range(calls):
            cache = call(cache).cache
        samples.append((time.perf_counter() - start) * 1e6 / calls)
        jax.block_until_ready(cache)
    return statistics.median(samples)


def bench_kernel(graphs, weights, floor_graph):
    fronts = {batch: bare.Front(graphs, weights, batch) for batch in BATCHES}
    captured = {batch: graphs.capture(front.launch) for batch, front in fronts.items()}
    times = graphs.time({"floor": floor_graph} | captured, before=floor_graph)
    floor = times.pop("floor")
    chains = compile_all({batch: chain(weights, batch, FRONTS["jnp"]) for batch in BATCHES})
    print(f"\nbare kernel and jnp form, us per call (floor of this run {floor:.2f})")
    print(f"{'B':>5} {'kernel':>8} {'/ floor':>8} {'jnp device':>11} {'/ kernel':>9} {'wall':>7}")
    rows = []
    for batch, us in times.items():
        device, wall = (f(*chains[batch], len(weights)) for f in (device_us, wall_us))
        print(
            f"{batch:5d} {us:8.2f} {us / floor:8.3f} {device:11.2f} {device / us:9.2f} {wall:7.1f}",
            flush=True,
        )
        rows.append({"batch": batch, "kernel_us": us, "jnp_device_us": device, "jnp_wall_us": wall})
    return {"floor_us": floor, "rows": rows}


def bench_formats(graphs, weights, floor_graph):
    fronts = {
        (f, b): bare.Front(graphs, weights, b, cache_format=f)
        for b in BATCHES
        for f in bare.FORMAT_FLAGS
    }
    captured = {key: graphs.capture(front.launch) for key, front in fronts.items()}
    times = graphs.time(captured, before=floor_graph)
    print("\nformats, us per launch (ratio to fp8)")
    for batch in BATCHES:
        base = times["fp8", batch]
        cells = [
            f"{f} {times[f, batch]:7.2f} ({times[f, batch] / base:.3f})" for f in bare.FORMAT_FLAGS
        ]
        print(f"{batch:5d} " + " ".join(cells))
    return [{"format": f, "batch": b, "us": us} for (f, b), us in times.items()]


def bench_scan():
    shape = LAYERS, HEADS * 128, K
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * K**-0.5)
    stack = make(jax.random.key(1))
    return {
        "stacked": scan_table(stack, UNROLLS, consumed=False),
        "consumed": scan_table(stack, UNROLLS_CONSUMED, consumed=True),
        "sliced": sliced_table(stack),
    }


def scan_table(stack, unrolls, consumed):
    """Wall time for each of `unrolls`, device time for the last."""
    columns = [(name, unroll) for unroll in unrolls for name in FRONTS]
    programs = compile_all(
        {
            (batch, name, unroll): scan(stack, batch, FRONTS[name], unroll, consumed)
            for batch in SCAN_BATCHES
            for name, unroll in columns
        }
    )
    kind = "consumed" if consumed else "stacked"
    print(f"\nscan over {LAYERS} layers, results {kind}, default XLA flags, us per layer")
    heads = [f"unroll {unroll} {name}" for name, unroll in columns]
    heads += [f"device {name}" for name in FRONTS]
    print(f"{'B':>5} " + " ".join(f"{head:>14}" for head in heads))
    rows = []
    for batch in SCAN_BATCHES:
        walls = [wall_us(*programs[batch, *column], LAYERS, 7) for column in columns]
        inside = [device_us(*programs[batch, name, unrolls[-1]], LAYERS) for name in FRONTS]
        print(f"{batch:5d} " + " ".join(f"{us:14.2f}" for us in walls + inside), flush=True)
        rows.append({"batch": batch} | dict(zip(heads, walls + inside, strict=True)))
    return rows


def sliced_table(stack, batch=8):
    """Wall time where the stack goes in whole and where the scan slices it; results consumed."""
    keys = [(unroll, sliced) for unroll in UNROLLS for sliced in (False, True)]
    programs = compile_all(
        {(u, s): scan(stack, batch, FRONTS["cuda"], u, consumed=True, sliced=s) for u, s in keys}
    )
    print(f"\nscan over {LAYERS} layers at B = {batch}, wq_b whole or sliced, us per layer")
    rows = []
    for unroll in UNROLLS:
        whole, cut = (wall_us(*programs[unroll, sliced], LAYERS, 7) for sliced in (False, True))
        print(f"unroll {unroll:2d}: whole {whole:6.2f}, sliced {cut:6.2f}", flush=True)
        rows.append({"unroll": unroll, "whole_us": whole, "sliced_us": cut})
    return rows


def bench_dispatch(weights):
    rows = {name: dispatch_us(weights, 8, front) for name, front in FRONTS.items()}
    print(
        "\ndispatch at B = 8, host us per enqueued call: "
        + ", ".join(f"{k} {v:.1f}" for k, v in rows.items())
    )
    return rows


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, floor = results["kernel"]["rows"], results["kernel"]["floor_us"]
    batches = [row["batch"] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150)
    for column, color, label in (
        ("jnp_device_us", "0.6", "XLA, jnp form (kernels alone)"),
        ("kernel_us", "tab:green", "jax_dsa_front kernel"),
    ):
        axes.plot(batches, [row[column] for row in rows], "o-", color=color, label=label)
    axes.axhline(
        floor, color="k", linestyle="--", linewidth=1, label="floor: loading wq_b (12.6 MB)"
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="batch (rows)",
        ylabel="us per call",
        title=results["gpu"],
    )
    axes.set_xticks(batches, [str(b) for b in batches], fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("."))
    arguments = parser.parse_args()
    device = jax.devices("cuda")[0]
    runtime = device.client.platform_version.splitlines()[-1]
    versions = f"jax {jax.__version__}, jax_dsa_front {dsa.__version__}, {runtime}"
    print(f"{device.device_kind}; {versions}")
    graphs, weights = bare.Graphs(), bare.rotating_weights()
    results = {"gpu": device.device_kind, "versions": versions}
    floor_graph = graphs.capture(graphs.floor(weights))
    results["kernel"] = bench_kernel(graphs, weights, floor_graph)
    results["formats"] = bench_formats(graphs, weights, floor_graph)
    results["scan"] = bench_scan()
    results["dispatch"] = bench_dispatch(weights)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "front.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, arguments.output / "front.png")


if __name__ == "__main__":
    main()

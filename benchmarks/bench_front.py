"""The tables of docs/performance.md: `python -P benchmarks/bench_front.py [--output DIR]` on a GPU
machine.

Needs the installed package with the extra for its CUDA version, and matplotlib for the plot.
Prints a table per section and writes front.json and front.png.

kernel    bare kernel against the load floor of the same run, beside XLA's jnp form; the
          protocol is in bare.py
formats   the bare kernel for the three cache formats
scan      time per layer of a jitted 24-layer scan over stacked weights and cache, kernel
          against jnp
dispatch  host time per enqueued call
"""

import argparse
import json
import statistics
import sys
import time
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
LAYERS = 24
OFFSETS = {"key_offset": K, "weight_offset": K + 128, "eps": 1e-6, "key_eps": 1e-6}


def wall_us(step, state, inner, repeats=15, calls=20):
    """Median microseconds of one of `inner` parts of step(state) -> state, pipelined `calls`
    deep."""
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


def chain_us(weights, batch, implementation):
    """Time per layer of an unrolled, jitted chain of 16 layers with an array each; the next depends
    on the last."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)

    @partial(jax.jit, donate_argnums=1)
    def chain(projected, cache):
        checks = []
        for matrix in weights:
            front = dsa.index_front(
                projected,
                q_norm,
                matrix,
                ones,
                zeros,
                cache,
                slots,
                implementation=implementation,
                **OFFSETS,
            )
            cache = front.cache
            projected = projected + front.weights[:, :1] * jnp.bfloat16(0)
            checks.append(front.query)
        return projected, cache, checks

    state = projected, dsa.empty_cache(pages, cache_format="fp8")
    return wall_us(lambda s: chain(*s)[:2], state, len(weights))


def scan_us(stack, batch, implementation):
    """Time per layer of a jitted scan over stacked weights and one stacked, donated cache."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)

    @partial(jax.jit, donate_argnums=1)
    def step(projected, cache):
        def body(carry, layer):
            projected, cache = carry
            front = dsa.index_front(
                projected,
                q_norm,
                stack,
                ones,
                zeros,
                cache,
                slots,
                layer,
                implementation=implementation,
                **OFFSETS,
            )
            projected = projected + front.weights[:, :1] * jnp.bfloat16(0)
            return (projected, front.cache), front.query

        carry, queries = jax.lax.scan(body, (projected, cache), jnp.arange(stack.shape[0]))
        return *carry, queries

    state = projected, dsa.empty_cache(pages, cache_format="fp8", layers=stack.shape[0])
    return wall_us(lambda s: step(*s)[:2], state, stack.shape[0])


def dispatch_us(weights, batch, implementation, calls=1000):
    """Host microseconds per call of a jitted index_front: the wall time of enqueueing many, before
    any is waited for."""
    projected, q_norm, pages, slots = operands(batch)
    ones, zeros = jnp.ones(128), jnp.zeros(128)
    call = jax.jit(
        lambda cache: dsa.index_front(
            projected,
            q_norm,
            weights[0],
            ones,
            zeros,
            cache,
            slots,
            implementation=implementation,
            **OFFSETS,
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


def bench_kernel(graphs, weights, batches, with_jnp=True):
    fronts = {batch: bare.Front(graphs, weights, batch) for batch in batches}
    captured = {"floor": graphs.capture(graphs.floor(weights))}
    captured |= {batch: graphs.capture(front.launch) for batch, front in fronts.items()}
    times = graphs.time(captured)
    floor = times.pop("floor")
    print(f"\nbare kernel, us per launch (floor of this run {floor:.2f})")
    print(
        f"{'B':>5} {'kernel':>8} {'/ floor':>8}"
        + (f" {'XLA jnp':>8} {'/ floor':>8}" if with_jnp else "")
    )
    rows = []
    for batch, us in times.items():
        row = {"batch": batch, "kernel_us": us, "ratio": us / floor}
        line = f"{batch:5d} {us:8.2f} {us / floor:8.3f}"
        if with_jnp:
            row["jnp_us"] = chain_us(weights, batch, "jnp")
            line += f" {row['jnp_us']:8.2f} {row['jnp_us'] / floor:8.3f}"
        print(line, flush=True)
        rows.append(row)
    return {"floor_us": floor, "rows": rows}


def bench_formats(graphs, weights):
    batches = (1, 8, 16, 32, 64, 128)
    names = tuple(bare.FORMAT_FLAGS)
    fronts = {
        (f, b): bare.Front(graphs, weights, b, cache_format=f) for b in batches for f in names
    }
    times = graphs.time({key: graphs.capture(front.launch) for key, front in fronts.items()})
    print("\nformats, us per launch (ratio to fp8)")
    for batch in batches:
        base = times["fp8", batch]
        print(
            f"{batch:5d} "
            + " ".join(f"{f} {times[f, batch]:6.2f} ({times[f, batch] / base:.3f})" for f in names)
        )
    return [{"format": f, "batch": b, "us": us} for (f, b), us in times.items()]


def bench_scan():
    make = jax.jit(
        lambda key: jax.random.normal(key, (LAYERS, HEADS * 128, K), jnp.bfloat16) * K**-0.5
    )
    stack = make(jax.random.key(1))
    print(f"\nscan over {LAYERS} layers, default XLA flags, us per layer")
    print(f"{'B':>5} {'kernel':>8} {'jnp':>8} {'ratio':>8}")
    rows = []
    for batch in SCAN_BATCHES:
        kernel, jnp_form = scan_us(stack, batch, "cuda"), scan_us(stack, batch, "jnp")
        rows.append({"batch": batch, "kernel_us": kernel, "jnp_us": jnp_form})
        print(f"{batch:5d} {kernel:8.2f} {jnp_form:8.2f} {jnp_form / kernel:8.2f}", flush=True)
    return rows


def bench_dispatch(weights):
    rows = {name: dispatch_us(weights, 8, name) for name in ("cuda", "jnp")}
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
    axes.plot(
        batches,
        [row["jnp_us"] for row in rows],
        "o-",
        color="0.6",
        label="XLA, jnp form (16-layer chain)",
    )
    axes.plot(
        batches,
        [row["kernel_us"] for row in rows],
        "o-",
        color="tab:green",
        label="jax_dsa_front kernel",
    )
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
    results["kernel"] = bench_kernel(graphs, weights, BATCHES)
    results["formats"] = bench_formats(graphs, weights)
    results["scan"] = bench_scan()
    results["dispatch"] = bench_dispatch(weights)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "front.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, arguments.output / "front.png")


if __name__ == "__main__":
    main()

"""The tables of docs/performance.md: `python -P benchmarks/bench_front.py [--output DIR]` on a GPU
machine.

Needs the installed package with the extra for its CUDA version, and matplotlib for the plot.
Prints a table per section and writes front.json and front.png.

kernel    bare kernel against the load floor of the same run, beside the jnp form under XLA; the
          protocol is in bare.py
formats   the bare kernel for the three cache formats
scan      time per layer of a jitted 24-layer scan over stacked weights and cache, kernel
          against jnp, with the results stacked or consumed by the next layer; and the kernel where
          the scan slices weights instead
dispatch  host time per enqueued call

Wall and device times inside jit: jitted.py.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent))
import bare
from jitted import HEADS, LAYERS, K, chain, compile_all, device_us, dispatch_us, scan, wall_us

import jax_dsa_front as dsa

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024, 4096)
SCAN_BATCHES = (1, 8, 16, 32, 64, 128)
UNROLLS, UNROLLS_CONSUMED = (1, 8, LAYERS), (1, 8)
FRONTS = {name: partial(dsa.index_front, implementation=name) for name in ("cuda", "jnp")}


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
    """Wall time where the stacks go in whole, and where the scan slices `wq_b` or all weights;
    results consumed."""
    everything = ("q_norm", "wq_b", "key_norm_weight", "key_norm_bias")
    forms = {"whole": (), "wq_b sliced": ("wq_b",), "all sliced": everything}
    programs = compile_all(
        {
            (unroll, form): scan(stack, batch, FRONTS["cuda"], unroll, True, sliced)
            for unroll in UNROLLS
            for form, sliced in forms.items()
        }
    )
    print(f"\nscan over {LAYERS} layers at B = {batch}, weights whole or sliced, us per layer")
    rows = []
    for unroll in UNROLLS:
        row = {form: wall_us(*programs[unroll, form], LAYERS, 7) for form in forms}
        print(
            f"unroll {unroll:2d}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items()), flush=True
        )
        rows.append({"unroll": unroll} | row)
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

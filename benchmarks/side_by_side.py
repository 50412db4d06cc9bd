"""The operator beside what a user would take instead, B = 8, H = 32, K = 1536, fp8, on one GPU:
`python -P benchmarks/side_by_side.py [--output DIR]`.

kernel  index_front(implementation="cuda"): this package
jnp     index_front(implementation="jnp"): the same operator by XLA
bridge  the CuTe DSL's own JAX bridge, cutlass.jax.cutlass_call, running the same kernel source
        (bridge.py); needs nvidia-cutlass-dsl at run time

Prints a table and writes side_by_side.json.  Everything is measured in fresh processes, as many of
a stage as TIMED says; those that take times run one at a time.  What fails is reported in one line,
and the rest goes on.
"""

import argparse
import collections
import functools
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
WAYS = {"kernel": "cuda", "jnp": "jnp", "bridge": None}
ANYWHERE = WAYS | {"kernel": None}  # "cuda" is a command that other platforms refuse
UNTIMED = ("graph", "cpu", "export")
TIMED = dict.fromkeys(("import", "first"), 3) | dict.fromkeys(("load", "lower", "steady"), 1)
BATCH, HEADS, K = 8, 32, 1536
STATIC = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6, cache_format="fp8")


def attempt(function, *arguments):
    """The result, or the first line of what went wrong."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def load_front(way, implementation):
    if way == "bridge":
        import bridge

        return bridge.index_front
    import jax_dsa_front

    return functools.partial(jax_dsa_front.index_front, implementation=implementation)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    projected, q_norm, wq_b = draw((BATCH, K + 128 + HEADS)), draw(K), draw((HEADS * 128, K)) / 40
    cache, slots = np.zeros((64, 64, 132), np.uint8), rng.permutation(64 * 64)[:BATCH]
    rows = [x.astype(jnp.bfloat16) for x in (projected, q_norm, wq_b)]
    return *rows, draw(128), draw(128), cache, slots.astype(np.int32)


def shapes(batch=BATCH):
    fixed = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs()]
    return [x.update(shape=(batch, *x.shape[1:])) if x.shape[0] == BATCH else x for x in fixed]


def program(front, sites=1):
    """A jitted chain of call sites, each of which depends on the last."""

    def step(projected, q_norm, wq_b, gain, bias, cache, slots):
        result = None
        for _ in range(sites):
            if result is not None:
                projected, cache = projected + result.weights[:, :1] * 0, result.cache
            result = front(projected, q_norm, wq_b, gain, bias, cache, slots, **STATIC)
        return result.query, result.weights, result.cache

    return jax.jit(step, donate_argnums=5)


def digest(outputs):
    return " ".join(hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:8] for x in outputs)


# Stages: each in a process of its own, {what: figure or words} ------------------------------------


def stage_import(way, folder):
    """On top of jax's import; the bridge alone, without the module that has the kernel."""
    start = time.perf_counter()
    if way == "bridge":
        from cutlass.jax import cutlass_call  # noqa: F401
    else:
        import jax_dsa_front  # noqa: F401
    return {"import, s": time.perf_counter() - start}


def stage_first(way, folder):
    """From after jax's import to the first result; the inputs start on the host."""
    host, times = inputs(), [time.perf_counter()]

    def done(value):
        times.append(time.perf_counter())
        return value

    front = done(load_front(way, WAYS[way]))
    arguments = done(jax.block_until_ready(jax.device_put(host)))
    lowered = done(program(front).lower(*arguments))
    compiled = done(lowered.compile())
    outputs = done(jax.block_until_ready(compiled(*arguments)))
    steps = zip(("import", "start CUDA", "lower", "compile", "run"), np.diff(times), strict=True)
    parts = {f"first call: {name}, s": float(step) for name, step in steps}
    return parts | {"first call, s": times[-1] - times[0], "digests": digest(outputs)}


def stage_lower(way, folder):
    results = lowering(load_front(way, WAYS[way]))
    if way == "bridge":
        import bridge

        results |= lowering(bridge.keyed_front, ", compile_key")
    return results


def lowering(front, key=""):
    """Milliseconds and characters of one more call site in a program, and of one more program."""

    def lower(sites=1, batch=BATCH):
        operands, start = shapes(batch), time.perf_counter()
        traced = program(front, sites).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))  # also where there is no GPU
        return np.array([(time.perf_counter() - start) * 1e3, len(lowered.as_text())])

    lower()
    one, two, many = (np.median([lower(sites) for _ in range(3)], axis=0) for sites in (1, 2, 17))
    new_shape = np.median([lower(batch=batch) for batch in (1, 3, 5)], axis=0)
    site = (many - two) / 15
    return {
        f"lower one more call site{key}, ms": site[0],
        f"lower one more program{key}, ms": one[0],
        f"lower one more shape{key}, ms": new_shape[0],
        f"program{key}, characters": one[1],
        f"one more call site{key}, characters": site[1],
    }


def stage_steady(way, folder):
    import bare
    import jitted

    front, matrices = load_front(way, WAYS[way]), bare.rotating_weights()

    def layer_us(measure):
        chain = jitted.chain(matrices, BATCH, front)
        return measure(*jitted.compile_all({way: chain})[way], len(matrices))

    return {
        "enqueue a call, us": attempt(jitted.dispatch_us, matrices, BATCH, front),
        "layer of a chain of 16, wall, us": attempt(layer_us, jitted.wall_us),
        "layer of a chain of 16, device, us": attempt(layer_us, jitted.device_us),
    }


def stage_export(way, folder):
    """Transforms and export: tracing and lowering alone.  Writes the exported program."""
    from jax import export

    call, anywhere = (program(load_front(way, which[way])) for which in (WAYS, ANYWHERE))
    (projected, *rest), checks = shapes(), []
    if way == "kernel":
        import jax_dsa_front

        checks = jax_dsa_front.export_safety_checks()
    elif way == "bridge":
        import cutlass.jax

        checks = cutlass.jax.get_export_disabled_safety_checks()

    def traced(function, first):
        return jax.eval_shape(function, first, *rest) and "works"

    def exported(name, function, platforms):
        make = export.export(function, platforms=platforms, disabled_checks=checks)
        return (folder / f"{way}.{name}").write_bytes(make(*shapes()).serialize())

    vmap = jax.vmap(call, in_axes=(0, *[None] * 6))
    grad = jax.grad(lambda *operands: call(*operands)[1].sum())
    return {
        "vmap": attempt(traced, vmap, projected.update(shape=(2, *projected.shape))),
        "grad": attempt(traced, grad, projected),
        "export, bytes": attempt(exported, "program", call, ["cuda"]),
        "export for CPU and CUDA, bytes": attempt(exported, "both", anywhere, ["cpu", "cuda"]),
    }


def stage_load(way, folder):
    """From after jax's import to the first result of the exported program."""
    from jax import export

    host, start = inputs(), time.perf_counter()
    if way == "kernel":
        import jax_dsa_front  # noqa: F401
    elif way == "bridge":
        import cutlass.jax

        cutlass.jax.register_ffi()
    loaded = export.deserialize(bytearray((folder / f"{way}.program").read_bytes()))
    outputs = jax.block_until_ready(jax.jit(loaded.call)(*host))
    return {"exported, first call, s": time.perf_counter() - start, "digests": digest(outputs)}


def stage_graph(way, folder):
    """What XLA executes for a chain of 16 call sites: one command buffer, or loose calls?"""
    jax.block_until_ready(program(load_front(way, WAYS[way]), 16)(*inputs()))
    *_, dump = sorted(folder.glob(f"dump-{way}/*jit_step*thunk_sequence_after_thunk_passes*"))
    kinds = collections.Counter(re.findall(r"^\d+: k(\w+)", dump.read_text(), re.MULTILINE))
    return {"XLA executes": ", ".join(f"{count} {kind}" for kind, count in kinds.items())}


def stage_cpu(way, folder):
    jax.block_until_ready(program(load_front(way, ANYWHERE[way]))(*inputs()))
    return {"on CPU": "works"}


def child(job, folder):
    """What the stage returns in a process of its own, or what went wrong there."""
    stage, way = job
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.08"}
    if stage == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    elif stage == "graph":
        dump = f"--xla_dump_to={folder}/dump-{way} --xla_dump_hlo_module_re=jit_step"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {dump}"
    command = [sys.executable, "-P", __file__, "--job", *job, "--output", folder]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
        outcome = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        outcome = {stage: "not done in 150 s"}
    except (IndexError, ValueError):
        outcome = {stage: f"exit status {done.returncode}: {done.stderr.strip()[-300:]}"}
    print(stage, way, outcome, file=sys.stderr, flush=True)
    return outcome


def measure(folder):
    """{what: {way: figure or words}}; figures are medians over processes."""
    jobs = [(stage, way) for stage in UNTIMED for way in WAYS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        outcomes = list(pool.map(functools.partial(child, folder=folder), jobs))
    timed = [(stage, way) for stage, times in TIMED.items() for _ in range(times) for way in WAYS]
    results, outcomes = {}, outcomes + [child(job, folder) for job in timed]
    for (_, way), outcome in zip(jobs + timed, outcomes, strict=True):
        for what, value in outcome.items():
            results.setdefault(what, {}).setdefault(way, []).append(value)
    for cells in results.values():
        for way, values in cells.items():
            words = sorted({value for value in values if isinstance(value, str)})
            cells[way] = "; ".join(words) if words else statistics.median(values)
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("."))
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        stage, way = arguments.job
        outcome = attempt(globals()[f"stage_{stage}"], way, arguments.output)
        print(json.dumps(outcome if isinstance(outcome, dict) else {stage: outcome}))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder))
    for what, cells in results.items():
        for way, value in cells.items():
            print(f"{what:38} {way:7} {value if isinstance(value, str) else f'{value:.4g}'}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = json.dumps({"jax": jax.__version__, "results": results}, indent=1)
    (arguments.output / "side_by_side.json").write_text(results + "\n")


if __name__ == "__main__":
    main()

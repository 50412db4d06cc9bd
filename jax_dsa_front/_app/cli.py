"""The console script `jax-dsa-front`: the demo, and `info` for bug reports."""

import argparse
import ctypes
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from jax_dsa_front._app import terminal
from jax_dsa_front._cache import ROW_BYTES

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "cuda-bindings", "numpy")

ENVIRONMENT = (
    *("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION"),
    # Two have no other name; the third is the older one of the fraction
    *(f"XLA_PYTHON_CLIENT_{name}" for name in ("PREALLOCATE", "MEM_FRACTION", "ALLOCATOR")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="jax-dsa-front",
        description="The lightning indexer of DeepSeek Sparse Attention for JAX.",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("demo", "info"),
        default="demo",
        help="demo (default): a jitted decode loop, its recall, and a check of recorded outputs, "
        "under a minute on two CPU cores; info: versions, devices and kernels, for bug reports",
    )
    parser.add_argument(
        "--cache-format",
        choices=tuple(ROW_BYTES),
        default="fp8",
        help="format of the demo's key cache (default: fp8)",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_own_version()}")
    options = parser.parse_args(arguments)
    try:
        if options.command == "info":
            print("\n".join(terminal.row(label, text) for label, text in info()), flush=True)
            return 0
        from jax_dsa_front._app import demo, recorded
        from jax_dsa_front._runtime import library

        if not recorded.FOLDER.exists():
            print(library.NOT_BUILT.format("recorded outputs are"), file=sys.stderr)
            return 2
        obstacle = _no_device()
        if obstacle is not None:
            print(obstacle, file=sys.stderr)
            return 2
        return demo.run(options.cache_format)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `jax-dsa-front info | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 141


def info() -> list[tuple[str, str]]:
    """Labelled lines about this installation; a line that cannot be had says why."""
    questions: list[tuple[str, Callable[[], str]]] = [
        ("jax_dsa_front", _own_version),
        ("installed in", lambda: str(Path(__file__).parents[1])),
        ("python", _python),
        *((name, lambda name=name: _version(name)) for name in PACKAGES),
        ("environment", _environment),
        ("driver", _driver),
        ("devices", _devices),
        ("kernels", _kernels),
        ("registration", _registration),
        ("kernel can run", _kernel_can_run),
        ("what would run", _choices),
    ]
    lines = []
    for label, answer in questions:
        try:
            lines.append((label, answer()))
        except Exception as error:  # a broken installation is what a bug report is about
            lines.append((label, f"unknown ({f'{type(error).__name__}: {error}'.rstrip(': ')})"))
    return lines


def _own_version() -> str:
    import jax_dsa_front

    return jax_dsa_front.__version__


def _python() -> str:
    system = os.uname()  # platform.platform() would start `uname -p`
    libc = "-".join(platform.libc_ver())
    return (
        f"{platform.python_version()} on {system.sysname} {system.release} {system.machine}, {libc}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _environment() -> str:
    """What decides over JAX's platforms and over the memory and the graphs of its GPU backend."""
    found = [f"{name}={value}" for name in ENVIRONMENT if (value := os.environ.get(name))]
    return ", ".join(found) or "nothing set"


def _driver() -> str:
    """The driver's own version and the newest CUDA that it supports, without initialising it."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1)"
    version = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(version))
    supports = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if status != 0:
        supports = f"cuDriverGetVersion returned {status}"
    kernel_module = Path("/proc/driver/nvidia/version")
    own = kernel_module.read_text().splitlines()[0] if kernel_module.exists() else ""
    return f"{supports} {own}".strip()


def _no_device() -> str | None:
    """Why JAX has no device, as where JAX_PLATFORMS names a plugin that is not there."""
    import jax

    try:
        jax.local_devices()
    except Exception as error:  # JAX's own: RuntimeError, or a bare AssertionError
        reason = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
        platforms = os.environ.get("JAX_PLATFORMS")
        chosen = f"leave JAX_PLATFORMS={platforms} out, or " if platforms else ""
        return (
            f"JAX has no device ({reason}): {chosen}install its plugin and driver (for NVIDIA GPUs "
            "the extra cuda13 or cuda12)"
        )
    return None


def _devices() -> str:
    import jax

    found = Counter(
        f"{device.device_kind} ({device.platform}"
        + (f", {capability})" if (capability := getattr(device, "compute_capability", "")) else ")")
        for device in jax.local_devices()
    )
    return ", ".join(f"{count} x {name}" for name, count in found.items())


def _kernels() -> str:
    from jax_dsa_front._runtime import variants

    if not variants.MANIFEST.exists():
        return "none: the package was not built (its cubins are missing)"
    manifest = variants.manifest()
    kept = Counter(f"{kernel['operator']} {kernel['arch']}" for kernel in manifest["kernels"])
    each = (f"{number} of {name}" for name, number in kept.items())
    count = len(manifest["kernels"])
    return f"{count} cubins: {', '.join(each)}, built with CuTe DSL {manifest['cutlass_dsl']}"


def _registration() -> str:
    from jax_dsa_front._runtime import library

    error = library.registration_error()
    return error or f"{', '.join(library.TARGETS)} registered for CUDA"


def _kernel_can_run() -> str:
    from jax_dsa_front._runtime import library

    obstacle = library.missing()
    return (
        f"no: {obstacle}"
        if obstacle
        else f"yes, on {', '.join(library.local_cuda_architectures())}"
    )


def _choices() -> str:
    """What runs for the shapes of Kimi K3.1 (K = 1536, 32 heads), by batch."""
    batches: dict[str, list[str]] = {}
    for batch in (1, 8, 64, 256, 1024):
        batches.setdefault(_choice(batch), []).append(str(batch))
    return "; ".join(f"at B = {', '.join(some)} {choice}" for choice, some in batches.items())


def _choice(batch: int) -> str:
    import jax
    import jax.numpy as jnp

    import jax_dsa_front as dsa

    shapes = [
        *(((batch, 1696), jnp.bfloat16), ((1536,), jnp.bfloat16), ((4096, 1536), jnp.bfloat16)),
        *(((128,), jnp.float32), ((128,), jnp.float32), ((16, 64, 132), jnp.uint8)),
        ((batch,), jnp.int32),
    ]
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    static = dict(key_offset=1536, weight_offset=1664, eps=1e-6, key_eps=1e-6, cache_format="fp8")
    return str(dsa.explain(dsa.index_front, *operands, **static))

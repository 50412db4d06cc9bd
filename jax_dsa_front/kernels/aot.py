"""Compiles every shipped variant to a cubin: `python -m jax_dsa_front.kernels.aot OUTPUT`.

Needs nvidia-cutlass-dsl, no GPU and no CUDA toolkit. The same source gives the same bytes.
"""

import argparse
import hashlib
import json
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from .._runtime.variants import VARIANTS, FrontVariant, ScoresVariant, digest

PROCESSES = 4  # at most; each takes 0.4 GB


def build_kernel(variant: FrontVariant | ScoresVariant):
    """(the kernel object of a variant, its arguments)"""
    if isinstance(variant, FrontVariant):
        from .front.arguments import front_arguments

        return front_kernel(variant), front_arguments()
    from .scores.arguments import scores_arguments
    from .scores.paged import Paged
    from .scores.paged_fp4 import PagedFp4

    kind = {"paged": Paged, "paged_fp4": PagedFp4}[variant.schedule]
    return kind(variant.heads, variant.tile, variant.page_size), scores_arguments()


def front_kernel(variant: FrontVariant):
    from .front.row_norm import RowNorm
    from .front.split_k import SplitK
    from .front.split_k_rows import SplitKRows
    from .front.split_n import SplitN

    match variant.schedule:
        case "split_n":
            return SplitN(variant.k, converts_fp4=variant.arch != "sm_90a")
        case "split_k":
            return SplitK(variant.k, variant.tile)
        case "split_k_rows":
            return SplitKRows(variant.k, variant.tile)
        case "row_norm":
            return RowNorm(variant.k)
        case other:
            raise ValueError(f"unknown schedule {other!r}")


def compile_variant(variant: FrontVariant | ScoresVariant, output: Path) -> dict:
    """Writes `output/<name>.cubin` and returns its manifest entry."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    kernel, arguments = build_kernel(variant)
    type(kernel).kernel.set_name_prefix(
        variant.name, remove_cutlass_symbol=True, keep_mangled_name=False
    )
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = cute.compile(
            kernel,
            arguments,
            make_fake_stream(),
            options=f"--gpu-arch {variant.arch} --keep-cubin --dump-dir {scratch}",
        )
        cubin = compiled.__cubin__
    (symbol,) = compiled.kernel_info
    (output / f"{variant.name}.cubin").write_bytes(cubin)
    return {
        "name": variant.name,
        "operator": variant.operator,
        "key": variant.key,
        **asdict(variant),
        "symbol": symbol,
        "threads": kernel.threads,
        "cluster": kernel.cluster,
        "shared_bytes": kernel.shared.nbytes(),
        "sha256": hashlib.sha256(cubin).hexdigest(),
    }


def build(output: Path) -> None:
    """Fills `output` with every cubin and the manifest that _runtime/loader.py reads."""
    output.mkdir(parents=True, exist_ok=True)
    # Processes, because a compilation keeps one core busy and Python's lock with it; spawned ones,
    # because JAX, which the package imports, has threads.
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        entries = list(pool.map(compile_variant, VARIANTS, repeat(output)))
    manifest = {
        "cutlass_dsl": version("nvidia-cutlass-dsl"),
        "sha256": digest(entries),
        "kernels": entries,
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder for the cubins and the manifest")
    build(parser.parse_args().output)


if __name__ == "__main__":
    main()

"""What the handler launches for a call, driven through its bare launch with a stand-in driver."""

import ast
import json
import re

import pytest

from processes import TESTS, run_python

KERNELS_OF_A_CALL = """
import json, sys
from fake_driver import RecordedLaunches
from jax_dsa_front._runtime import loader
benchmarks, per_wave, calls = sys.argv[1:]
sys.path.insert(0, benchmarks)
from bare import FrontParams, launch_front
recorded = RecordedLaunches(clusters_per_wave=int(per_wave))
def kernels_of(k, batch, heads):
    recorded.launched.clear()
    recorded.parameters = FrontParams(batch=batch)
    launch_front(k, recorded.parameters, heads, heads * 128, 0)
    names = {1 + library: name for name, library in loader._libraries.items()}
    own = [names[handle] for handle, _ in recorded.launched]
    return [name.removeprefix(f"index_front_sm_90a_k{k}_") for name in own]
kernels = [kernels_of(*call) for call in json.loads(calls)]
print(json.dumps([kernels, dict(recorded.fields())]))
"""


def kernels_of(calls, tmp_path, per_wave=66):
    """The launches of each (K, B, H), on a device that holds so many clusters at once."""
    return launches(calls, tmp_path, per_wave)[0]


def launches(calls, tmp_path, per_wave=66):
    """The same, and {parameter: bytes} of a kernel, in order."""
    benchmarks = TESTS.parent / "benchmarks"
    arguments = benchmarks, per_wave, json.dumps(calls)
    return json.loads(run_python(KERNELS_OF_A_CALL, *arguments, cwd=tmp_path, JAX_PLATFORMS="cpu"))


def test_parameters_have_one_order(tmp_path):
    """The C++ struct, the list that is launched with and its twin in benchmarks/bare.py, in that
    program; and the kernels' own, whose module needs the DSL."""
    source = ast.parse((TESTS.parent / "jax_dsa_front/kernels/front/arguments.py").read_text())
    (own,) = (n for n in source.body if getattr(n, "name", None) == "FrontArguments")
    members = [n for n in own.body if isinstance(n, ast.AnnAssign)]
    own = {n.target.id: int(n.annotation.id[-2:]) // 8 for n in members}
    header = (TESTS.parent / "csrc_glue/front_params.h").read_text()
    struct = header.split("struct FrontParams {")[1].split("\n};")[0]
    assert re.findall(r"^ +[\w *]+[ *](\w+);", struct, re.M) == list(own)
    _, parameters = launches([(1280, batch, 8) for batch in (1, 32, 300)], tmp_path)
    assert list(own.items()) == list(parameters.items())


def test_kernels_of_a_call(tmp_path):
    """docs/kernels.md, "Which kernel": 32 heads, and grids around what an H200 holds at once."""
    rows_64, rows_128 = ["row_norm_b1", "split_k_rows_b64"], ["row_norm_b1", "split_k_rows_b128"]
    want = {
        (1536, 1, 32): ["split_n_b8"],
        (1280, 8, 32): ["split_n_b8"],
        (1536, 9, 32): ["split_k_b32"],
        (1536, 64, 32): ["split_k_b32"],
        (1536, 65, 32): rows_64,
        (1536, 128, 32): rows_64,
        (1536, 129, 32): rows_128,
        (1280, 4096, 32): rows_128,
        (1536, 300, 8): rows_64,
        (2048, 1, 32): ["split_k_b32"],
        (2048, 8, 64): ["split_k_b32"],
        (2048, 8, 67): rows_128,
    }
    assert dict(zip(want, kernels_of(list(want), tmp_path), strict=True)) == want


@pytest.mark.parametrize("per_wave", [16, 57, 66])
def test_small_batches_take_one_kernel_whatever_the_heads(per_wave, tmp_path):
    """It alone adds in an order of its own: shards of the heads must give the bits of all."""
    calls = [(k, b, h) for k in (1280, 1536) for b in (1, 8) for h in (1, 8, 64, 67, 72, 128, 256)]
    assert kernels_of(calls, tmp_path, per_wave) == [["split_n_b8"]] * len(calls)
    calls = [(k, 9, h) for k in (1280, 1536) for h in (1, 8, 64, 67, 72, 128, 256)]
    assert not [names for names in kernels_of(calls, tmp_path, per_wave) if "split_n_b8" in names]

"""Which scorer the handler launches for a call, driven through its bare launch with a stand-in
driver; and that its parameters are one list in every language."""

import ast
import json
import re

from processes import TESTS, run_python

SCORERS_OF_A_CALL = """
import json, sys
from fake_driver import RecordedLaunches
from jax_dsa_front._runtime import loader
benchmarks, calls = sys.argv[1:]
sys.path.insert(0, benchmarks)
from bare import ScoresParams, launch_scores
recorded = RecordedLaunches()
def scorer_of(fmt, heads, page_size, rows):
    recorded.launched.clear()
    recorded.parameters = ScoresParams(
        batch=3 * rows, rows_per_sequence=rows, table_width=4, pages=9
    )
    launch_scores(recorded.parameters, heads, page_size, fmt, 0)
    ((handle, maps),) = recorded.launched
    names = {1 + library: name for name, library in loader._libraries.items()}
    return [names[handle].removeprefix("index_scores_sm_90a_"), maps]
print(json.dumps([[scorer_of(*call) for call in json.loads(calls)], recorded.fields()]))
"""


def launches(calls, tmp_path):
    """[(scorer, tensor maps)] of each (format, heads, page size, rows), and the parameters."""
    arguments = TESTS.parent / "benchmarks", json.dumps(calls)
    return json.loads(run_python(SCORERS_OF_A_CALL, *arguments, cwd=tmp_path, JAX_PLATFORMS="cpu"))


def test_scorer_of_a_call(tmp_path):
    """The fewest reads of a page, and then the narrowest product; only those of the call's key are
    loaded."""
    want = {
        ("fp8", 32, 64, 1): ["paged_h32_p64_r1", 2],
        ("mxfp8", 32, 64, 2): ["paged_h32_p64_r2", 2],
        ("fp8", 32, 64, 3): ["paged_h32_p64_r4", 2],
        ("fp8", 32, 64, 130): ["paged_h32_p64_r4", 2],
        ("fp8", 64, 64, 4): ["paged_h64_p64_r2", 2],
        ("fp8", 8, 32, 4): ["paged_h8_p32_r1", 2],
        ("fp8", 16, 128, 1): ["paged_h16_p128_r1", 2],
        ("mxfp4", 64, 64, 2): ["paged_fp4_h64_p64_r1", 1],
        ("mxfp4", 16, 64, 8): ["paged_fp4_h16_p64_r4", 1],
    }
    got, _ = launches(list(want), tmp_path)
    assert dict(zip(want, got, strict=True)) == want


def test_parameters_have_one_order(tmp_path):
    """The C++ struct, the list that is launched with and its twin in benchmarks/bare.py; and the
    kernels' own, whose module needs the DSL. So have the flags."""
    path = TESTS.parent / "jax_dsa_front/kernels/scores/arguments.py"
    (own,) = (
        n for n in ast.parse(path.read_text()).body if getattr(n, "name", None) == "ScoresArguments"
    )
    members = [n for n in own.body if isinstance(n, ast.AnnAssign)]
    own = [[n.target.id, int(n.annotation.id[-2:]) // 8] for n in members]
    header = (TESTS.parent / "csrc_glue/scores_params.h").read_text()
    struct = header.split("struct ScoresParams {")[1].split("\n};")[0]
    assert re.findall(r"^ +[\w *]+[ *](\w+);", struct, re.M) == [name for name, _ in own]
    _, parameters = launches([("fp8", 32, 64, 1), ("mxfp4", 32, 64, 1)], tmp_path)
    assert own == parameters
    flags = re.findall(r"^  k\w+ = (\d+),", header, re.M)
    assert re.findall(r"^FLAG_\w+ = (\d+)$", path.read_text(), re.M) == flags

"""The console script: the demo's table and exit status, and `info` on broken installations."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import jax
import numpy as np
import pytest

import jax_dsa_front as dsa
from jax_dsa_front._app import cli, demo, recorded
from jax_dsa_front._runtime import library, variants
from processes import TESTS, run_python

MODULE = "import runpy; runpy.run_module('jax_dsa_front', run_name='__main__', alter_sys=True)"
# What only the extra `test` installs is not there for the newcomer.
WITHOUT_TEST_EXTRA = """
import sys
sys.modules.update(dict.fromkeys(["pytest", "xdist", "hypothesis", "flatbuffers"]))
"""


def assert_plain(text):
    """ASCII, at most 80 columns, nothing that moves a cursor."""
    assert re.fullmatch(r"[\x20-\x7e\n]*", text)
    assert max(map(len, text.splitlines())) <= 80


def test_the_script_is_this_function():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="jax-dsa-front")
    assert script.load() is cli.main


def test_the_script_runs_the_installed_package():
    """Also where the source tree is the working directory."""
    script = pathlib.Path(sysconfig.get_path("scripts")) / "jax-dsa-front"
    done = subprocess.run(
        [script, "info"], cwd=TESTS.parent, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (folder,) = re.findall(r"^ *installed in +(.*)$", done.stdout, re.M)
    assert pathlib.Path(folder) == pathlib.Path(dsa.__file__).parent
    assert not pathlib.Path(folder).is_relative_to(TESTS.parent / "jax_dsa_front")


def test_a_reader_that_stops_reading_is_no_error():
    """As in `jax-dsa-front info | head -1`: the pipe is closed before the first line."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", MODULE, "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # plugins write to stderr when they start
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=300) == 141  # what a shell reports for a process that SIGPIPE ends


def test_demo(tmp_path):
    """The main job as a newcomer runs it; `run_python` fails on any exit status but 0."""
    table = table_of_the_demo(tmp_path, JAX_PLATFORMS="cpu")
    assert "implementation jnp: on cpu it is the only one" in table
    assert "PASS (jnp)" in table
    assert table.count("5,280 of 5,280 weights") == 1


@pytest.mark.gpu
def test_demo_on_a_gpu(tmp_path):
    """Kernel and jnp form both reproduce the recorded outputs."""
    table = table_of_the_demo(tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert "implementation cuda: a shipped kernel takes K = 1536" in table
    assert "1 kernel call, cache of" in table
    assert "PASS (cuda)" in table
    assert "PASS (jnp)" in table
    assert table.count("5,280 of 5,280 weights") == 2


def table_of_the_demo(cwd, **env):
    text = run_python(WITHOUT_TEST_EXTRA + MODULE, cwd=cwd, TERM="dumb", **env)
    assert_plain(text)
    title, *rows = text.split("-" * 79 + "\n")[1:3]
    assert title == "jax_dsa_front demo\n"
    table = " ".join(rows[0].split())
    assert "updated in place" in table
    recall, top, keys = re.search(r"([\d.]+) of the unquantised top (\d+) of (\d+)", table).groups()
    assert float(recall) > 0.9
    assert int(top) < int(keys)
    assert float(re.search(r"total time ([\d.]+) s", table)[1]) < 60 * 3  # 60, and busy machines
    return table


@pytest.fixture
def small_demo(monkeypatch):
    sizes = {"LAYERS": 2, "BATCH": 2, "CONTEXT": 512, "STEPS": 16, "LENGTH": 528, "TOP": 16}
    for name, value in {**sizes, "PAGE": 16}.items():
        monkeypatch.setattr(demo, name, value)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_demo_of_a_package_that_was_not_built(capsys, monkeypatch):
    """As in the source tree: nothing is run in vain."""
    monkeypatch.setattr(recorded, "FOLDER", pathlib.Path("nowhere"))
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert re.fullmatch(r"the package was not built .*: pip install it, or .*\n", captured.err)


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no such platform")])
def test_without_a_device(capsys, monkeypatch, error):
    """As with JAX_PLATFORMS=cuda and no plugin: the way out instead of JAX's own traceback."""

    def local_devices():
        raise error

    monkeypatch.setattr(jax, "local_devices", local_devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    says = rf"JAX has no device \({type(error).__name__}.*\): leave JAX_PLATFORMS=cuda out, or .*\n"
    assert re.fullmatch(says, captured.err)


@pytest.mark.parametrize(("fmt", "weights_equal"), [("mxfp4", 100), ("mxfp4", 99)])
def test_exit_status_follows_the_recorded_outputs(
    small_demo, capsys, monkeypatch, fmt, weights_equal
):
    """One weight that differs fails the demo; the loop runs in every format."""
    result = recorded.Comparison("jnp", 1, 100, weights_equal, 1000, 1000, 1.0)
    monkeypatch.setattr(recorded, "check", lambda *_: result)
    good = weights_equal == 100
    assert cli.main(["demo", "--cache-format", fmt]) == (0 if good else 1)
    captured = capsys.readouterr()
    assert_plain(captured.out)
    assert ("PASS (jnp)" if good else "FAIL (jnp)") in captured.out
    assert ("FAILED" in captured.err) != good


def test_what_passes():
    def passes(weights_equal, lowest):
        return recorded.Comparison("jnp", 1, 100, weights_equal, 1000, 999, lowest).passed

    assert passes(100, 0.999)
    assert not passes(99, 1.0)
    assert not passes(100, 0.9989)


def test_one_changed_weight_is_noticed(monkeypatch):
    inputs, outputs = recorded._load()
    case = "b1_s12_normal"
    few = {name: value for name, value in outputs.items() if name.startswith(case + "/")}
    monkeypatch.setattr(recorded, "_load", lambda: (inputs, few))
    assert recorded.check("jnp").passed
    few[f"{case}/weights"] = few[f"{case}/weights"] ^ np.uint16(1)
    comparison = recorded.check("jnp")
    assert comparison.weights_equal == 0
    assert not comparison.passed
    few[f"{case}/crc"] = few[f"{case}/crc"] + np.uint32(1)
    with pytest.raises(RuntimeError, match="inputs"):
        recorded.check("jnp")


def test_info(tmp_path):
    code = MODULE.replace("import runpy;", "import runpy, sys; sys.argv.append('info');")
    flags = dict(XLA_FLAGS=None, CUDA_VISIBLE_DEVICES=None)  # which may be longer than a line
    text = run_python(code, cwd=tmp_path, JAX_PLATFORMS="cpu", TERM="dumb", **flags)
    folder = str(pathlib.Path(dsa.__file__).parent)
    assert folder in text
    assert_plain(text.replace(folder, ""))  # likewise
    facts = (dsa.__version__, jax.__version__, sys.version.split()[0], *variants.ARCHITECTURES)
    facts = *facts, "environment JAX_PLATFORMS=cpu", "1 x cpu", "at B = 1, 8"
    for fact in (*facts, f"{', '.join(library.TARGETS)} registered for CUDA"):
        assert fact in " ".join(text.split())
    assert f"cuda-bindings {cli._version('cuda-bindings')}" in " ".join(text.split())
    assert "unknown (" not in text


@pytest.mark.parametrize(
    ("module", "attribute"),
    [(variants, "manifest"), (library, "missing"), (jax, "local_devices"), (dsa, "explain")],
)
def test_info_survives_anything(capsys, monkeypatch, module, attribute):
    def broken(*_, **__):
        raise OSError("the disk is gone")

    monkeypatch.setattr(module, attribute, broken)
    assert cli.main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "unknown (OSError: the disk is gone)" in text
    assert dsa.__version__ in text


def test_info_without_cubins(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(variants, "MANIFEST", tmp_path / "manifest.json")
    assert cli.main(["info"]) == 0
    assert "cubins are missing" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [["demos"], ["--cache-format", "fp4"]])
def test_unknown_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: jax-dsa-front" in capsys.readouterr().err

"""What a newcomer runs: every file in examples/, and the code of the README."""

import pathlib
import re

import pytest

from processes import run_python

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text()
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, tmp_path):
    """Each checks its own claims and ends with one line that says what it found."""
    assert_says_one_line(example, tmp_path, JAX_PLATFORMS="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_gpus(example, tmp_path):
    """The same claims hold where the kernel runs, over all GPUs there are."""
    assert_says_one_line(example, tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")


def assert_says_one_line(example, cwd, **env):
    output = run_python(RUN, example, cwd=cwd, XLA_FLAGS=None, **env)
    assert output.startswith(f"{example.stem}: ")
    assert output.count("\n") == 1


def test_every_example_has_its_place_in_the_docs():
    assert len(EXAMPLES) == 6
    page = (ROOT / "docs" / "integration.md").read_text()
    for example in EXAMPLES:
        assert f"../examples/{example.name}" in page
        assert len(example.read_text().splitlines()) < 80


@pytest.mark.parametrize("x64", ["0", "1"], ids=["", "x64"])
@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_readme_code_runs_as_it_stands(platform, x64, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    env = dict(JAX_PLATFORMS=platform, XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_ENABLE_X64=x64)
    shapes = run_python(code, cwd=tmp_path, **env)
    assert shapes == "(64, 64, 132) (8, 4)\n"


def test_readme_commands():
    """Two lines, each from a clean clone; .ci/run runs the second, whose tests run the demo."""
    commands = ("pip install . && jax-dsa-front", 'pip install ".[test]" && pytest')
    assert tuple(re.findall(r"^pip install .* && .*$", README, re.M)) == commands
    assert f"\n  {commands[1]}\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        assert (path.parent / target).exists(), target

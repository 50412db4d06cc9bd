"""Running a piece of Python in a process of its own, against the installed package."""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def run_python(code, *argv, cwd, **env):
    """Output of `code`; fails with its error text. `env` adds variables, None removes one.

    The working directory is the caller's (a temporary one), so that no source tree is importable;
    this folder is, for the shared test modules.
    """
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, **env}
    env = {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout

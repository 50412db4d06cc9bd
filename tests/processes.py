"""Running a piece of Python in a process of its own, against the installed package."""

import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent


def run_python(code, *argv, cwd, **env):
    """Output of `code`; fails with its error text. `env` adds variables, None removes one."""
    return outputs_of(code, *argv, cwd=cwd, **env)[0]


def outputs_of(code, *argv, cwd, site=None, **env):
    """(stdout, stderr) of `code`, likewise; `site` is a folder to find packages in first.

    No source tree is importable; this folder is, for the shared test modules.
    """
    folders = [site, TESTS, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(folder) for folder in folders if folder)
    env = {**os.environ, "PYTHONPATH": path, **env}
    env = {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, argv)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout, done.stderr

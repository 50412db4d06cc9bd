"""What the package does to the machine at run time: it reads its own files, and no more."""

import pytest

from processes import run_python

# Python tells of every such event, also those that JAX or cuda-python cause, and also of imports'.
WATCHED = """
import os, sys
import jax, jax.numpy as jnp
jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))  # JAX has started its backend
try:
    import cuda.bindings.driver  # runs `ldconfig -p` to find libdl, as the README says
except ImportError:
    pass

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
LEAVES_A_TRACE = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.",
    "socket.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.",
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.setxattr", "tempfile.", "shutil.", "sqlite3.",
)
seen = []

def hook(event, arguments):
    writes = event == "open" and arguments[2] & WRITES
    if writes or event.startswith(LEAVES_A_TRACE):
        seen.append((event, arguments))

sys.addaudithook(hook)
import jax_dsa_front as dsa
import small
from jax_dsa_front._app import cli

projected, weights, cache = small.operands(k=1536)
for implementation in (None, "jnp"):
    front = small.step(projected, weights, cache, jnp.arange(4), implementation=implementation)
table, lengths = jnp.zeros((4, 1), int), jnp.ones(4, int)
dsa.index_scores(front.query, None, front.weights, front.cache, table, lengths, cache_format="fp8")
dsa.read_keys(front.cache, jnp.arange(4), cache_format="fp8").block_until_ready()
dsa.explain(
    dsa.index_front, projected, *weights, cache, jnp.arange(4),
    key_offset=1536, weight_offset=1664, eps=1e-6, key_eps=1e-6,
    cache_format="fp8",
)
jax.jit(small.step).lower(projected, weights, cache, jnp.arange(4)).compile()
cli.main(["info"])
assert not seen, seen

with open("control", "w"):  # the hook does see such things
    os.system("true")
os.rename("control", "moved")
assert [event for event, _ in seen] == ["open", "os.system", "os.rename"], seen
"""


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_is_written_started_or_fetched(platform, tmp_path):
    environment = dict(PYTHONDONTWRITEBYTECODE="1", XLA_PYTHON_CLIENT_PREALLOCATE="false")
    run_python(WATCHED, cwd=tmp_path, JAX_PLATFORMS=platform, **environment)

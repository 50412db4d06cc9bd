"""Which implementation runs: the platform, the shapes, and the GPUs of this machine decide.

Most machines are simulated, by what JAX would say about their devices. The tests marked `gpu` are
of processes whose GPUs are hidden from JAX, and of a second GPU that looks like an older one.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import pytest

import cases
import jax_dsa_front as dsa
import small
from cases import KIMI
from compare import assert_same_front
from jax_dsa_front._runtime import library, variants
from processes import run_python
from programs import cuda_text, custom_calls, lowered_for_cuda


def test_every_platform_but_cuda_takes_the_jnp_form():
    case = cases.Case("rocm", **KIMI)
    traced = jax.jit(cases.function(case)).trace(*cases.arrays(case, cases.make(case)))
    for platform in ("cpu", "rocm", "tpu"):
        assert not custom_calls(traced.lower(lowering_platforms=(platform,)).as_text())
    both = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert len(custom_calls(both)) == 1 and "stablehlo.case" in both


@pytest.mark.parametrize("platform", ["cpu", "rocm"])
def test_cuda_command_elsewhere_says_what_is_missing(platform):
    case = cases.Case("command", **KIMI)
    traced = jax.jit(cases.function(case, "cuda")).trace(*cases.arrays(case, cases.make(case)))
    with pytest.raises(NotImplementedError, match=r'^implementation="cuda" cannot run .+'):
        traced.lower(lowering_platforms=(platform,))


def test_cuda_command_run_here_says_what_is_missing():
    """The sentence names this machine's first lack, whichever that is."""
    case = cases.Case("command", **KIMI)
    with pytest.raises(NotImplementedError, match=re.escape(library.missing() or "CUDA")):
        cases.run(case, implementation="cuda")


def kernel_in(case, implementation=None):
    return len(custom_calls(cuda_text(case, implementation))) == 1


def explain(case, implementation=None):
    operands = cases.make(case)
    return dsa.explain(
        dsa.index_front, *operands.args, **operands.static, implementation=implementation
    )


@pytest.mark.parametrize(
    ("changes", "names"),
    [(dict(k=256), "256"), (dict(k=1408), "1408"), (dict(gap=1), "multiple of 8")],
)
def test_shapes_without_a_kernel(changes, names):
    """Cross-lowered, with no local GPU: None takes the jnp form, "cuda" says what does not fit."""
    case = cases.Case("misfit", **KIMI | changes)
    assert not kernel_in(case)
    with pytest.raises(NotImplementedError, match=names):
        kernel_in(case, "cuda")


def test_commands_are_obeyed_in_cross_lowering():
    case = cases.Case("fit", **KIMI)
    assert kernel_in(case) and kernel_in(case, "cuda") and not kernel_in(case, "jnp")
    large = cases.Case("large", **KIMI | dict(batch=4096), slots="none")
    assert kernel_in(large, "cuda")


def pretend(monkeypatch, *architectures, faster=False):
    """As if these CUDA devices were here, and nothing were missing to run on them."""
    monkeypatch.setattr(library, "local_cuda_architectures", lambda: architectures)
    monkeypatch.setattr(library, "missing", lambda *_: None)
    monkeypatch.setattr(variants, "front_jnp_is_faster", lambda *_: faster)


@pytest.mark.parametrize("architectures", [("sm_80",), ("sm_90a", "sm_80"), ("sm_120a", "sm_90a")])
def test_unsupported_gpu(monkeypatch, architectures):
    """One local device without a kernel is enough: the lowering does not know which will run it."""
    pretend(monkeypatch, *architectures)
    case = cases.Case("unsupported", **KIMI)
    other = next(a for a in architectures if a != "sm_90a")
    assert not kernel_in(case)
    with pytest.raises(NotImplementedError, match=other):
        kernel_in(case, "cuda")
    explanation = explain(case)
    assert explanation.implementation == "jnp" and other in explanation.reason
    assert other in str(explanation)
    with pytest.raises(NotImplementedError, match=other):
        explain(case, "cuda")


NO_SM_80 = "no kernel is shipped for sm_80a, only for sm_90a, sm_100a, sm_103a"


def test_device_without_a_kernel_beside_one_with(monkeypatch):
    """Every call of a program takes the jnp form; "cuda" refuses with the sentence of `explain`."""
    devices = [types.SimpleNamespace(compute_capability=c) for c in ("9.0", "8.0")]
    look = functools.cache(library.local_cuda_architectures.__wrapped__)
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    pretend(monkeypatch)
    monkeypatch.setattr(library, "local_cuda_architectures", look)
    assert look() == ("sm_90a", "sm_80a")
    case = cases.Case("mixed", **KIMI)
    assert str(explain(case)) == f"jnp: {NO_SM_80}"
    for implementation in ("jnp", None):
        assert not custom_calls(cuda_text(case, implementation))
    operands = small.operands(k=1536, stacked=True, pages=2)
    for program in sorted(small.STACKED, key=str):
        assert not custom_calls(lowered_for_cuda(lambda *a, f=program: f(*a, "fp8"), *operands))
    for ask in (explain, cuda_text):
        with pytest.raises(NotImplementedError) as refusal:
            ask(case, "cuda")
        assert str(refusal.value) == f'implementation="cuda" cannot run: {NO_SM_80}'
    devices.pop()
    look.cache_clear()
    assert kernel_in(case) and explain(case, "cuda").implementation == "cuda"


def test_supported_gpu(monkeypatch):
    case = cases.Case("supported", **KIMI)
    pretend(monkeypatch, "sm_90a", "sm_90a")
    assert kernel_in(case) and explain(case).implementation == "cuda"
    assert explain(case, "jnp").implementation == "jnp"
    monkeypatch.setattr(library, "missing", lambda *_: "cuda-python is missing")
    with pytest.warns(UserWarning, match="runs without its kernel: cuda-python is missing"):
        assert not kernel_in(case)
    assert not kernel_in(case, "jnp") and "cuda-python is missing" in explain(case).reason
    assert not kernel_in(cases.Case("empty", **KIMI | dict(batch=0)))  # silent: it has lost nothing
    with monkeypatch.context() as slower:
        slower.setattr(variants, "front_jnp_is_faster", lambda *_: True)
        assert not kernel_in(case) and "faster" in explain(case).reason
    with pytest.raises(NotImplementedError, match="cuda-python is missing"):
        kernel_in(case, "cuda")


def test_where_the_jnp_form_is_faster(monkeypatch):
    """None takes the faster one; "cuda" is a command."""
    case = cases.Case("crossover", **KIMI)
    pretend(monkeypatch, "sm_90a", faster=True)
    assert not kernel_in(case) and kernel_in(case, "cuda")
    assert "faster" in explain(case).reason and explain(case, "cuda").implementation == "cuda"


def test_empty_batch_launches_nothing():
    case = cases.Case("empty", **KIMI | dict(batch=0))
    assert not kernel_in(case) and not kernel_in(case, "cuda")
    assert_same_front(cases.run(case), cases.run(case, implementation="jnp"))


def abstract_call(batch=2, heads=8, k=1280):
    """Arguments of a call, none of which need exist."""
    return dict(
        projected=small.shape(batch, k + 128 + heads),
        q_norm=small.shape(k),
        wq_b=small.shape(heads * 128, k),
        key_norm_weight=small.shape(128, dtype=small.F32),
        key_norm_bias=small.shape(128, dtype=small.F32),
        cache=small.shape(2, 64, 132, dtype=small.U8),
        slots=small.shape(batch, dtype=small.I32),
        key_offset=k,
        weight_offset=k + 128,
        eps=1e-6,
        key_eps=1e-6,
        cache_format="fp8",
    )


@pytest.mark.parametrize(
    ("local", "largest", "in_doubt"),  # rows that the grid has, and above which None does without
    [
        (("sm_90a",), 65535 * 128, 4096),
        (("sm_100a",), 65535 * 8, 8),
        (("sm_90a", "sm_103a"), 65535 * 8, 8),
        # For another machine: what the most capable one takes. Above, any that does not is enough.
        ((), 65535 * 128, 4096),
    ],
    ids=str,
)
def test_large_batches(monkeypatch, local, largest, in_doubt):
    """On machines with such GPUs, and lowered where there is none."""
    monkeypatch.setattr(library, "local_cuda_architectures", lambda: local)
    monkeypatch.setattr(library, "missing", lambda *_: None)

    def choice(batch, implementation=None):
        arguments = abstract_call(batch) | dict(implementation=implementation)
        if local:
            return dsa.explain(dsa.index_front, **arguments).implementation
        arrays, rest = small.arrays_and_rest(arguments)
        text = lowered_for_cuda(lambda arrays: dsa.index_front(**arrays, **rest), arrays)
        return "cuda" if custom_calls(text) else "jnp"

    assert (choice(in_doubt), choice(in_doubt + 1)) == ("cuda", "jnp")
    assert (choice(largest, "cuda"), choice(largest + 1)) == ("cuda", "jnp")
    with pytest.raises(NotImplementedError, match=f"at most {largest} rows, got {largest + 1}"):
        choice(largest + 1, "cuda")


def test_more_heads_than_a_grid_has_fall_back(monkeypatch):
    monkeypatch.setattr(library, "local_cuda_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(library, "missing", lambda *_: None)
    heads, k = 65536, 1280
    arguments = abstract_call(heads=heads)
    assert "65535 heads, got 65536" in str(dsa.explain(dsa.index_front, **arguments))
    with pytest.raises(NotImplementedError, match="65535 heads, got 65536"):
        dsa.explain(dsa.index_front, **arguments, implementation="cuda")
    arguments["projected"] = small.shape(2, k + 128 + heads + 1)
    assert "multiple of 8, got 66945" in str(dsa.explain(dsa.index_front, **arguments))


CPU_ONLY = """
import pathlib, sys
import jax, jax.numpy as jnp
def driver():
    return "libcuda.so" in pathlib.Path("/proc/self/maps").read_text()
jax.block_until_ready(jnp.ones(3) + 1)
before = driver()  # of JAX's own
import jax_dsa_front as dsa, small
args = *small.operands(k=1536, pages=4), jnp.arange(small.BATCH)
print(small.digest(jax.jit(small.step)(*args)))
print(driver() == before and "cuda.bindings" not in sys.modules)
projected, weights, cache, slots = args
static = dict(key_offset=1536, weight_offset=1664, eps=1e-6, key_eps=1e-6, cache_format="fp8")
print(dsa.explain(dsa.index_front, projected, *weights, cache, slots, **static))
try:
    small.step(*args, implementation="cuda")
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.gpu
def test_jax_platforms_cpu_on_a_machine_with_gpus(tmp_path):
    """The bytes of the CPU, without the driver; asked, it says that JAX has no CUDA device."""
    output = run_python(CPU_ONLY, cwd=tmp_path, JAX_PLATFORMS="cpu")
    digest, alone, explanation, refusal = output.strip().split("\n")
    with jax.default_device(jax.devices("cpu")[0]):
        args = *small.operands(k=1536, pages=4), jnp.arange(small.BATCH)
        assert digest == small.digest(jax.jit(small.step)(*args))
    assert alone == "True", "the package has loaded the driver"
    reason = "JAX sees no CUDA device in this process"
    assert explanation == f"jnp: on cpu it is the only one ({reason})"
    assert refusal.startswith(f'implementation="cuda" cannot run on cpu: {reason}; ')

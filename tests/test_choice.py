"""Which implementation runs: the platform, the shapes, and the GPUs of this machine decide.

Most machines are simulated, by what JAX would say about their devices. The tests marked `gpu` are
of processes whose GPUs are hidden from JAX, and of a second GPU that looks like an older one.
"""

import ast
import functools
import json
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
from jax_dsa_front import _runtime, _variants
from processes import TESTS, run_python
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
    with pytest.raises(NotImplementedError, match=re.escape(_runtime.missing() or "CUDA")):
        cases.run(case, implementation="cuda")


def kernel_in(case, implementation=None):
    return len(custom_calls(cuda_text(case, implementation))) == 1


def explain(case, implementation=None):
    operands = cases.make(case)
    return dsa.explain(*operands.args, **operands.static, implementation=implementation)


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
    monkeypatch.setattr(_runtime, "local_cuda_architectures", lambda: architectures)
    monkeypatch.setattr(_runtime, "missing", lambda *_: None)
    monkeypatch.setattr(_variants, "jnp_is_faster", lambda *_: faster)


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
    look = functools.cache(_runtime.local_cuda_architectures.__wrapped__)
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    pretend(monkeypatch)
    monkeypatch.setattr(_runtime, "local_cuda_architectures", look)
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
    monkeypatch.setattr(_runtime, "missing", lambda *_: "cuda-python is missing")
    with pytest.warns(UserWarning, match="runs without its kernel: cuda-python is missing"):
        assert not kernel_in(case)
    assert not kernel_in(case, "jnp") and "cuda-python is missing" in explain(case).reason
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
    monkeypatch.setattr(_runtime, "local_cuda_architectures", lambda: local)
    monkeypatch.setattr(_runtime, "missing", lambda *_: None)

    def choice(batch, implementation=None):
        arguments = abstract_call(batch) | dict(implementation=implementation)
        if local:
            return dsa.explain(**arguments).implementation
        arrays, rest = small.arrays_and_rest(arguments)
        text = lowered_for_cuda(lambda arrays: dsa.index_front(**arrays, **rest), arrays)
        return "cuda" if custom_calls(text) else "jnp"

    assert (choice(in_doubt), choice(in_doubt + 1)) == ("cuda", "jnp")
    assert (choice(largest, "cuda"), choice(largest + 1)) == ("cuda", "jnp")
    with pytest.raises(NotImplementedError, match=f"at most {largest} rows, got {largest + 1}"):
        choice(largest + 1, "cuda")


def test_more_heads_than_a_grid_has_fall_back(monkeypatch):
    monkeypatch.setattr(_runtime, "local_cuda_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(_runtime, "missing", lambda *_: None)
    heads, k = 65536, 1280
    arguments = abstract_call(heads=heads)
    assert "65535 heads, got 65536" in str(dsa.explain(**arguments))
    with pytest.raises(NotImplementedError, match="65535 heads, got 65536"):
        dsa.explain(**arguments, implementation="cuda")
    arguments["projected"] = small.shape(2, k + 128 + heads + 1)
    assert "multiple of 8, got 66945" in str(dsa.explain(**arguments))


KERNELS_OF_A_CALL = """
import ctypes, json, sys
from fake_driver import FakeDriver
from jax_dsa_front import _loader
benchmarks, per_wave, calls = sys.argv[1:]
sys.path.insert(0, benchmarks)
from bare import FrontParams, launch_front
launched, orders = [], set()  # handles, offsets of the parameters
@ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
def launch(config, handle, arguments, extra):
    launched.append(handle)
    addresses, start = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)), 0
    while addresses[start] != ctypes.addressof(parameters):  # a tensor map
        start += 1
    count = len(FrontParams._fields_)
    orders.add(tuple(addresses[start + i] - addresses[start] for i in range(count)))
    return 0
integers, pointers = [ctypes.c_int] * 2, [ctypes.c_void_p] * 5
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *integers, *pointers, *integers, *integers)
def encode(*_):
    return 0
functions = {b"cuLaunchKernelEx": launch, b"cuTensorMapEncodeTiled": encode}
addresses = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in functions.items()}
FakeDriver(clusters_per_wave=int(per_wave), entry_points=addresses).install()
def kernels_of(k, batch, heads):
    global parameters
    launched.clear()
    parameters = FrontParams(batch=batch)
    launch_front(k, parameters, heads, heads * 128, 0)
    names = {1 + library: name for name, library in _loader._libraries.items()}
    return [names[handle].removeprefix(f"index_front_sm_90a_k{k}_") for handle in launched]
kernels = [kernels_of(*call) for call in json.loads(calls)]
fields = [getattr(FrontParams, name) for name, _ in FrontParams._fields_]
assert orders == {tuple(field.offset for field in fields)}, orders
sizes = {name: field.size for (name, _), field in zip(FrontParams._fields_, fields)}
print(json.dumps([kernels, sizes]))
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
    source = ast.parse((TESTS.parent / "jax_dsa_front/kernels/common.py").read_text())
    (own,) = (n for n in source.body if getattr(n, "name", None) == "FrontArguments")
    members = [n for n in own.body if isinstance(n, ast.AnnAssign)]
    own = {n.target.id: int(n.annotation.id[-2:]) // 8 for n in members}
    header = (TESTS.parent / "csrc_glue/front_params.h").read_text()
    struct = header.split("struct FrontParams {")[1].split("\n};")[0]
    assert re.findall(r"^ +[\w *]+[ *](\w+);", struct, re.M) == list(own)
    _, parameters = launches([(1280, batch, 8) for batch in (1, 32, 300)], tmp_path)
    assert list(own.items()) == list(parameters.items())


def test_kernels_of_a_call(tmp_path):
    """docs/performance.md, at its end: 32 heads, and grids around what an H200 holds at once."""
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
static = dict(key_offset=1536, weight_offset=1664, eps=1e-6, key_eps=1e-6)
print(dsa.explain(projected, *weights, cache, slots, **static))
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

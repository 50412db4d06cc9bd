"""Arrays that JAX would misread are refused by name, in every array argument of every function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa_front as dsa
import small
from compare import assert_equal
from filled_caches import filled
from processes import run_python

K, B = 256, small.BATCH


def front_call():
    projected, weights, cache = small.operands(pages=4, stacked=True)
    names = ("q_norm", "wq_b", "key_norm_weight", "key_norm_bias")
    arrays = dict(zip(names, weights, strict=True), projected=projected, cache=cache)
    arrays |= dict(key=projected, head_weights=projected.astype(jnp.float32))
    arrays |= dict(slots=np.arange(B), layer=np.array(1), head_start=np.array(2))
    static = dict(key_offset=K, weight_offset=K, num_heads=10, eps=1e-6, key_eps=1e-6)
    arrays["head_weights"] = arrays["head_weights"][:, : K + 10]
    return dsa.index_front, arrays, static | dict(cache_format="fp8")


def scores_call():
    codes, scale, weights, cache = filled("mxfp4", batch=4)
    arrays = dict(query=codes, query_scale=scale, weights=weights, cache=cache)
    arrays |= dict(block_table=np.array([[1, 2], [3, 4]]), context_lens=np.array([5, 32, 0, 9]))
    return dsa.index_scores, arrays | dict(layer=np.array(1)), dict(cache_format="mxfp4")


def read_call():
    cache = filled("fp8")[-1]
    arrays = dict(cache=cache, slots=np.array([[3], [99]]), layer=np.array(1))
    return dsa.read_keys, arrays, dict(cache_format="fp8")


def slots_call():
    arrays = dict(block_table=np.array([[1, 2], [3, 4]]), positions=np.array([[3, 9], [30, -1]]))
    return dsa.slots_of, arrays, dict(page_size=16)


CALLS = [front_call, scores_call, read_call, slots_call]
WIDE = {"i": np.int64, "u": np.uint64, "f": np.float64}


def arguments(which=lambda dtype: True):
    """(call, name) of every array argument whose dtype is one of these."""
    return [
        pytest.param(make, name, id=f"{make()[0].__name__}-{name}")
        for make in CALLS
        for name, array in make()[1].items()
        if which(np.asarray(array).dtype)
    ]


def has_byte_order(dtype):
    return dtype.itemsize > 1 and dtype.kind != "V"  # bfloat16 has none to NumPy


def can_be_wide(dtype):
    return dtype.kind in WIDE  # bfloat16 and FP8 are no numbers of NumPy's


def call(make, name=None, change=None):
    function, arrays, static = make()
    if name is not None:
        arrays[name] = change(np.asarray(arrays[name]))
    return function(**arrays, **static)


@pytest.mark.parametrize("make", CALLS)
def test_the_calls_themselves_are_good(make):
    """With JAX's fast path warm, where it takes the bytes of NumPy arrays as they lie."""
    for _ in range(3):
        jax.block_until_ready(call(make))


@pytest.mark.parametrize(("make", "name"), arguments())
def test_a_mask_would_be_dropped(make, name):
    def masked(array):
        return np.ma.masked_array(array, mask=np.zeros(array.shape, bool))

    with pytest.raises(TypeError, match=rf"^{name} must be an array without a mask.*\.filled"):
        call(make, name, masked)


@pytest.mark.parametrize(("make", "name"), arguments(has_byte_order))
def test_foreign_byte_order_would_be_misread(make, name):
    """Refused; the conversion that the message names is right."""

    def swapped(array):
        return array.astype(array.dtype.newbyteorder(">"))

    call(make)  # warms the fast path
    with pytest.raises(TypeError, match=rf"^{name} must have the byte order of this.*newbyteorder"):
        call(make, name, swapped)
    jax.block_until_ready(call(make, name, lambda a: swapped(a).astype(a.dtype.newbyteorder("="))))


@pytest.mark.parametrize(("make", "name"), arguments(can_be_wide))
def test_64_bit_arrays_of_another_mode_would_be_cut(make, name):
    """Made under jax.enable_x64 and used outside: JAX keeps their lower halves."""
    array = np.asarray(make()[1][name])
    with jax.enable_x64(True):
        wide = jnp.asarray(array.astype(WIDE[array.dtype.kind]))
    assert wide.dtype.itemsize == 8
    with pytest.raises(TypeError, match=rf"^{name} must have a dtype that JAX has in its present"):
        call(make, name, lambda _: wide)


def test_what_was_cut_before():
    """Slot 2**32 + 5 named slot 5, layer 2**32 + 1 layer 1, table entry 2**32 + 3 page 3."""
    projected, weights, cache = small.operands(pages=4, stacked=True)
    for slots, layer in (([2**32 + 5] * B, 1), ([5] * B, 2**32 + 1)):
        with jax.enable_x64(True):
            wide = jnp.array(slots), jnp.array(layer)
        with pytest.raises(TypeError, match=r"^(slots|layer) must .*jax_enable_x64"):
            small.step(projected, weights, cache, *wide)
        # as NumPy's: nothing is stored, in no layer
        narrow = small.step(projected, weights, cache, np.array(slots), np.array(layer))
        assert_equal(narrow.cache, cache, "cache")


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_context_lens_past_32_bits(dtype):
    """Clamped to the table, and to nothing below zero."""
    codes, scale, weights, cache = filled("mxfp4", batch=4)
    lens = [2**63 - 1, 2**31, 2**32 + 1, -(2**31) - 1]
    if dtype == np.int32:
        lens = [2**31 - 1, 9, 8, -(2**31)]
    table = np.array([[3]] * 4)
    cache = cache[:, :, :8]
    got = dsa.index_scores(
        codes, scale, weights, cache, table, np.array(lens, dtype), 0, cache_format="mxfp4"
    )
    assert (~np.isneginf(np.asarray(got))).sum(axis=1).tolist() == [8, 8, 8, 0]


@pytest.mark.parametrize("name", ["BF16_BF16_BF16", "F16_F16_F16", "TF32_TF32_F32", "highest"])
@pytest.mark.parametrize("make", [front_call, scores_call])
def test_default_matmul_precision_changes_nothing(make, name):
    def digest():
        function, arrays, static = make()
        return small.digest(jax.jit(functools.partial(function, **static))(**arrays))

    want = digest()
    with jax.default_matmul_precision(name):
        jax.clear_caches()
        assert digest() == want


@pytest.mark.parametrize(
    ("make", "name"), [(scores_call, "query"), (read_call, "slots"), (slots_call, "positions")]
)
def test_operands_on_explicit_mesh_axes_are_refused(make, name):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    function = make()[0].__name__

    def split(array):
        return jax.device_put(jnp.asarray(array), sharding)

    with pytest.raises(NotImplementedError, match=rf"^{function} does not part.*@x.*jax.shard_map"):
        call(make, name, split)
    if make is scores_call:
        operator, arrays, static = make()
        arrays[name] = split(arrays[name])
        with pytest.raises(NotImplementedError, match=rf"^{function} does not part.*@x"):
            dsa.explain(operator, **arrays, **static)


@pytest.mark.parametrize("make", CALLS)
def test_under_jit_int64_numpy_is_int32(make):
    """What NumPy's int64 becomes eagerly is what JAX makes of small numbers itself."""
    function, arrays, static = make()
    want = function(**arrays, **static)
    got = jax.jit(functools.partial(function, **static))(**arrays)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(left, np.float32), np.asarray(right, np.float32), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("make", CALLS)
def test_jax_may_be_strict_about_ranks(make):
    with jax.numpy_rank_promotion("raise"):
        jax.clear_caches()
        jax.block_until_ready(call(make))


MESHES = """
import sys
import jax, jax.numpy as jnp
import test_rules
from jax.sharding import AxisType
make = next(m for m in test_rules.CALLS if m.__name__ == sys.argv[1])
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    test_rules.call(make)
jax.block_until_ready(test_rules.call(make))
print("both")
"""


@pytest.mark.parametrize("make", CALLS)
def test_a_call_inside_a_mesh_leaves_those_outside_alone(make, tmp_path):
    """The same call of the same operands, first inside an explicit mesh of two devices."""
    environment = dict(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert run_python(MESHES, make.__name__, cwd=tmp_path, **environment) == "both\n"

"""One equation, one custom call: tracing, transforms, and what the lowerings make of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jax_dsa_front as dsa
import small
from cases import KIMI
from jax_dsa_front._runtime import variants
from programs import TARGET, cuda_text, custom_calls, lowered_for_cuda
from small import BF16, F32, I32, U8, shape

ATTRIBUTES = {
    "key_offset", "weight_offset", "eps", "key_eps", "cache_format", "weight_scale", "num_heads",
    "head_start", "layer", "traced",
}  # fmt: skip


@pytest.mark.parametrize("case", cases.GRID[::4], ids=str)
def test_shapes_are_known_without_values(case):
    """Abstract evaluation gives the documented shapes and dtypes, through a sample of the grid."""
    front = jax.eval_shape(cases.function(case), *cases.arrays(case, cases.make(case)))
    rows = case.batch, case.heads
    if case.fmt == "mxfp4":
        assert (front.query.shape, front.query.dtype) == ((*rows, 64), jnp.uint8)
        assert (front.query_scale.shape, front.query_scale.dtype) == (rows, jnp.uint32)
    else:
        assert (front.query.shape, front.query.dtype) == ((*rows, 128), jnp.float8_e4m3fn)
        assert front.query_scale is None
    assert (front.weights.shape, str(front.weights.dtype)) == (rows, case.weights_dtype)
    lead = (case.layers,) if "cache" in case.stacked else ()
    assert front.cache.shape == (*lead, case.pages, case.page_size, cases.ROW[case.fmt])


def test_shapes_of_operands_that_no_machine_could_hold():
    """16 TB of cache: nothing may be allocated to trace, or to explain."""
    arguments = dict(
        projected=shape(4096, 1696), q_norm=shape(61, 1536), wq_b=shape(61, 4096, 1536),
        key_norm_weight=shape(61, 128, dtype=F32), key_norm_bias=shape(61, 128, dtype=F32),
        cache=shape(61, 2**25, 64, 132, dtype=U8), slots=shape(4096, dtype=I32),
        layer=shape(dtype=I32), key_offset=1536, weight_offset=1664, eps=1e-6, key_eps=1e-6,
        cache_format="fp8",
    )  # fmt: skip
    assert small.trace(dsa.index_front, arguments).cache.shape == (61, 2**25, 64, 132)
    assert dsa.explain(dsa.index_front, **arguments).implementation == "jnp"


def test_jaxpr_is_one_short_equation():
    case = cases.Case("jaxpr", stacked=cases.ALL, layer=1, traced_layer=True)
    jaxpr = jax.make_jaxpr(cases.function(case))(*cases.arrays(case, cases.make(case)))
    (equation,) = jaxpr.eqns
    assert equation.primitive.name == "index_front"
    assert len(str(equation)) < 600 and "fp8" in str(equation)


def loss(projected, weights, cache):
    return small.step(projected, weights, cache, jnp.arange(small.BATCH)).weights.astype(F32).sum()


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, jax.jacfwd, jax.jacrev])
def test_differentiation_is_refused(transform, jitted):
    fn = transform(jax.jit(loss) if jitted else loss)
    with pytest.raises(NotImplementedError, match=r"index_front .*inference.*stop_gradient"):
        fn(*small.operands(pages=1))


def test_differentiating_around_it_works():
    """The way out that the message names."""
    projected, weights, cache = small.operands(pages=1)

    def around(x):
        stopped = lax.stop_gradient(x.astype(BF16))
        return loss(stopped, weights, cache) * (x * x).sum()

    x = projected.astype(F32)
    value = loss(projected, weights, cache)
    np.testing.assert_allclose(jax.grad(around)(x), 2 * value * x, rtol=1e-5)


@pytest.mark.parametrize("axes", [(0, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)])
def test_vmap_is_refused(axes):
    operands = *small.operands(pages=1), jnp.arange(small.BATCH)
    mapped = [
        a if axis is None else jax.tree.map(lambda x: jnp.stack([x, x]), a)
        for a, axis in zip(operands, axes, strict=True)
    ]
    for fn in (small.step, jax.jit(small.step)):
        with pytest.raises(NotImplementedError, match=r"index_front .*vmap.*fold .*batch"):
            jax.vmap(fn, in_axes=axes)(*mapped)


@pytest.mark.parametrize(
    "case",
    [
        *(cases.Case(f"plain-{fmt}", fmt, **KIMI) for fmt in cases.FORMATS),
        cases.Case("stacked", stacked=cases.ALL, layer=2, traced_layer=True, **KIMI),
        cases.Case("static-layer", "mxfp4", stacked=cases.ALL, layer=2, **KIMI),
        cases.Case("shard", num_heads=64, head_start=32, traced_head_start=True, **KIMI),
        cases.Case("own", own_key=True, own_weights="float32", weights_dtype="float32", **KIMI),
    ],
    ids=str,
)
def test_cuda_program_is_the_call_and_nothing_else(case):
    """Operands go in whole and as they are; the cache is aliased; attributes hold plain scalars."""
    text = cuda_text(case)
    (call,) = custom_calls(text)
    shield = "stablehlo.optimization_barrier"
    operations = re.findall(r"= \"?(stablehlo\.\w+|call)", text)
    assert operations == [shield, "stablehlo.custom_call", shield]
    alias = r"output_operand_alias<output_tuple_indices = \[2\], operand_index = 5, operand_tuple"
    assert len(re.findall(alias, call)) == call.count("output_operand_alias<") == 1
    typed = call.split("mhlo.backend_config = {")[1].split("}")[0]
    attributes = dict(re.findall(r"(\w+) = ([^ ]+) : [if]32(?:, |$)", typed))
    assert set(attributes) == ATTRIBUTES
    expected = dict(
        cache_format=cases.FORMATS.index(case.fmt),
        num_heads=case.num_heads or case.heads,
        layer=0 if case.traced_layer else case.layer or 0,
        head_start=0 if case.traced_head_start else case.head_start,
        traced=case.traced_layer + 2 * case.traced_head_start,
    )
    assert {name: int(attributes[name]) for name in expected} == expected
    scale = np.float32((expected["num_heads"] * 128) ** -0.5)
    assert np.float32(attributes["weight_scale"]) == scale
    before, behind = re.findall(rf"(%\d+):\d+ = {shield} (.*?) : ", text)
    operands = before[1].split(", ")
    shielded = [f"{before[0]}#{i}" for i in range(len(operands))]
    passed = call.split(f"@{TARGET}(")[1].split(")")[0].split(", ")
    assert passed == [*shielded[:2], passed[2], *shielded[2:]]
    assert passed[2].startswith("%arg"), passed  # wq_b: no barrier, and no slice either
    results = call.split(" = ")[0].strip().split(":")
    assert behind[1] == ", ".join(f"{results[0]}#{i}" for i in range(int(results[1]) - 1))
    assert len(passed) == 9 + case.traced_layer + case.traced_head_start
    main = next(line for line in text.splitlines() if "func.func public @main" in line)
    cache = next(a for a in re.findall(r"%arg\d+: tensor<[^>]*xui8> {[^}]*}", main))
    assert "tf.aliasing_output = " in cache and cache.startswith(operands[4] + ":")


def test_cuda_scan_over_layers_passes_the_stacks_whole():
    """No slice of weights or cache in front of the call, inside the loop body too."""
    projected, weights, cache = small.operands(stacked=True, k=1536, pages=8)

    def layers(projected, weights, cache):
        def body(cache, layer):
            front = small.step(projected, weights, cache, jnp.arange(small.BATCH), layer)
            return front.cache, front.query

        return lax.scan(body, cache, jnp.arange(small.LAYERS))

    text = lowered_for_cuda(layers, projected, weights, cache, donate=2)
    (call,) = custom_calls(text)
    for stack in ("3x1024x1536xbf16", "3x8x64x132xui8", "3x1536xbf16", "3x128xf32"):
        assert f"tensor<{stack}>" in call.split(" : (")[1].split(") -> ")[0]
    sliced = re.findall(r"stablehlo\.(?:dynamic_)?slice.* : \(?tensor<(\S+)>", text)
    assert not [t for t in sliced if t.startswith(("3x1024", "3x8x64"))], sliced


def test_program_names_no_variant():
    """Old programs must run on new kernels."""
    text = cuda_text(cases.Case("names", **KIMI))
    assert custom_calls(text) and variants.VARIANTS
    assert not [variant.name for variant in variants.VARIANTS if variant.name in text]
    assert "sm_" not in text and "cubin" not in text


def test_operands_on_explicit_mesh_axes_are_refused():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    projected, weights, cache = small.operands(pages=2)
    sharded = jax.device_put(projected, jax.sharding.NamedSharding(mesh, jax.P("x")))
    with pytest.raises(NotImplementedError, match=r"bfloat16\[4@x,.*jax\.shard_map"):
        jax.eval_shape(small.step, sharded, weights, cache, jnp.arange(small.BATCH))

"""Bad arguments are refused before anything runs, each by a sentence that names the argument."""
# ruff: noqa: E501  (one refusal a line)

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsa_front as dsa
import small
from small import F32, I32, U8, shape, trace

K, HEADS, BATCH, LAYERS = 256, small.HEADS, small.BATCH, small.LAYERS


UNSTACKED = dict(
    projected=shape(BATCH, K + 128 + HEADS),
    q_norm=shape(K),
    wq_b=shape(HEADS * 128, K),
    key_norm_weight=shape(128, dtype=F32),
    key_norm_bias=shape(128, dtype=F32),
    cache=shape(4, 64, 132, dtype=U8),
    slots=shape(BATCH, dtype=I32),
    key_offset=K,
    weight_offset=K + 128,
    eps=1e-6,
    key_eps=1e-6,
    cache_format="fp8",
)
STACKED = UNSTACKED | dict(
    wq_b=shape(LAYERS, HEADS * 128, K), cache=shape(LAYERS, 4, 64, 132, dtype=U8), layer=0
)


# (what is wrong, base, changes, exception, pattern). The pattern holds the argument, the rule and
# what was got, so that a message which names the wrong argument fails.
BAD = [
    # Rank
    ("projected 1-D", UNSTACKED, dict(projected=shape(K)), ValueError, r"projected .*\(B, P\).*got \(256,\)"),
    ("q_norm 3-D", UNSTACKED, dict(q_norm=shape(1, 1, K)), ValueError, r"q_norm .*\(K,\) or \(L, K\).*got"),
    ("wq_b 1-D", UNSTACKED, dict(wq_b=shape(K)), ValueError, r"wq_b .*\(H\*128, K\).*got \(256,\)"),
    ("key_norm_weight 0-D", UNSTACKED, dict(key_norm_weight=shape(dtype=F32)), ValueError, r"key_norm_weight .*\(128,\).*got \(\)"),
    ("key_norm_bias 3-D", UNSTACKED, dict(key_norm_bias=shape(1, 1, 128, dtype=F32)), ValueError, r"key_norm_bias .*got \(1, 1, 128\)"),
    ("cache 2-D", UNSTACKED, dict(cache=shape(4, 64 * 132, dtype=U8)), ValueError, r"cache .*\(pages, page_size, 132\).*got"),
    ("cache with a unit axis", UNSTACKED, dict(cache=shape(1, 4, 64, 1, 132, dtype=U8)), ValueError, r"cache .*got \(1, 4, 64, 1, 132\)"),
    ("slots 2-D", UNSTACKED, dict(slots=shape(BATCH, 1, dtype=I32)), ValueError, r"slots .*\(B,\).*got \(4, 1\)"),
    ("key 3-D", UNSTACKED, dict(key=shape(BATCH, 1, 128), key_offset=0), ValueError, r"key .*got \(4, 1, 128\)"),
    ("head_weights 1-D", UNSTACKED, dict(head_weights=shape(HEADS), weight_offset=0), ValueError, r"head_weights .*got \(8,\)"),
    # Dtype
    ("projected f32", UNSTACKED, dict(projected=shape(BATCH, K + 136, dtype=F32)), TypeError, r"projected .*bfloat16.*got float32"),
    ("q_norm f32", UNSTACKED, dict(q_norm=shape(K, dtype=F32)), TypeError, r"q_norm .*bfloat16.*got float32"),
    ("wq_b f16", UNSTACKED, dict(wq_b=shape(HEADS * 128, K, dtype=jnp.float16)), TypeError, r"wq_b .*bfloat16.*got float16"),
    ("key_norm_weight bf16", UNSTACKED, dict(key_norm_weight=shape(128)), TypeError, r"key_norm_weight .*float32.*got bfloat16"),
    ("key_norm_bias bf16", UNSTACKED, dict(key_norm_bias=shape(128)), TypeError, r"key_norm_bias .*float32.*got bfloat16"),
    ("cache fp8", UNSTACKED, dict(cache=shape(4, 64, 132, dtype=jnp.float8_e4m3fn)), TypeError, r"cache .*uint8.*got float8_e4m3fn"),
    ("slots u32", UNSTACKED, dict(slots=shape(BATCH, dtype=jnp.uint32)), TypeError, r"slots .*int32 or int64.*got uint32"),
    ("slots f32", UNSTACKED, dict(slots=shape(BATCH, dtype=F32)), TypeError, r"slots .*int32 or int64.*got float32"),
    ("key f32", UNSTACKED, dict(key=shape(BATCH, 128, dtype=F32), key_offset=0), TypeError, r"key .*bfloat16.*got float32"),
    ("head_weights f16", UNSTACKED, dict(head_weights=shape(BATCH, HEADS, dtype=jnp.float16), weight_offset=0), TypeError, r"head_weights .*bfloat16 or float32.*got float16"),
    ("a list for slots", UNSTACKED, dict(slots=[0] * BATCH), TypeError, r"slots .*array.*got list"),
    # Widths and counts
    ("projected narrower than K", UNSTACKED, dict(projected=shape(BATCH, K - 8), key=shape(BATCH, 128), key_offset=0, head_weights=shape(BATCH, HEADS), weight_offset=0), ValueError, r"projected .*256.*got 248"),
    ("q_norm of another K", UNSTACKED, dict(q_norm=shape(K + 128)), ValueError, r"q_norm .*256.*got \(384,\)"),
    ("key_norm_weight 64", UNSTACKED, dict(key_norm_weight=shape(64, dtype=F32)), ValueError, r"key_norm_weight .*128.*got \(64,\)"),
    ("key_norm_bias 129", UNSTACKED, dict(key_norm_bias=shape(129, dtype=F32)), ValueError, r"key_norm_bias .*128.*got \(129,\)"),
    ("K no multiple of 128", UNSTACKED, dict(wq_b=shape(HEADS * 128, 200), q_norm=shape(200)), ValueError, r"wq_b.*multiple of 128.*got 200"),
    ("K of zero", UNSTACKED, dict(wq_b=shape(HEADS * 128, 0), q_norm=shape(0)), ValueError, r"wq_b.*multiple of 128.*got 0"),
    ("rows no multiple of 128", UNSTACKED, dict(wq_b=shape(HEADS * 128 + 64, K)), ValueError, r"wq_b .*128.*got 1088"),
    ("no head", UNSTACKED, dict(wq_b=shape(0, K)), ValueError, r"wq_b .*128.*got 0"),
    ("slots of another batch", UNSTACKED, dict(slots=shape(BATCH + 1, dtype=I32)), ValueError, r"slots .*\(4\).*got \(5,\)"),
    ("key of another batch", UNSTACKED, dict(key=shape(3, 128), key_offset=0), ValueError, r"key .*\(4\).*got \(3, 128\)"),
    ("head_weights of another batch", UNSTACKED, dict(head_weights=shape(1, HEADS), weight_offset=0), ValueError, r"head_weights .*\(4\).*got \(1, 8\)"),
    ("fp8 cache row of 128", UNSTACKED, dict(cache=shape(4, 64, 128, dtype=U8)), ValueError, r"cache .*132.*got \(4, 64, 128\)"),
    ("mxfp4 with a row of 132", UNSTACKED, dict(cache_format="mxfp4"), ValueError, r"cache .*68.*mxfp4.*got \(4, 64, 132\)"),
    ("mxfp8 with a row of 68", UNSTACKED, dict(cache_format="mxfp8", cache=shape(4, 64, 68, dtype=U8)), ValueError, r"cache .*132.*mxfp8.*got \(4, 64, 68\)"),
    ("page size of zero", UNSTACKED, dict(cache=shape(4, 0, 132, dtype=U8)), ValueError, r"cache .*got \(4, 0, 132\)"),
    # Offsets
    ("key past P", UNSTACKED, dict(key_offset=K + 128), ValueError, r"key_offset \+ 128 .*projected \(no key is given\), 392.*got 384 \+ 128"),
    ("key_offset negative", UNSTACKED, dict(key_offset=-1), ValueError, r"key_offset .*got -1"),
    ("key_offset float", UNSTACKED, dict(key_offset=256.0), TypeError, r"key_offset .*int, known while tracing.*got float"),
    ("key_offset bool", UNSTACKED, dict(key_offset=True), TypeError, r"key_offset .*int.*got bool"),
    ("key past its own array", UNSTACKED, dict(key=shape(BATCH, 130), key_offset=3), ValueError, r"key_offset \+ 128 .*key, 130.*got 3 \+ 128"),
    ("weights past P", UNSTACKED, dict(weight_offset=K + 129), ValueError, r"weight_offset .*projected \(no head_weights is given\), 392.*got 385 \+ 8"),
    ("weight_offset negative", UNSTACKED, dict(weight_offset=-8), ValueError, r"weight_offset .*got -8"),
    # Columns of projected that no array of their own replaces
    ("key in the latent", UNSTACKED, dict(key_offset=K - 1), ValueError, r"key_offset and weight_offset .*q_a in 0\.\.255 and key in 255\.\.382.*pass key=projected"),
    ("weights in the latent", UNSTACKED, dict(weight_offset=0), ValueError, r"weight_offset .*head_weights in 0\.\.7 and q_a in 0\.\.255.*pass head_weights=projected"),
    ("weights in the key", UNSTACKED, dict(weight_offset=K + 127), ValueError, r"weight_offset .*key in 256\.\.383 and head_weights in 383\.\.390.*pass key=projected"),
    ("a later shard's weights in the key", UNSTACKED, dict(weight_offset=K - 8, num_heads=16, head_start=8), ValueError, r"weight_offset .*(key in 256|head_weights in 256).*=projected"),
    ("weights past their own array", UNSTACKED, dict(head_weights=shape(BATCH, 8), weight_offset=1), ValueError, r"weight_offset .*head_weights, 8.*got 1 \+ 8"),
    # What newcomers pass
    ("cache as PyTorch kernels view it", UNSTACKED, dict(cache=shape(4, 64, 1, 132, dtype=U8), layer=1), ValueError, r"cache .*\(pages, page_size, 1, R\).*reshaped to \(pages, page_size, R\), got \(4, 64, 1, 132\)"),
    ("the same without a layer", UNSTACKED, dict(cache=shape(4, 64, 1, 132, dtype=U8)), ValueError, r"cache .*\(pages, page_size, 1, R\).*got \(4, 64, 1, 132\)"),
    ("wq_b by heads, beside a stack", STACKED, dict(wq_b=shape(HEADS, 128, K)), ValueError, r"stacked .*wq_b with L = 8.*one axis more than a layer"),
    ("projected with a unit axis", UNSTACKED, dict(projected=shape(BATCH, 1, K + 136)), ValueError, r"projected .*\(B, P\), got \(4, 1, 392\): fold .*into B"),
    ("dtype with a way out", UNSTACKED, dict(projected=shape(BATCH, K + 136, dtype=F32)), TypeError, r"projected .*got float32: convert it with \.astype\(jnp\.bfloat16\)"),
    ("wq_b of a checkpoint in FP8", UNSTACKED, dict(wq_b=shape(HEADS * 128, K, dtype=jnp.float8_e4m3fn)), TypeError, r"wq_b .*got float8_e4m3fn: .*without their scales"),
    ("slots a mask", UNSTACKED, dict(slots=shape(BATCH, dtype=bool)), TypeError, r"slots .*int32 or int64, got bool(\n|$)"),
    ("bfloat16 as np.load reads it", UNSTACKED, dict(q_norm=np.zeros(K, "V2")), TypeError, r"q_norm .*void16: .*\.view\(jnp\.bfloat16\)"),
    # Layers
    ("layer missing", STACKED, dict(layer=None), ValueError, r"layer is required .*wq_b, cache.*L = 3.*got None"),
    ("wq_b with an axis of heads", UNSTACKED, dict(wq_b=shape(HEADS, 128, K)), ValueError, r"layer is required .*wq_b .*one layer, reshape to wq_b \(H\*128, K\)"),
    ("wq_b transposed", UNSTACKED, dict(wq_b=shape(K, HEADS * 128)), ValueError, r"projected .*wq_b is \(H\*128, K\) with K = 1024, got 392 and wq_b \(256, 1024\)"),
    ("layer superfluous", UNSTACKED, dict(layer=0), ValueError, r"layer .*stacked.*got 0"),
    ("layer past the end", STACKED, dict(layer=LAYERS), ValueError, r"layer .*2.*L = 3.*got 3"),
    ("layer negative", STACKED, dict(layer=-1), ValueError, r"layer .*got -1"),
    ("layer float", STACKED, dict(layer=1.0), TypeError, r"layer .*int.*got float"),
    ("layer a float array", STACKED, dict(layer=shape(dtype=F32)), TypeError, r"layer .*integer.*got float32"),
    ("layer a bool", STACKED, dict(layer=True), TypeError, r"layer .*int or an integer scalar.*got bool"),
    ("layer a vector", STACKED, dict(layer=shape(1, dtype=I32)), ValueError, r"layer .*scalar.*got .*\(1,\)"),
    ("stacks of different length", STACKED, dict(q_norm=shape(LAYERS + 1, K)), ValueError, r"stacked .*q_norm with L = 4.*wq_b with L = 3"),
    ("stacks of no layer", STACKED, dict(wq_b=shape(0, HEADS * 128, K), cache=shape(0, 4, 64, 132, dtype=U8)), ValueError, r"stacked .*L = 0"),
    # Head shards
    ("fewer heads than here", UNSTACKED, dict(num_heads=HEADS - 1), ValueError, r"num_heads .*8.*wq_b, H = 8.*got 7"),
    ("head_start alone", UNSTACKED, dict(head_start=3), ValueError, r"head_start .*num_heads.*is needed.*got 3"),
    ("traced head_start alone", UNSTACKED, dict(head_start=shape(dtype=I32)), ValueError, r"head_start .*num_heads.*is needed.*got an array"),
    ("num_heads too many", UNSTACKED, dict(num_heads=2**24), ValueError, r"num_heads .*16777215.*got 16777216"),
    ("page_size too large", UNSTACKED, dict(cache=shape(1, 2**25 + 1, 132, dtype=U8)), ValueError, r"cache .*33554432.*got \(1, 33554433, 132\)"),
    ("pages too many", UNSTACKED, dict(cache=shape(2**31 - 1, 1, 132, dtype=U8)), ValueError, r"cache .*2147483646.*got \(2147483647, 1, 132\)"),
    ("slots past int32", UNSTACKED, dict(cache=shape(2**26, 64, 132, dtype=U8), slots=np.array([2**31, 0, 1, 2])), ValueError, r"slots .*2\*\*31.*jax_enable_x64.*got"),
    ("num_heads float", UNSTACKED, dict(num_heads=8.0), TypeError, r"num_heads .*int.*got float"),
    ("head_start past the model", UNSTACKED, dict(num_heads=16, head_start=9), ValueError, r"head_start .*16 - 8.*got 9"),
    ("head_start negative", UNSTACKED, dict(num_heads=16, head_start=-8), ValueError, r"head_start .*got -8"),
    ("head_start a float array", UNSTACKED, dict(num_heads=16, head_start=shape(dtype=F32)), TypeError, r"head_start .*integer.*got float32"),
    ("head_start a vector", UNSTACKED, dict(num_heads=16, head_start=shape(2, dtype=I32)), ValueError, r"head_start .*scalar.*got .*\(2,\)"),
    ("static shard past P", UNSTACKED, dict(num_heads=16, head_start=8), ValueError, r"weight_offset .*392.*got 384 \+ 16"),
    ("traced shard past P", UNSTACKED, dict(num_heads=16, head_start=shape(dtype=I32)), ValueError, r"weight_offset .*num_heads.*392.*got 384 \+ 16"),
    # Scalars and names
    *((f"{name} {value}", UNSTACKED, {name: value}, ValueError, rf"{name} .*positive.*got {value}") for name in ("eps", "key_eps", "weight_scale") for value in (0.0, -1e-6, float("inf"), float("nan"))),
    ("eps that fp32 rounds to zero", UNSTACKED, dict(eps=1e-60), ValueError, r"eps .*positive.*got 1e-60"),
    ("eps that no float holds", UNSTACKED, dict(eps=10**400), ValueError, r"eps .*positive, finite.*got an int of 1329 bits"),
    ("subnormal key_eps", UNSTACKED, dict(key_eps=1e-38), ValueError, r"key_eps .*positive, finite and normal.*got 1e-38"),
    ("eps a string", UNSTACKED, dict(eps="1e-6"), TypeError, r"eps .*float.*got str"),
    ("eps an array", UNSTACKED, dict(eps=shape(dtype=F32)), TypeError, r"eps .*float"),
    ("cache_format unknown", UNSTACKED, dict(cache_format="fp4"), ValueError, r'cache_format .*"fp8", "mxfp8", "mxfp4".*got .fp4.'),
    ("weights_dtype f16", UNSTACKED, dict(weights_dtype=jnp.float16), ValueError, r"weights_dtype .*bfloat16.*float32.*got .float16."),
    ("weights_dtype nonsense", UNSTACKED, dict(weights_dtype="half-ish"), ValueError, r"weights_dtype .*got 'half-ish'"),
    ("implementation unknown", UNSTACKED, dict(implementation="xla"), ValueError, r'implementation .*None or .*"cuda", "jnp".*got .xla.'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "changes", "exception", "pattern"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_bad_argument(base, changes, exception, pattern):
    with pytest.raises(exception, match=pattern):
        trace(dsa.index_front, base | changes)
    with pytest.raises(exception, match=pattern):
        dsa.explain(dsa.index_front, **base | changes)


@pytest.mark.parametrize("base", [UNSTACKED, STACKED], ids=["plain", "stacked"])
def test_the_base_itself_is_good(base):
    """Else every test above could pass for the wrong reason."""
    assert trace(dsa.index_front, base).weights.shape == (BATCH, HEADS)
    assert dsa.explain(dsa.index_front, **base).implementation == "jnp"


@pytest.mark.parametrize(
    "missing", ["eps", "key_eps", "key_offset", "weight_offset", "cache_format"]
)
def test_required_keyword(missing):
    rest = {k: v for k, v in UNSTACKED.items() if k != missing}
    with pytest.raises(TypeError, match=missing):
        trace(dsa.index_front, rest)
    with pytest.raises(
        TypeError, match=rf"explain takes the arguments of index_front: .*{missing}"
    ):
        dsa.explain(dsa.index_front, **rest)


def test_a_reference_is_to_be_read():
    projected, weights, cache = small.operands(pages=4)
    with pytest.raises(
        TypeError, match=r"cache must be .* array, got a reference: .*ref\[\.\.\.\]"
    ):
        jax.jit(small.step)(projected, weights, jax.new_ref(cache), jnp.arange(BATCH))


def test_refused_before_anything_runs():
    """A donated cache survives a refused call."""
    projected, weights, cache = small.operands(pages=4)
    fn = jax.jit(small.step, donate_argnums=2)
    with pytest.raises(ValueError, match="slots"):
        fn(projected, weights, cache, jnp.arange(BATCH + 1))
    assert not cache.is_deleted()


def test_int64_numpy_slots_without_x64():
    """JAX would cut 64-bit integers to their lower half: such slots stay outside all the same."""
    projected, weights, cache = small.operands(pages=4)
    slots = np.array([3, 2**32 + 5, -(2**32), 2**31 + 7])
    want = small.step(projected, weights, cache, np.array([3, -1, -1, -1], np.int32)).cache
    got = small.step(projected, weights, cache, slots).cache
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_key_and_weights_may_overlap_where_that_is_said():
    own = dict(key=UNSTACKED["projected"], head_weights=UNSTACKED["projected"])
    fronts = trace(dsa.index_front, UNSTACKED | own | dict(key_offset=0, weight_offset=K))
    assert fronts.weights.shape == (BATCH, HEADS)


def test_the_operator_under_jit_without_static_arguments():
    """The first thing that people try; the message names the way out."""
    projected, weights, cache = small.operands(pages=4)
    traced = dict(key_offset=K, weight_offset=K + 128, eps=1e-6, key_eps=1e-6)
    bound = functools.partial(dsa.index_front, cache_format="fp8")
    for names in (("key_offset", "weight_offset"), ("eps", "key_eps")):
        rest = {k: v for k, v in traced.items() if k not in names}
        fn = jax.jit(functools.partial(bound, **rest))
        with pytest.raises(TypeError, match=rf"^{names[0]} .*functools\.partial.*static_argnames"):
            fn(projected, *weights, cache, jnp.arange(BATCH), **{k: traced[k] for k in names})


@pytest.mark.parametrize(
    "operator",
    [
        jax.jit(dsa.index_front),
        functools.partial(dsa.index_front),
        dsa.read_keys,
        "index_front",
        [],
    ],
    ids=["jitted", "partial", "another", "name", "list"],
)
def test_explain_takes_operators_as_they_are(operator):
    pattern = r"explain takes an operator first, one of .*index_front, .*index_scores"
    with pytest.raises(TypeError, match=pattern):
        dsa.explain(operator, **UNSTACKED)

"""Bad arguments of `index_scores` and `read_keys`."""
# ruff: noqa: E501  (one refusal a line)

import jax.numpy as jnp
import pytest

import jax_dsa_front as dsa
from small import BF16, F32, I32, U8, shape, trace

FP8 = jnp.float8_e4m3fn
SCORES = dict(
    query=shape(4, 8, 128, dtype=FP8),
    query_scale=None,
    weights=shape(4, 8),
    cache=shape(6, 64, 132, dtype=U8),
    block_table=shape(4, 3, dtype=I32),
    context_lens=shape(4, dtype=I32),
    cache_format="fp8",
)
SCORES4 = SCORES | dict(
    query=shape(4, 8, 64, dtype=U8),
    query_scale=shape(4, 8, dtype=jnp.uint32),
    cache=shape(2, 6, 64, 68, dtype=U8),
    layer=1,
    cache_format="mxfp4",
)
BAD_SCORES = [
    ("query 2-D", SCORES, dict(query=shape(4, 128, dtype=FP8)), ValueError, r"query .*got \(4, 128\)"),
    ("query u8", SCORES, dict(query=shape(4, 8, 128, dtype=U8)), TypeError, r"query .*float8_e4m3fn.*got uint8"),
    ("query fp8 for mxfp4", SCORES4, dict(query=shape(4, 8, 64, dtype=FP8)), TypeError, r"query .*uint8.*got float8_e4m3fn"),
    ("query 64 wide", SCORES, dict(query=shape(4, 8, 64, dtype=FP8)), ValueError, r"query .*128.*got \(4, 8, 64\)"),
    ("query_scale for fp8", SCORES, dict(query_scale=shape(4, 8, dtype=jnp.uint32)), ValueError, r"query_scale must be None.*fp8"),
    ("query_scale missing", SCORES4, dict(query_scale=None), TypeError, r"query_scale must be an array.*mxfp4.*got None"),
    ("query_scale i32", SCORES4, dict(query_scale=shape(4, 8, dtype=I32)), TypeError, r"query_scale .*uint32.*got int32"),
    ("query_scale of other heads", SCORES4, dict(query_scale=shape(4, 9, dtype=jnp.uint32)), ValueError, r"query_scale .*\(4, 8\).*got \(4, 9\)"),
    ("weights f16", SCORES, dict(weights=shape(4, 8, dtype=jnp.float16)), TypeError, r"weights .*bfloat16 or float32.*got float16"),
    ("weights of other heads", SCORES, dict(weights=shape(4, 9)), ValueError, r"weights .*\(4, 8\).*got \(4, 9\)"),
    ("cache row of 68", SCORES, dict(cache=shape(6, 64, 68, dtype=U8)), ValueError, r"cache .*132.*got \(6, 64, 68\)"),
    ("cache i8", SCORES, dict(cache=shape(6, 64, 132, dtype=jnp.int8)), TypeError, r"cache .*uint8.*got int8"),
    ("block_table f32", SCORES, dict(block_table=shape(4, 3, dtype=F32)), TypeError, r"block_table .*got float32"),
    ("block_table of another batch", SCORES, dict(block_table=shape(5, 3, dtype=I32)), ValueError, r"block_table .*\(4\).*got \(5, 3\)"),
    ("block_table 1-D", SCORES, dict(block_table=shape(4, dtype=I32)), ValueError, r"block_table .*\(S, N\).*got \(4,\)"),
    ("context_lens of another batch", SCORES, dict(context_lens=shape(1, dtype=I32)), ValueError, r"context_lens .*\(4\).*got \(1,\)"),
    ("context_lens bf16", SCORES, dict(context_lens=shape(4, dtype=BF16)), TypeError, r"context_lens .*got bfloat16"),
    ("block_table of a part of the rows", SCORES, dict(block_table=shape(3, 3, dtype=I32)), ValueError, r"block_table .*query \(4\), or a divisor.*got \(3, 3\)"),
    ("block_table without rows", SCORES, dict(block_table=shape(0, 3, dtype=I32)), ValueError, r"block_table .*got \(0, 3\)"),
    ("more positions than int32 has", SCORES, dict(block_table=shape(4, 2**25, dtype=I32)), ValueError, r"block_table .*2147483647 positions.*got 33554432 \* 64"),
    ("implementation unknown", SCORES, dict(implementation="triton"), ValueError, r'implementation .*"cuda", "jnp".*got .triton.'),
    ("layer missing", SCORES4, dict(layer=None), ValueError, r"layer is required"),
    ("layer superfluous", SCORES, dict(layer=0), ValueError, r"layer .*stacked"),
    ("layer past the end", SCORES4, dict(layer=2), ValueError, r"layer .*got 2"),
    ("format unknown", SCORES, dict(cache_format="int8"), ValueError, r"cache_format .*got .int8."),
]  # fmt: skip
READ = dict(cache=shape(6, 64, 132, dtype=U8), slots=shape(2, 3, dtype=I32), cache_format="fp8")
BAD_READ = [
    ("cache row", READ, dict(cache_format="mxfp4"), ValueError, r"cache .*68.*got \(6, 64, 132\)"),
    ("cache rank", READ, dict(cache=shape(64, 132, dtype=U8)), ValueError, r"cache .*got \(64, 132\)"),
    ("slots f32", READ, dict(slots=shape(3, dtype=F32)), TypeError, r"slots .*got float32"),
    ("slots a list", READ, dict(slots=[1, 2]), TypeError, r"slots .*got list"),
    ("layer superfluous", READ, dict(layer=1), ValueError, r"layer .*stacked"),
]  # fmt: skip


def parametrize(bad):
    return pytest.mark.parametrize(
        ("base", "changes", "exception", "pattern"), [b[1:] for b in bad], ids=[b[0] for b in bad]
    )


@parametrize(BAD_SCORES)
def test_index_scores(base, changes, exception, pattern):
    with pytest.raises(exception, match=pattern):
        trace(dsa.index_scores, base | changes)
    with pytest.raises(exception, match=pattern):
        dsa.explain(dsa.index_scores, **base | changes)


@parametrize(BAD_READ)
def test_read_keys(base, changes, exception, pattern):
    with pytest.raises(exception, match=pattern):
        trace(dsa.read_keys, base | changes)


def test_the_whole_front_is_no_query():
    """Also where Python would only say how many arguments are missing; *front is right."""
    front = dsa.IndexFront(*[SCORES[name] for name in ("query", "query_scale", "weights", "cache")])
    table, lens = SCORES["block_table"], SCORES["context_lens"]
    hint = r"query .*whole: pass front\.query, .* which are \*front$"
    with pytest.raises(TypeError, match=hint):
        dsa.index_scores(front, None, *front[2:], table, lens, cache_format="fp8")
    with pytest.raises(TypeError, match=hint):
        dsa.index_scores(front, table, lens, cache_format="fp8")
    with pytest.raises(TypeError, match=hint):
        dsa.index_scores(query=front, **{k: v for k, v in SCORES.items() if k != "query"})
    assert dsa.explain(dsa.index_scores, *front, table, lens, cache_format="fp8")


def test_the_bases_themselves_are_good():
    assert trace(dsa.index_scores, SCORES).shape == (4, 192)
    assert trace(dsa.index_scores, SCORES4).shape == (4, 192)
    assert trace(dsa.read_keys, READ).shape == (2, 3, 128)

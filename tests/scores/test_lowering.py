"""What `index_scores` becomes in a program for CUDA, and where it does without its kernel."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import cases
import jax_dsa_front as dsa
import small
from jax_dsa_front._runtime import library, variants
from programs import lowered_for_cuda
from small import shape

FP8 = jnp.float8_e4m3fn


def arguments(fmt="fp8", batch=4, heads=32, page_size=64, layers=None, sequences=2, **more):
    """Abstract operands and static arguments of one call."""
    four = fmt == "mxfp4"
    lead = () if layers is None else (layers,)
    return dict(
        query=shape(batch, heads, 64 if four else 128, dtype=small.U8 if four else FP8),
        query_scale=shape(batch, heads, dtype=jnp.uint32) if four else None,
        weights=shape(batch, heads, dtype=small.F32),
        cache=shape(*lead, 9, page_size, cases.ROW[fmt], dtype=small.U8),
        block_table=shape(sequences, 5, dtype=small.I32),
        context_lens=shape(batch, dtype=small.I32),
        cache_format=fmt,
        **more,
    )


def text(**given):
    arrays, rest = small.arrays_and_rest(arguments(**given))
    return lowered_for_cuda(lambda arrays: dsa.index_scores(**arrays, **rest), arrays)


def calls(program):
    return [
        line for line in program.splitlines() if f"custom_call @{library.INDEX_SCORES}(" in line
    ]


def pretend(monkeypatch, *architectures, missing=None):
    """As if these CUDA devices were here."""
    monkeypatch.setattr(library, "local_cuda_architectures", lambda: architectures)
    monkeypatch.setattr(library, "missing", lambda *_: missing)


@pytest.mark.parametrize("layer", ["none", "static", "traced"])
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_program_is_the_call_and_nothing_else(fmt, layer):
    """Operands go in whole and as they are; attributes hold plain scalars, and no kernel's name."""
    stack = dict(none={}, static=dict(layers=3, layer=2))
    stack["traced"] = dict(layers=3, layer=shape(dtype=small.I32))
    program = text(fmt=fmt, **stack[layer])
    (call,) = calls(program)
    shield = "stablehlo.optimization_barrier"
    operations = re.findall(r"= \"?(stablehlo\.\w+|call)", program)
    assert operations == [shield, "stablehlo.custom_call", shield]
    typed = call.split("mhlo.backend_config = {")[1].split("}")[0]
    attributes = dict(re.findall(r"(\w+) = ([^ ]+) : i32(?:, |$)", typed))
    own_layer = "2" if layer == "static" else "0"
    assert attributes == dict(
        cache_format=str(cases.FORMATS.index(fmt)),
        layer=own_layer,
        traced=str(int(layer == "traced")),
    )
    operands = call.split(f"@{library.INDEX_SCORES}(")[1].split(")")[0].split(", ")
    assert len(operands) == 5 + (fmt == "mxfp4") + (layer == "traced")
    lead = "" if layer == "none" else "3x"
    assert f"tensor<{lead}9x64x{cases.ROW[fmt]}xui8>" in call.split(" : (")[1]
    assert not [v.name for v in variants.VARIANTS if v.name in program]


def test_scan_over_layers_passes_the_stack_whole():
    """In front of the scores the front writes the cache, which the loop carries."""
    projected, weights, cache = small.operands(stacked=True, k=1536, pages=8)
    table, lens = jnp.zeros((small.BATCH, 2), jnp.int32), jnp.ones(small.BATCH, jnp.int32)

    def layers(projected, weights, cache):
        def body(cache, layer):
            front = small.step(projected, weights, cache, jnp.arange(small.BATCH), layer)
            operands = front.query, front.query_scale, front.weights, front.cache, table, lens
            return front.cache, dsa.index_scores(*operands, layer, cache_format="fp8")

        return lax.scan(body, cache, jnp.arange(small.LAYERS))

    program = lowered_for_cuda(layers, projected, weights, cache, donate=2)
    (call,) = calls(program)
    assert "tensor<3x8x64x132xui8>" in call.split(" : (")[1].split(") -> ")[0]
    sliced = re.findall(r"stablehlo\.(?:dynamic_)?slice.* : \(?tensor<(\S+)>", program)
    assert not [t for t in sliced if t.startswith("3x8x64")], sliced


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(heads=5), "H = 5, only for H = 8, 16, 32, 64"),
        (dict(page_size=16), "pages of 16 tokens, only of 32, 64, 128"),
        (dict(heads=128), "H = 128"),
    ],
    ids=["heads", "pages", "more heads"],
)
def test_shapes_without_a_kernel(changes, says, monkeypatch):
    """Cross-lowered and on a device: None takes the jnp form, "cuda" says what does not fit."""
    assert not calls(text(**changes)) and calls(text())
    with pytest.raises(NotImplementedError, match=says):
        text(**changes, implementation="cuda")
    pretend(monkeypatch, "sm_90a")
    explanation = dsa.explain(dsa.index_scores, **arguments(**changes))
    assert explanation.implementation == "jnp" and says in explanation.reason
    explanation = dsa.explain(dsa.index_scores, **arguments())
    assert (
        str(explanation) == "cuda: a shipped kernel takes H = 32 and pages of 64 tokens on sm_90a"
    )


@pytest.mark.parametrize("architectures", [("sm_100a",), ("sm_90a", "sm_103a"), ("sm_80a",)])
def test_devices_without_a_scorer(architectures, monkeypatch):
    """Also one beside a Hopper: the lowering does not know which will run it."""
    pretend(monkeypatch, *architectures)
    assert not calls(text())
    other = architectures[-1]
    with pytest.raises(NotImplementedError, match=f"index_scores is shipped for {other}, only for"):
        text(implementation="cuda")


def test_a_machine_that_lacks_something_warns(monkeypatch):
    pretend(monkeypatch, "sm_90a", missing="cuda-python is missing")
    with pytest.warns(
        UserWarning, match="index_scores runs without its kernel: cuda-python is miss"
    ):
        assert not calls(text())
    assert not calls(text(implementation="jnp"))


@pytest.mark.parametrize("empty", [dict(batch=0, sequences=0), dict(batch=0, sequences=3)])
def test_nothing_to_score_launches_nothing(empty):
    assert not calls(text(**empty)) and not calls(text(**empty, implementation="cuda"))
    assert small.trace(dsa.index_scores, arguments(**empty)).shape == (0, 320)


def test_other_platforms_take_the_jnp_form():
    arrays, rest = small.arrays_and_rest(arguments())
    traced = jax.jit(lambda arrays: dsa.index_scores(**arrays, **rest)).trace(arrays)
    for platform in ("cpu", "rocm", "tpu"):
        assert not calls(traced.lower(lowering_platforms=(platform,)).as_text())

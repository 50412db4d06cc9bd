"""Reading compiled and lowered programs: what they copy, alias and call.

A compiled program is HLO text. Every instruction line names its result's type and its operation,
also those inside fused computations and loop bodies, so one pass over all lines sees everything.
"""

import math
import re

import jax

import cases

TARGET = "jax_dsa_front.index_front.v1"
NO_DUMP_OF_GRAPHS = "XLA of JAX 0.10 dumps its thunks before it makes command buffers of them"
COLLECTIVES = re.compile("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", re.M)
ITEM_BYTES = {"u8": 1, "bf16": 2, "f32": 4}
# Operations that hand a buffer on or write a part of it in place. Everything else that yields a
# whole cache or weight stack (copy, slice, concatenate, convert, select, ...) has touched it all.
HANDS_ON = {
    *("parameter", "get-tuple-element", "tuple", "while", "conditional", "call", "fusion"),
    *("bitcast", "custom-call", "opt-barrier", "scatter", "dynamic-update-slice"),
}


def touched(text, at_least, dtypes=("u8",)):
    """[(operation, type)] of the instructions that make a new `at_least` bytes of such a dtype."""
    found = []
    for dtype, dims, operation in INSTRUCTION.findall(text):
        elements = math.prod(int(d) for d in dims.split(",") if d)
        big = dtype in dtypes and elements * ITEM_BYTES[dtype] >= at_least
        if big and operation not in HANDS_ON:
            found.append((operation, f"{dtype}[{dims}]"))
    return found


def aliases(text):
    """{output index: parameter number} of a compiled program's header."""
    header = text.split("\n", 1)[0]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry", header + ", entry")
    pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{\}", found[1] if found else "")
    return {out: int(parameter) for out, parameter in pairs}


def assert_in_place(compiled, layer_bytes, copies=()):
    """Nothing in `compiled` makes a cache layer, but the named `copies` aside; it is aliased."""
    text = compiled.as_text()
    assert sorted(op for op, _ in touched(text, layer_bytes)) == sorted(copies), touched(
        text, layer_bytes
    )
    memory = compiled.memory_analysis()
    if not copies:
        assert aliases(text), "no output is aliased to an input"
        assert memory.alias_size_in_bytes >= layer_bytes
        assert memory.temp_size_in_bytes < layer_bytes


def assert_calls_stand_alone(text, sliced=False):
    """XLA for GPUs has called the kernel in place and has taken nothing around it into the call,
    but for slices of `wq_b`, and these if there are some."""
    assert f'custom_call_target="{TARGET}"' in text
    assert "output_to_operand_aliasing={{2}: (5, {})}" in text
    assert ('"name":"dynamic_slice_fusion"' in text) == sliced
    fused = re.findall(r"^%dynamic-slice-fusion.*?^}", text, re.M | re.S)
    assert bool(fused) == sliced
    for call in fused:
        taken = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:dynamic-|dynamic-update-)?slice\(", call)
        assert [(dtype, dims.count(",")) for dtype, dims in taken] == [("bf16", 2)], taken


def lowered_for_cuda(fn, *args, donate=()):
    """StableHLO text of `fn` lowered for CUDA, which needs no GPU.

    A function of its own each time: JAX would remember the lowering, and with it the choice of
    implementation, of one that it has seen.
    """

    def fresh(*args):
        return fn(*args)

    traced = jax.jit(fresh, donate_argnums=donate).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def cuda_text(case, implementation=None):
    """StableHLO of a case lowered for CUDA with the cache donated."""
    arrays = cases.arrays(case, cases.make(case))
    return lowered_for_cuda(cases.function(case, implementation), *arrays, donate=0)


def custom_calls(text):
    """The operation lines of our custom call in StableHLO text."""
    return [line for line in text.splitlines() if f"stablehlo.custom_call @{TARGET}(" in line]

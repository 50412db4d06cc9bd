"""Random calls for the fuzzers: shapes and static arguments from a seed, as `cases.Case`s."""

import dataclasses

import numpy as np

import cases

PAGE_SIZES = (1, 2, 7, 16, 32, 64, 128)
SMALL = dict(
    widths=(128, 256, 384),
    heads=(1, 2, 3, 5, 8),
    batches=(0, 1, 2, 3, 5, 8, 9, 12),
    page_sizes=PAGE_SIZES,
)
# Batches on both sides of every tile; heads that fill less and more than one wave of clusters.
KERNEL = dict(
    widths=cases.KERNEL_WIDTHS,
    heads=(1, 2, 5, 8, 16, 32, 64),
    batches=(1, 2, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 97, 128, 130, 192, 257, 300),
    align=8,
)


def random_cases(count, seed, *, widths, heads, batches, page_sizes=None, align=1):
    """`count` different calls. Widths, formats, batches and `page_sizes` are dealt out in turn, so
    that few calls cover all of them; everything else is drawn."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    turns = {name: rng.permutation(len(x)) for name, x in (("k", widths), ("b", batches))}
    found = []
    for i in range(count):
        batch = batches[turns["b"][i % len(batches)]]
        page_size = page_sizes[i % len(page_sizes)] if page_sizes else pick(*PAGE_SIZES)
        case = cases.Case(
            name=f"fuzz-{seed}-{i}",
            fmt=cases.FORMATS[i % 3],
            k=widths[turns["k"][(i // 3) % len(widths)]],
            heads=pick(*heads),
            batch=batch,
            page_size=page_size,
            pages=pick(1, 2, 4) if batch < 9 else 2 + -(-batch // page_size),
            slot_dtype=pick("int32", "int64"),
            gap=pick(0, 0, 1, 3, 8),
            align=align,
            own_key=pick(True, False),
            own_weights=pick(None, "bfloat16", "float32"),
            weights_dtype=pick("bfloat16", "float32"),
            weight_scale=pick(None, None, 0.3, 1e-3),
            eps=pick(1e-6, 1e-5, 1.5),
            key_eps=pick(1e-6, 1e-5, 2.0),
        )
        found.append(_with_shard(_with_stacks(case, rng, pick), pick))
    return found


def _with_stacks(case, rng, pick):
    """No operand stacked, all of them or some; the layer is an int or an operand."""
    some = frozenset(np.array(cases.STACKABLE)[rng.random(len(cases.STACKABLE)) < 0.5].tolist())
    stacked = pick(cases.NONE, cases.ALL, some, some)
    if case.page_size == 1:  # a stack of such caches is refused
        stacked -= {"cache"}
    layers = pick(1, 2, 3)
    if not stacked:
        return dataclasses.replace(case, layers=layers)
    return dataclasses.replace(
        case,
        stacked=stacked,
        layers=layers,
        layer=int(rng.integers(layers)),
        traced_layer=pick(True, True, False),
    )


def _with_shard(case, pick):
    """All heads of the model or a shard of them. `head_start` is the last one possible, so that
    the head weights are wide enough for any."""
    num_heads = pick(None, case.heads, case.heads + 1, 4 * case.heads)
    traced = pick(True, False) and num_heads is not None
    last = (num_heads or case.heads) - case.heads
    return dataclasses.replace(case, num_heads=num_heads, head_start=last, traced_head_start=traced)


def extremes(dtype, size):
    """Integers outside [0, size), the ends of the type among them."""
    info = np.iinfo(dtype)
    outside = [-1, size, -size, 2 * size, info.min, info.max]
    if info.bits == 64:
        outside += [2**32, 2**32 + size - 1, -(2**32)]  # their lower halves are inside
    return [x for x in outside if x < 0 or x >= size]

"""The grid of calls that tests walk, and seeded inputs for each.

A `Case` says everything about one call; `make` turns it into NumPy operands. The grid is argued,
not a product: every value of every axis appears with a reason, pairs appear where they can
interact (format x page size, stacking x layer, own arrays x offsets), and nothing is repeated.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_dsa_front as dsa

BF16 = ml_dtypes.bfloat16
FORMATS = ("fp8", "mxfp8", "mxfp4")
ROW = {"fp8": 132, "mxfp8": 132, "mxfp4": 68}  # bytes of one token in a cache
STACKABLE = ("q_norm", "wq_b", "key_norm_weight", "key_norm_bias", "cache")
ALL = frozenset(STACKABLE)
NONE = frozenset()
CACHE = 5  # its position among the operands
KIMI = dict(k=1536, heads=32, batch=8)  # width and head count of Kimi K3.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `index_front`; the defaults are a small everyday one."""

    name: str
    fmt: str = "fp8"
    k: int = 256
    heads: int = 8
    batch: int = 5
    page_size: int = 64
    pages: int = 3
    stacked: frozenset = NONE  # which operands carry a leading layer axis
    layers: int = 3
    layer: int | None = None
    traced_layer: bool = False
    slot_dtype: str = "int32"
    slots: str = "mixed"  # a key of SLOTS
    gap: int = 0  # unused columns of `projected` after q_a, twice as many behind key and weights
    align: int = 1  # `projected` is widened to a multiple of this
    own_key: bool = False
    own_weights: str | None = None  # dtype of a head_weights array of its own
    weights_dtype: str = "bfloat16"
    num_heads: int | None = None
    head_start: int = 0
    traced_head_start: bool = False
    weight_scale: float | None = None
    eps: float = 1e-6
    key_eps: float = 1e-5
    style: str = "normal"
    seed: int = 0

    def __str__(self):
        return self.name


def _mixed(rng, batch, tokens):
    """Distinct slots, every third of them negative or past the end (where nothing is written)."""
    slots = rng.permutation(tokens)[:batch] if batch <= tokens else np.arange(batch) % tokens
    slots = slots.astype(np.int64)
    slots[1::6], slots[4::6] = -1, tokens
    return slots


def _extreme(rng, batch, tokens):
    """Slots at the ends of the pool and of the integer types."""
    ends = [0, tokens - 1, tokens, -1, -tokens, 2**31 - 1, -(2**31), tokens * 2]
    return np.resize(np.array(ends, np.int64), batch)


SLOTS = {
    "mixed": _mixed,
    "extreme": _extreme,
    "distinct": lambda rng, batch, tokens: rng.permutation(tokens)[:batch],
    "trash": lambda rng, batch, tokens: np.where(np.arange(batch) % 2, 0, np.arange(batch) + 1),
    "none": lambda rng, batch, tokens: np.full(batch, -1),
}


@dataclasses.dataclass
class Operands:
    """What a call takes, as NumPy: `args` in order, `layer`, and keyword arrays and statics."""

    args: tuple  # projected, q_norm, wq_b, key_norm_weight, key_norm_bias, cache, slots
    layer: int | None
    arrays: dict  # key, head_weights: where they come from arrays of their own
    static: dict

    @property
    def cache(self):
        return self.args[CACHE]

    def expected(self, oracle):
        return oracle.front(*self.args, self.layer, **self.arrays, **self.static)


def columns(case):
    """(key_offset, weight_offset, P): where things stand, packed behind q_a or in own arrays.

    In `projected` an odd gap makes all three odd (P unless aligned).
    """
    local, width = case.head_start + case.heads, case.k + case.gap
    key_offset, weight_offset = min(case.gap, 1), min(case.gap, 3)
    if not case.own_key:
        key_offset, width = width, width + 128 + 2 * case.gap
    if not case.own_weights:
        weight_offset, width = width, width + local + 2 * case.gap
    return key_offset, weight_offset, -(-width // case.align) * case.align


def static(case):
    """The keyword arguments of the call that are no arrays, and head_start."""
    key_offset, weight_offset, _ = columns(case)
    return dict(
        key_offset=key_offset,
        weight_offset=weight_offset,
        eps=case.eps,
        key_eps=case.key_eps,
        cache_format=case.fmt,
        weights_dtype=case.weights_dtype,
        num_heads=case.num_heads,
        head_start=case.head_start,
        weight_scale=case.weight_scale,
    )


def make(case):
    """Seeded operands. Caches hold garbage, so that a byte written by mistake shows."""
    rng = np.random.Generator(np.random.PCG64(case.seed + 1))

    def normal(*shape, stack=None):
        lead = (case.layers,) if stack in case.stacked else ()
        return rng.standard_normal((*lead, *shape), dtype=np.float32)

    key_offset, weight_offset, width = columns(case)
    projected = normal(case.batch, width)
    if case.style == "wide":  # rows whose magnitudes span 2**-12 .. 2**12
        projected *= np.exp2(rng.integers(-12, 13, (case.batch, 1))).astype(np.float32)
    elif case.style == "zero":
        projected[::2] = 0
    arrays = {}
    if case.own_key:
        arrays["key"] = normal(case.batch, key_offset + 128 + case.gap).astype(BF16)
    if case.own_weights:
        head_weights = normal(case.batch, weight_offset + case.head_start + case.heads + case.gap)
        arrays["head_weights"] = head_weights.astype(np.dtype(case.own_weights))
    wq_b = normal(case.heads * 128, case.k, stack="wq_b") * np.float32(case.k**-0.5)
    pool = (case.pages, case.page_size, ROW[case.fmt])
    lead = (case.layers,) if "cache" in case.stacked else ()
    args = (
        projected.astype(BF16),
        (1 + 0.1 * normal(case.k, stack="q_norm")).astype(BF16),
        wq_b.astype(BF16),
        1 + 0.2 * normal(128, stack="key_norm_weight"),
        0.3 * normal(128, stack="key_norm_bias"),
        rng.integers(0, 256, (*lead, *pool), dtype=np.uint8),
        SLOTS[case.slots](rng, case.batch, pool[0] * pool[1]).astype(case.slot_dtype),
    )
    return Operands(args, case.layer, arrays, static(case))


def function(case, implementation=None):
    """The call as a function of `arrays(...)` alone, to be jitted, lowered or donated to.

    A static layer or head start is closed over; its argument is None. Cases that differ in nothing
    static share one function, and so what JAX compiled for it.
    """
    keywords = static(case) | {"implementation": implementation}
    return _function(None if case.traced_layer else case.layer, tuple(keywords.items()))


@functools.cache
def _function(static_layer, keywords):
    keywords = dict(keywords)
    first = keywords.pop("head_start")

    def call(cache, others, layer, own, head_start):
        *parameters, slots = others
        return dsa.index_front(
            *parameters,
            cache,
            slots,
            static_layer if layer is None else layer,
            head_start=first if head_start is None else head_start,
            **own,
            **keywords,
        )

    return call


def arrays(case, operands):
    """The operands on the device as `function` takes them, the cache first, to be donated alone."""
    return (
        jnp.array(operands.cache),
        tuple(jnp.asarray(a) for i, a in enumerate(operands.args) if i != CACHE),
        scalar(case.layer) if case.traced_layer else None,
        {name: jnp.asarray(a) for name, a in operands.arrays.items()},
        scalar(case.head_start) if case.traced_head_start else None,
    )


def scalar(index):
    """As int32, or int64 where it takes that (under jax_enable_x64)."""
    return jnp.asarray(np.array(index, np.int32 if -(2**31) <= index < 2**31 else np.int64))


def run(case, operands=None, implementation=None, compiler_options=None):
    """The result of one jitted call."""
    operands = make(case) if operands is None else operands
    fn = jax.jit(function(case, implementation), compiler_options=compiler_options)
    return fn(*arrays(case, operands))


GRID = (
    # A whole model's width and head count in each format.
    *(Case(f"kimi-{fmt}", fmt, **KIMI) for fmt in FORMATS),
    # The other query ranks and head counts of public DSA models, whole and as shards.
    Case("k1280-h64", k=1280, heads=64, batch=5, seed=2),
    Case("k2048-h16", "mxfp8", k=2048, heads=16, batch=16, seed=3),
    Case("k2048-h8", "mxfp4", k=2048, heads=8, batch=33, seed=4),
    Case("k1280-h1", "mxfp4", k=1280, heads=1, batch=1, seed=5),
    Case("k128", k=128, heads=1, batch=64, seed=6),  # the narrowest K, one head: no padding rule
    # Batches: nothing, one row, and past every tile.
    *(Case(f"empty-{fmt}", fmt, batch=0) for fmt in FORMATS),
    Case("one-row", batch=1, slots="distinct", seed=7),
    Case("b64", "mxfp4", batch=64, seed=8),
    # Page sizes: degenerate, odd, and the ones engines use; values and scales sit apart in each.
    Case("page1", page_size=1, pages=9, seed=9),
    Case("page7", "mxfp8", page_size=7, pages=5, seed=10),
    Case("page7-mxfp4", "mxfp4", page_size=7, pages=5, seed=11),
    Case("page16", page_size=16, pages=4, seed=12),
    Case("page32", "mxfp4", page_size=32, seed=13),
    Case("page128", "mxfp8", page_size=128, pages=2, seed=14),
    # Each operand stacked alone, then all: a layer is picked per operand, never sliced together.
    *(
        Case(f"stacked-{name}", FORMATS[i % 3], stacked=frozenset({name}), layer=1, seed=20 + i)
        for i, name in enumerate(STACKABLE)
    ),
    Case("stacked-first-layer", "mxfp8", stacked=ALL, layer=0, seed=26),
    Case("stacked-last-layer", "mxfp4", stacked=ALL, layer=2, traced_layer=True, seed=27),
    Case("stacked-traced", stacked=ALL, layer=1, traced_layer=True, seed=28),
    Case("stacked-but-cache", stacked=ALL - {"cache"}, layer=2, traced_layer=True, seed=29),
    # A traced layer that is out of range: reads clamp, nothing is inserted.
    Case("layer-past-end", stacked=ALL, layer=3, traced_layer=True, seed=30),
    Case("layer-negative", "mxfp4", stacked=ALL, layer=-1, traced_layer=True, seed=31),
    # Columns: odd P, odd key and weight offsets; key and weights from arrays of their own.
    *(Case(f"odd-offsets-{fmt}", fmt, gap=1, seed=32) for fmt in FORMATS),
    Case("own-key", own_key=True, gap=5, seed=35),
    Case("own-weights-f32", "mxfp4", own_weights="float32", weights_dtype="float32", seed=36),
    Case("own-both", "mxfp8", own_key=True, own_weights="bfloat16", gap=2, seed=37),
    # Head weights: fp32 out (Hopper scorers), a constant that is no power of two, a given constant.
    Case("weights-f32", weights_dtype="float32", heads=16, seed=38),
    Case("weights-f32-bf16", own_weights="float32", heads=16, seed=39),
    Case("weight-scale", "mxfp4", weight_scale=0.3, seed=40),
    # A shard of a model: its first head static or traced, the constant that of all heads.
    Case("head-shard", num_heads=32, head_start=8, seed=41),
    Case("head-shard-traced", num_heads=32, head_start=24, traced_head_start=True, seed=42),
    Case("head-shard-mxfp4", "mxfp4", num_heads=16, head_start=8, traced_head_start=True, seed=43),
    # Slots at the ends of the pool and of their type; rows that share one; no key at all.
    *(Case(f"slots-extreme-{fmt}", fmt, slots="extreme", batch=9, seed=44) for fmt in FORMATS),
    Case("slots-extreme-stacked", stacked=ALL, layer=1, slots="extreme", batch=9, seed=46),
    Case("slots-trash", slots="trash", batch=9, seed=47),
    Case("slots-none", "mxfp8", slots="none", batch=9, seed=48),
    # Magnitudes: rows 2**24 apart, rows of zeros (the amax floors), and an eps that dominates.
    *(Case(f"wide-{fmt}", fmt, style="wide", batch=9, seed=49) for fmt in FORMATS),
    *(Case(f"zero-rows-{fmt}", fmt, style="zero", batch=9, seed=52) for fmt in FORMATS),
    Case("large-eps", eps=3.0, key_eps=7.0, seed=55),
)

# The same grid for the kernel: its widths, and rows of `projected` that start at 16 bytes. Beside
# it, B = 9, 33 and 65: one row past each batch tile.
KERNEL_WIDTHS = (1280, 1536, 2048)
KERNEL_GRID = tuple(
    dataclasses.replace(case, k=case.k if case.k in KERNEL_WIDTHS else 1280, align=8)
    for case in (
        *GRID,
        *(Case(f"kimi-b9-{fmt}", fmt, k=1536, heads=32, batch=9, seed=1) for fmt in FORMATS),
        Case("kimi-b33", k=1536, heads=32, batch=33, seed=56),
        Case("kimi-b65", "mxfp4", k=1536, heads=32, batch=65, seed=57),
    )
)

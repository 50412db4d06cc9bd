"""Which kernels are shipped: the frozen list that drives the build, the file names, the look-up and
the tests.

Nothing here imports JAX, CUDA or the DSL.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from jax_dsa_front._runtime.files import built

CUBINS = built("cubins")
MANIFEST = CUBINS / "manifest.json"

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
MAX_GRID = 65535  # heads, and tiles of rows: extents of a grid
LATENT_WIDTHS = (1280, 1536, 2048)  # K: query ranks of public DSA models


@dataclass(frozen=True)
class FrontVariant:
    """One cubin of `index_front`.

    `schedule` names the module in `kernels/front/`; `tile` is the number of batch rows per cluster;
    `max_batch` is where the next variant of the same architecture and K takes over (None: nowhere).
    """

    operator: ClassVar[str] = "index_front"

    arch: str
    k: int
    schedule: str  # "split_n", "split_k", "split_k_rows", or "row_norm" in front of the last
    tile: int
    max_batch: int | None = None

    @property
    def name(self) -> str:
        """File name of the cubin without its ending, and the kernel's symbol."""
        return f"index_front_{self.arch}_k{self.k}_{self.schedule}_b{self.tile}"

    @property
    def key(self) -> int:
        """What a call asks for kernels by: one key's are loaded together."""
        return self.k


@dataclass(frozen=True)
class ScoresVariant:
    """One cubin of `index_scores`.

    `schedule` names the module in `kernels/scores/`; `tile` is how many rows of a sequence share
    one read of its keys.
    """

    operator: ClassVar[str] = "index_scores"

    arch: str
    schedule: str  # "paged" for fp8 and mxfp8, "paged_fp4" for mxfp4
    heads: int
    page_size: int
    tile: int

    @property
    def name(self) -> str:
        """File name of the cubin without its ending, and the kernel's symbol."""
        shape = f"h{self.heads}_p{self.page_size}_r{self.tile}"
        return f"index_scores_{self.arch}_{self.schedule}_{shape}"

    @property
    def key(self) -> int:
        return scores_key(self.schedule == "paged_fp4", self.page_size, self.heads)


def scores_key(four_bit: bool, page_size: int, heads: int) -> int:
    """What a call of `index_scores` asks for kernels by; csrc_glue/scores_launch.h has the same."""
    return four_bit << 48 | page_size << 16 | heads


def _front_variants() -> tuple[FrontVariant, ...]:
    variants = []
    for arch in ARCHITECTURES:
        for k in LATENT_WIDTHS:
            if arch == "sm_90a":
                # K = 2048 leaves room for one CTA per SM: 32 clusters would take two waves.
                if k <= 1536:
                    variants.append(FrontVariant(arch, k, "split_n", 8, max_batch=8))
                variants.append(FrontVariant(arch, k, "split_k", 32))
                variants.append(FrontVariant(arch, k, "split_k_rows", 64))
                variants.append(FrontVariant(arch, k, "split_k_rows", 128))
                variants.append(FrontVariant(arch, k, "row_norm", 1))
            else:  # wgmma is Hopper's alone
                variants.append(FrontVariant(arch, k, "split_n", 8))
    return tuple(variants)


# The front's in order of preference for a given architecture and K: one with a `max_batch` up to
# that batch; above, the first whose grid runs in one wave, else the last.
_FRONT = _front_variants()

SCORES_HEADS = (8, 16, 32, 64)
SCORES_PAGE_SIZES = (32, 64, 128)
# Columns of the largest product: heads times the rows that share a read
_SCORES_COLUMNS = {"paged": 128, "paged_fp4": 64}
# Pages of 64 tokens are the fast case. Others are served, not tuned: each row reads for itself.
_SCORES = tuple(
    ScoresVariant("sm_90a", schedule, heads, page_size, rows)
    for schedule, columns in _SCORES_COLUMNS.items()
    for heads in SCORES_HEADS
    for page_size, rows in ((64, 1), (64, 2), (64, 4), (32, 1), (128, 1))
    if heads * rows <= columns
)

VARIANTS: tuple[FrontVariant | ScoresVariant, ...] = (*_FRONT, *_SCORES)

# The operators that have kernels; their places are `Operator` of csrc_glue/kernel_table.h.
OPERATORS = ("index_front", "index_scores")

# implementation=None takes the jnp form above this batch: the largest at which the kernel was
# measured, and found the faster of the two (docs/performance.md). Architectures that nobody has
# measured keep the kernel for one tile only.
KERNEL_MAX_BATCH = {"sm_90a": 4096, "sm_100a": 8, "sm_103a": 8}


def architecture(compute_capability: tuple[int, int]) -> str:
    """The target whose cubins run on this compute capability only: "sm_90a" for (9, 0)."""
    major, minor = compute_capability
    return f"sm_{major}{minor}a"


def unsupported(operator: str, key: int, arch: str) -> str | None:
    """One sentence why an operator has no shipped kernels of this key; None if it has some."""
    if operator == "index_front":
        return front_unsupported(key, 0, arch)
    return scores_unsupported(key & 0xFFFF, key >> 16 & 0xFFFFFFFF, arch)


def key_text(operator: str, key: int) -> str:
    """The key in the words of a message."""
    if operator == "index_front":
        return f"K = {key}"
    return f"{key & 0xFFFF} heads and pages of {key >> 16 & 0xFFFFFFFF} tokens"


def front_unsupported(k: int, pitch: int, arch: str, heads: int = 1, batch: int = 1) -> str | None:
    """One sentence why no shipped kernel of `index_front` takes these; None if one does.

    `k`: width of the query latent; `pitch`: width of `projected` (elements).
    """
    if arch not in ARCHITECTURES:
        return f"no kernel is shipped for {arch}, only for {', '.join(ARCHITECTURES)}"
    if k not in LATENT_WIDTHS:
        return (
            f"no kernel is shipped for K = {k}, only for K = {', '.join(map(str, LATENT_WIDTHS))}"
        )
    if pitch % 8:
        return (
            "the kernel needs rows of projected that start at multiples of 16 bytes: "
            f"a width P that is a multiple of 8, got {pitch}"
        )
    if heads > MAX_GRID:
        return f"the kernel takes at most {MAX_GRID} heads, got {heads}"
    rows = MAX_GRID * max(v.tile for v in _FRONT if (v.arch, v.k) == (arch, k))
    if batch > rows:
        return f"the kernel for {arch} takes at most {rows} rows, got {batch}"
    return None


def scores_unsupported(heads: int, page_size: int, arch: str) -> str | None:
    """One sentence why no shipped kernel of `index_scores` takes these; None if one does."""
    if not any(v.arch == arch for v in _SCORES):
        return f"no kernel of index_scores is shipped for {arch}, only for sm_90a"
    if heads not in SCORES_HEADS:
        known = ", ".join(map(str, SCORES_HEADS))
        return f"no kernel of index_scores is shipped for H = {heads}, only for H = {known}"
    if page_size not in SCORES_PAGE_SIZES:
        known = ", ".join(map(str, SCORES_PAGE_SIZES))
        return f"no kernel of index_scores takes pages of {page_size} tokens, only of {known}"
    return None


def front_jnp_is_faster(arch: str, batch: int) -> bool:
    """Whether `implementation=None` takes `index_front`'s jnp form although a kernel fits."""
    return batch > KERNEL_MAX_BATCH[arch]


def digest(entries: list[dict[str, Any]]) -> str:
    """SHA-256 of the manifest's entries, which the manifest carries beside them."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def manifest() -> dict[str, Any]:
    """The build's record: `kernels`, an entry per cubin in the order of VARIANTS, and versions.

    Raises FileNotFoundError in a tree that was not built, ValueError if an entry was changed.
    """
    try:
        content = json.loads(MANIFEST.read_text())
        if digest(content["kernels"]) == content["sha256"]:
            return content
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(f"{MANIFEST.name} is damaged; reinstall jax_dsa_front")

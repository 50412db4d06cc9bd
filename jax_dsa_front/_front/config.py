"""The static facts of one `index_front` call, and its operands."""

import dataclasses

ARRAYS = (
    "projected",
    *("q_norm", "wq_b", "key_norm_weight", "key_norm_bias", "cache"),
    *("slots", "key", "head_weights"),
)
"""The array arguments in the order of the primitive's operands."""

STACKABLE = {"q_norm": 1, "wq_b": 2, "key_norm_weight": 1, "key_norm_bias": 1, "cache": 3}
"""The operands that may carry a leading axis of L layers, with their rank without it.

They are operands 1 to 5 of the primitive, in this order.
"""

WEIGHTS_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class FrontConfig:
    """What is known about a call before its arrays are: hashable, the primitive's only parameter.

    Offsets are columns, `num_heads` counts the heads of the whole model. `head_start` and `layer`
    are None where an operand holds them (see the two flags) or, for `layer`, where nothing is
    stacked. `weight_scale` is the float64 constant; it is rounded to fp32 where it is used.
    """

    key_offset: int
    weight_offset: int
    eps: float
    key_eps: float
    cache_format: str
    weights_dtype: str
    num_heads: int
    head_start: int | None
    layer: int | None
    weight_scale: float
    implementation: str | None
    has_layer_operand: bool
    has_head_start_operand: bool

    def __repr__(self) -> str:
        """One short line, because a jaxpr prints it at every call."""
        parts = [
            self.cache_format,
            f"key@{self.key_offset}",
            f"weights@{self.weight_offset}:{self.weights_dtype}",
            f"heads={self.num_heads}",
            f"eps={self.eps:g}/{self.key_eps:g}",
            f"scale={self.weight_scale:g}",
        ]
        if self.has_head_start_operand:
            parts.append("head_start=operand")
        elif self.head_start:
            parts.append(f"head_start={self.head_start}")
        if self.has_layer_operand:
            parts.append("layer=operand")
        elif self.layer is not None:
            parts.append(f"layer={self.layer}")
        if self.implementation is not None:
            parts.append(self.implementation)
        return f"({' '.join(parts)})"

"""The static facts of one `index_scores` call, and its operands."""

import dataclasses

ARRAYS = ("query", "weights", "cache", "block_table", "context_lens")
"""The array arguments in the order of the primitive's operands; behind them query_scale (mxfp4) and
the layer, where they are arrays."""


@dataclasses.dataclass(frozen=True)
class ScoresConfig:
    """What is known about a call before its arrays are: hashable, the primitive's only parameter.

    `layer` is None where an operand holds it or nothing is stacked.
    """

    cache_format: str
    layer: int | None
    implementation: str | None
    has_layer_operand: bool

    def __repr__(self) -> str:
        """One short line, because a jaxpr prints it at every call."""
        parts = [self.cache_format]
        if self.has_layer_operand:
            parts.append("layer=operand")
        elif self.layer is not None:
            parts.append(f"layer={self.layer}")
        if self.implementation is not None:
            parts.append(self.implementation)
        return f"({' '.join(parts)})"

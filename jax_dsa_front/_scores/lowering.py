"""The operator behind `index_scores`."""

from jax_dsa_front._operator import Operator
from jax_dsa_front._scores.reference import reference_scores

OPERATOR = Operator(
    "index_scores",
    reference_scores,
    fold="query, query_scale if given, weights, block_table and context_lens",
)

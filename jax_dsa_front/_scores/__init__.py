"""`index_scores`: api, checks, the static facts of a call, the jnp form, the operator."""

"""`index_front`: api, checks, the static facts of a call, the jnp form, the CUDA call."""

"""`python -P -m jax_dsa_front`: the same as the console script `jax-dsa-front`."""

import sys

from jax_dsa_front._app.cli import main

if __name__ == "__main__":
    sys.exit(main())

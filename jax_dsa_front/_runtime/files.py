"""Where the build's files are: beside the sources, or elsewhere for an editable installation."""

import sys
from pathlib import Path

PACKAGE = __name__.partition(".")[0]


def built(name: str) -> Path:
    """The path of a built file or folder of this package; where there is none, of its usual place.

    An editable installation has two folders on the package's path: the sources, and what was built
    from them.
    """
    candidates = [Path(folder) / name for folder in sys.modules[PACKAGE].__path__]
    return next((path for path in candidates if path.exists()), candidates[0])

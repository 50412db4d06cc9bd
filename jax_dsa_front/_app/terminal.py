"""Output for a terminal, a dumb one and a log alike: ASCII, 80 columns, no control codes."""

import sys
import textwrap
import time
from types import TracebackType
from typing import Self

WIDTH = 79
LABEL = 19  # characters
BAR = 40


class Progress:
    """A bar that grows to the right: `decode             [######## ... #] 3.2 s`.

    It only ever appends characters, so it reads the same in a file as on a screen.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._done = self._drawn = 0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        _write(f"{self._label:<{LABEL}}[")
        return self

    def advance(self) -> None:
        """One of `total` pieces is done."""
        self._done += 1
        drawn = BAR * self._done // self._total
        _write("#" * (drawn - self._drawn))
        self._drawn = drawn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        seconds = time.perf_counter() - self._start
        _write(f"] {seconds:.1f} s\n" if kind is None else " stopped\n")


def row(label: str, text: str) -> str:
    """A labelled paragraph, wrapped to 80 columns."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{label:<{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Rows under a title, between rules."""
    rule = "-" * WIDTH
    return "\n".join([rule, title, rule, *(row(*entry) for entry in rows), rule])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

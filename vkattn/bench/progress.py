"""A progress bar on stderr, only where somebody looks: nothing is written to a file or a pipe."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Shows how many of ``total`` steps are done, what runs now and for how long; `close` wipes it.

    Parameters
    ----------
    total : int
    stream : a text stream, or None for stderr
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = total
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._start = time.perf_counter()

    def show(self, done: int, what: str) -> None:
        """Draw the bar over the one before."""
        if self._shown:
            filled = WIDTH * done // max(self.total, 1)
            seconds = time.perf_counter() - self._start
            bar = "#" * filled + "." * (WIDTH - filled)
            self._stream.write(f"\r\x1b[K[{bar}] {done}/{self.total} {seconds:.0f}s {what[:80]}")
            self._stream.flush()

    def close(self) -> None:
        """Wipe the bar."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

"""How far a command has come, on stderr: a bar where somebody looks, else a plain line every ten seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Says how many of ``total`` steps are done, what runs now and for how long.

    On a terminal each `show` draws a bar over the one before, and `close` wipes it. Into a file or a pipe it writes a
    line without control characters, but only when ``every`` seconds have gone by since the start or the last line: a
    short run leaves none.

    Parameters
    ----------
    total : int
    stream : a text stream, or None for stderr
    every : float, seconds between two lines where there is no terminal
    """

    def __init__(self, total: int, stream: TextIO | None = None, every: float = 10.0) -> None:
        self.total = total
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._every = every
        self._start = self._last = time.perf_counter()

    def show(self, done: int, what: str) -> None:
        """Say that ``done`` steps are done, and that ``what`` runs now."""
        now = time.perf_counter()
        seconds = f"{now - self._start:.0f}s"
        if self._is_terminal:
            filled = WIDTH * done // max(self.total, 1)
            bar = "#" * filled + "." * (WIDTH - filled)
            self._write(f"\r\x1b[K[{bar}] {done}/{self.total} {seconds} {what[:80]}")
        elif now - self._last >= self._every:
            self._last = now
            self._write(f"{done}/{self.total} after {seconds}: {what}\n")

    def close(self) -> None:
        """Wipe the bar."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

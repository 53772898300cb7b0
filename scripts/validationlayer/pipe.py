"""The layer's log, collected from all processes of a run.

The layer opens its log file anew in each process, and empties it: a file would hold what the last process wrote. A
named pipe takes the messages of all of them, in order, with our marks between.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

END = b"@@ the end\n"


@contextmanager
def collected(pipe: Path, log: Path) -> Iterator[None]:
    """Make ``pipe``, and while the block runs write into ``log`` whatever comes through it."""
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    # Open for both: neither end ever waits for the other, and the pipe does not end when a process does.
    both = os.open(pipe, os.O_RDWR)

    def collect() -> None:
        with log.open("wb", buffering=0) as stream:
            seen = b""
            while not seen.endswith(END):
                piece = os.read(both, 1 << 16)
                stream.write(piece)
                seen = (seen + piece)[-len(END) :]

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(both, b"\n" + END)
        thread.join()
        os.close(both)
        pipe.unlink()

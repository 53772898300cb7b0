"""Progress: a bar that is drawn over on a terminal, plain lines now and then in a file or a pipe."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from vkattn import progress
from vkattn.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_is_wiped() -> None:
    bar = Progress(4, stream := Terminal())
    bar.show(1, "something")
    assert "[######.................." in stream.getvalue() and "] 1/4 0s something" in stream.getvalue()
    bar.close()
    assert stream.getvalue().endswith("something\r\x1b[K")


def test_a_line_every_ten_seconds_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: seconds)
    lines = Progress(9, stream := io.StringIO())
    for done, seconds in enumerate((100.0, 109.9, 110.0, 119.9, 131.0, 140.9)):  # noqa: B007  perf_counter reads it
        lines.show(done, f"step {done}")
    lines.close()
    assert stream.getvalue() == "2/9 after 10s: step 2\n4/9 after 31s: step 4\n"


def test_a_pipe_gets_each_line_at_once(tmp_path: Path) -> None:
    """The line is there while the process still runs: it waits until this test has read it."""
    code = ("import sys; from vkattn.progress import Progress\n"
            "Progress(3, every=0).show(2, 'something'); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stdin is not None
        assert process.stderr.readline() == b"2/3 after 0s: something\n"
        assert process.poll() is None
        process.stdin.close()

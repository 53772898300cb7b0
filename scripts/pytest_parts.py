"""A pytest plugin of scripts/run_tests.py: notes in a file what this part found, for the summary of all parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add the line of this part."""
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in COUNTED}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no test ran"
    verdict = "FAILED: " if counts["failed"] or counts["error"] else ""
    with Path(os.environ["VKATTN_PART_RESULTS"]).open("a", encoding="utf-8") as stream:
        stream.write(f"{os.environ['VKATTN_PART']}: {verdict}{text}\n")

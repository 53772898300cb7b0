"""A pytest plugin of scripts/run_tests.py: notes what this part found, and repeats what the earlier parts found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines of the parts that ran before, then add the line of this one."""
    path = Path(os.environ["VKATTN_PART_RESULTS"])
    earlier = path.read_text(encoding="utf-8").splitlines()
    if earlier:
        terminalreporter.section("the parts before this one")
        for line in earlier:
            terminalreporter.line(line, red="FAILED" in line)
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in COUNTED}
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no test ran"
    verdict = "FAILED: " if counts["failed"] or counts["error"] else ""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(f"{os.environ['VKATTN_PART']}: {verdict}{text}\n")

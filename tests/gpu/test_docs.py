"""The Python blocks of README.md and docs/*.md, run as they are written, print what the page says they print.

The blocks of a page are one program. A block of `text` right behind a block of `python` is what that block prints; an
ellipsis in it stands for anything that depends on the device. Needs glslangValidator on the path for docs/graph.md.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<printed>.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[re.Match[str]]:
    """Return the Python blocks of a page, each with what it is to print."""
    return list(BLOCK.finditer(page.read_text(encoding="utf-8")))


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(page)]


def test_the_readme_has_an_example_with_its_output():
    assert any(block["printed"] for block in blocks(ROOT / "README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_says(device, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        line = page.read_text(encoding="utf-8")[: block.start()].count("\n") + 1
        code = "\n" * line + block["code"]  # so that a traceback names the line of the page
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), program)
        wanted = block["printed"] or ""
        matches = doctest.OutputChecker().check_output(wanted, printed.getvalue(), doctest.ELLIPSIS)
        assert matches, f"{page.name}, line {line}:\n{printed.getvalue()}\nis not\n{wanted}"

"""The pages for readers: their links lead somewhere, and the names in them exist. What they print is in tests/gpu."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import vkattn
from vkattn.cli import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "shaders").glob("*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")
NAME = re.compile(r"\bvkattn\.([A-Za-z_]+)")
COMMAND = re.compile(r"(?:^|[`(])(?:python -m )?vkattn ([a-z]+)", re.MULTILINE)
SCRIPT = re.compile(r"(?<![\w/])((?:scripts|shaders|examples|vkattn|tests|docs|benchmarks)/[\w/.-]*\w)")


def by_path(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_path)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=by_path)
def test_names_exist(page: Path) -> None:
    """Public names, commands and files of the tree, as far as a page writes them like code."""
    text = page.read_text(encoding="utf-8")
    public = {name for name in NAME.findall(text) if name not in vkattn.__all__}
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    unknown = set(COMMAND.findall(text)) - set(commands.choices)
    files = {path for path in SCRIPT.findall(text) if not (ROOT / path).exists()}
    assert (public, unknown, files) == (set(), set(), set())


def test_the_readme_lists_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / link).resolve() for link in LINK.findall(text)}
    missing = [by_path(page) for page in PAGES
               if page.name != "README.md" and page not in linked and page.parent not in linked]
    assert not missing
    assert ROOT / "shaders" / "README.md" in linked

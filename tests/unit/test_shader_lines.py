"""Lines of GLSL are as long as those of Python at most."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_line_is_longer_than_those_of_python() -> None:
    longest = int(re.search(r"line-length = (\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1])
    sources = [path for folder in ("shaders", "benchmarks/decomposed") for path in sorted((ROOT / folder).rglob("*"))
               if path.suffix in (".comp", ".glsl", ".toml")]
    assert len(sources) > 50
    lines = [(path.name, number, line) for path in sources
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    assert [f"{name}: {number}" for name, number, line in lines if len(line) > longest] == []

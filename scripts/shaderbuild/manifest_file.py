"""``vkattn/_spirv/manifest.json``: sorted, one field a line, so that a diff shows what changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from . import BuildError

Entry = dict[str, Any]


def read(path: Path) -> dict[str, Entry]:
    """Return the entries by variant name; nothing where there is no manifest yet."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["variants"])
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{path.name} is damaged ({error}). Hint: build with --force") from error


def text(entries: dict[str, Entry]) -> str:
    """Return the manifest's text."""
    variants = []
    for name in sorted(entries):
        fields = [f"      {json.dumps(key)}: {json.dumps(entries[name][key])}" for key in sorted(entries[name])]
        variants.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n    }")
    return '{\n  "variants": {\n' + ",\n".join(variants) + "\n  }\n}\n"


def write_if_changed(path: Path, content: bytes) -> bool:
    """Replace a file in one step, unless it holds `content` already; return whether it was written."""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_bytes(content)
    beside.replace(path)
    return True

"""A shader file with everything it includes: one digest that goes stale with any of it, and one flattened text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from . import BuildError

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file, whatever its line ends are."""
    return path.read_text(encoding="utf-8").splitlines()


def _resolve(name: str, includer: Path, include_dirs: Sequence[Path], where: str) -> Path:
    """Return the file that an ``#include`` names: beside the includer first, as glslang searches."""
    for folder in (includer.parent, *include_dirs):
        if (folder / name).is_file():
            return folder / name
    raise BuildError(f'{where}: error: #include "{name}": no such file')


def closure(source: Path, include_dirs: Sequence[Path], root: Path) -> list[Path]:
    """Return `source` and all files it includes, in the order they are first met.

    Every ``#include`` counts, also one inside an ``#if`` that is not taken: at worst a variant is built once too often.
    """
    found: list[Path] = []
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for number, line in enumerate(lines_of(path), 1):
            match = INCLUDE.match(line)
            if match:
                waiting.append(_resolve(match[1], path, include_dirs, f"{relative(path, root)}:{number}"))
    return found


def digest(source: Path, include_dirs: Sequence[Path], root: Path, flags: Sequence[str]) -> str:
    """Return the SHA-256 of the source, its includes (names and text) and the `flags` it is compiled with."""
    total = hashlib.sha256()
    for flag in flags:
        total.update(f"flag {flag}\n".encode())
    for path in sorted(closure(source, include_dirs, root)):
        text = "\n".join(lines_of(path)).encode()
        total.update(f"file {relative(path, root)} {len(text)}\n".encode())
        total.update(text)
    return total.hexdigest()


def flatten(
    source: Path, include_dirs: Sequence[Path], root: Path, defines: Sequence[str]
) -> tuple[str, list[tuple[str, int]]]:
    """Return the text with `defines` and every include written out, and for each line the file and line it is from.

    For compilers that can neither define symbols nor include files.
    """
    text: list[str] = []
    origin: list[tuple[str, int]] = []

    def add(path: Path, stack: tuple[Path, ...]) -> None:
        shown = relative(path, root)
        for number, line in enumerate(lines_of(path), 1):
            match = INCLUDE.match(line)
            if match:
                target = _resolve(match[1], path, include_dirs, f"{shown}:{number}")
                if target in stack:
                    raise BuildError(f'{shown}:{number}: error: #include "{match[1]}" includes itself')
                add(target, (*stack, target))
                continue
            text.append("" if "GL_GOOGLE_include_directive" in line else line)
            origin.append((shown, number))
            if line.lstrip().startswith("#version"):
                text.extend(f"#define {define} 1" for define in defines)
                origin.extend((shown, number) for _ in defines)

    add(source, (source,))
    return "\n".join(text) + "\n", origin


def relative(path: Path, root: Path) -> str:
    """Return `path` as messages and digests name it: relative to the repository, with forward slashes."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()

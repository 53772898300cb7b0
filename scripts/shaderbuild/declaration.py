"""One ``shaders/<kernel>.toml`` file: which variants a kernel has, and what they may need."""

from __future__ import annotations

import itertools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import BuildError

KEYS = {"kernel", "purpose", "axes", "exclude", "requires", "compiler", "target", "tier"}
TARGETS = ("vulkan1.1", "vulkan1.2", "vulkan1.3")
TIERS = ("base", "subgroup", "coopmat")
WORD = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*\Z")


@dataclass(frozen=True)
class Minimum:
    """The oldest compiler that a kernel can be compiled with."""

    name: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} >= {'.'.join(map(str, self.version))}"


@dataclass(frozen=True)
class Declaration:
    """A kernel as its ``.toml`` declares it.

    `variants` holds (axis, value) pairs in axis order, without the excluded ones.
    """

    kernel: str
    path: Path
    variants: tuple[tuple[tuple[str, str], ...], ...]
    requires: frozenset[str]
    minimum: Minimum | None
    target: str
    tier: str

    @property
    def source(self) -> Path:
        """The GLSL file beside the declaration."""
        return self.path.with_suffix(".comp")


def variant_name(kernel: str, axes: tuple[tuple[str, str], ...]) -> str:
    """Return the kernel's name followed by its axis values."""
    return "_".join([kernel, *(value for _, value in axes)])


def defines(axes: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the preprocessor symbols of a variant: axis ``key`` with value ``f16`` defines ``KEY_F16`` as 1."""
    return tuple(f"{axis}_{value}".upper() for axis, value in axes)


def read(path: Path, shown: str) -> Declaration:
    """Read one declaration; `shown` is the path that errors name."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BuildError(f"{shown}: {error}") from error
    unknown = sorted(set(data) - KEYS)
    if unknown:
        raise BuildError(f"{shown}: unknown key {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
    for key in ("kernel", "purpose"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise BuildError(f"{shown}: `{key}` is missing or not a text")
    if data["kernel"] != path.stem or not WORD.match(path.stem):
        raise BuildError(f"{shown}: kernel {data['kernel']!r} must be the file's stem, small letters, digits and _")
    axes = _axes(data.get("axes", {}), shown)
    return Declaration(
        kernel=data["kernel"],
        path=path,
        variants=_variants(axes, data.get("exclude", []), shown),
        requires=frozenset(_texts(data.get("requires", []), "requires", shown)),
        minimum=_minimum(data["compiler"], shown) if "compiler" in data else None,
        target=_choice(data.get("target", TARGETS[0]), TARGETS, "target", shown),
        tier=_choice(data.get("tier", TIERS[0]), TIERS, "tier", shown),
    )


def _axes(table: Any, shown: str) -> dict[str, list[str]]:
    """Return the axes, checked: axis -> its values, in the file's order."""
    if not isinstance(table, dict):
        raise BuildError(f"{shown}: `axes` must be a table")
    for axis, values in table.items():
        words = _texts(values, f"axes.{axis}", shown)
        if not words or len(set(words)) != len(words):
            raise BuildError(f"{shown}: axes.{axis} must hold at least one value, each once")
        for word in (axis, *words):
            if not WORD.match(word):
                raise BuildError(f"{shown}: axes.{axis}: {word!r} must be small letters, digits and single _")
    return table


def _variants(axes: dict[str, list[str]], excludes: Any, shown: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the product of the axes without the excluded ones."""
    kept = [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if not isinstance(excludes, list):
        raise BuildError(f"{shown}: `exclude` must be an array of tables, written [[exclude]]")
    for entry in excludes:
        if not isinstance(entry, dict) or set(entry) - {"when", "why"}:
            raise BuildError(f"{shown}: an [[exclude]] holds `when` and `why` only, not {entry!r}")
        when, why = entry.get("when"), entry.get("why")
        if not isinstance(why, str) or not why.strip():
            raise BuildError(f"{shown}: the exclusion of {when} has no `why`")
        if not isinstance(when, dict) or not when:
            raise BuildError(f"{shown}: an [[exclude]] needs a `when` table")
        any_of = {axis: value if isinstance(value, list) else [value] for axis, value in when.items()}
        for axis, values in any_of.items():
            for value in values:
                if value not in axes.get(axis, ()):
                    raise BuildError(f"{shown}: the exclusion of {when} names {axis} = {value!r}, which no axis has")
        rest = [variant for variant in kept
                if not all(dict(variant)[axis] in values for axis, values in any_of.items())]
        if len(rest) == len(kept):
            raise BuildError(f"{shown}: the exclusion of {when} excludes nothing that is left")
        kept = rest
    if not kept:
        raise BuildError(f"{shown}: every variant is excluded")
    names = [variant_name("", variant) for variant in kept]
    if len(set(names)) != len(names):
        raise BuildError(f"{shown}: two variants get the same name; choose other axis values")
    return tuple(kept)


def _minimum(text: Any, shown: str) -> Minimum:
    """Parse a text such as "glslangValidator >= 15.1"."""
    match = re.fullmatch(r"\s*([A-Za-z]\w*)\s*>=\s*(\d+(?:\.\d+)*)\s*", text) if isinstance(text, str) else None
    if match is None:
        raise BuildError(f'{shown}: `compiler` is {text!r}; write it like "glslangValidator >= 15.1"')
    return Minimum(match[1], tuple(int(part) for part in match[2].split(".")))


def _texts(value: Any, key: str, shown: str) -> list[str]:
    """Return `value` if it is a list of texts."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BuildError(f"{shown}: `{key}` must be a list of texts")
    return value


def _choice(value: Any, choices: tuple[str, ...], key: str, shown: str) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise BuildError(f"{shown}: `{key}` is {value!r}; known: {', '.join(choices)}")
    return str(value)

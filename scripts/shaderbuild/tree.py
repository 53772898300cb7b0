"""A repository's shaders as the build sees them: its folders, the variants to be had, and which of them are fresh."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import BuildError, declaration, sources
from .manifest_file import Entry


@dataclass(frozen=True)
class Tree:
    """Where a repository keeps its shaders and their SPIR-V."""

    root: Path

    @property
    def shaders(self) -> Path:
        """The folder of the ``.comp`` and ``.toml`` files."""
        return self.root / "shaders"

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """The folders in which ``#include`` looks after the includer's own."""
        return (self.shaders / "include",)

    @property
    def spirv(self) -> Path:
        """The folder of the ``.spv`` files."""
        return self.root / "vkattn" / "_spirv"

    @property
    def manifest(self) -> Path:
        """The manifest beside them."""
        return self.spirv / "manifest.json"

    def shown(self, path: Path) -> str:
        """Return `path` as messages name it."""
        return sources.relative(path, self.root)


@dataclass(frozen=True)
class Job:
    """One variant to be had: its declaration, its axes and the digest of all that it is made from."""

    declared: declaration.Declaration
    axes: tuple[tuple[str, str], ...]
    digest: str

    @property
    def name(self) -> str:
        """The variant's name."""
        return declaration.variant_name(self.declared.kernel, self.axes)


@dataclass
class Report:
    """What a run did: variants built, kept, removed, and the errors."""

    built: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def guard(self, action: Callable[[], None]) -> None:
        """Run `action`; note what it complains about."""
        try:
            action()
        except BuildError as error:
            self.errors.append(str(error))


def jobs(tree: Tree, kernels: Sequence[str], report: Report) -> list[Job]:
    """Return every declared variant, or those of `kernels`; a broken declaration goes to the report."""
    stems = {path.stem for pattern in ("*.toml", "*.comp") for path in tree.shaders.glob(pattern)}
    unknown = sorted(set(kernels) - stems)
    if unknown:
        raise BuildError(f"no kernel {', '.join(unknown)}; there are: {', '.join(sorted(stems)) or 'none'}")
    found: list[Job] = []

    def declare(stem: str) -> None:
        path = tree.shaders / f"{stem}.toml"
        for needed in (path, path.with_suffix(".comp")):
            if not needed.is_file():
                raise BuildError(f"{tree.shown(needed)} is missing; a kernel is a .comp beside a .toml")
        declared = declaration.read(path, tree.shown(path))
        for axes in declared.variants:
            flags = [declared.target, *declaration.defines(axes)]
            digest = sources.digest(declared.source, tree.include_dirs, tree.root, flags)
            found.append(Job(declared, axes, digest))

    for stem in sorted(set(kernels) or stems):
        report.guard(lambda stem=stem: declare(stem))  # type: ignore[misc]
    return found


def is_fresh(tree: Tree, job: Job, entry: Entry | None) -> bool:
    """Return whether the committed SPIR-V is that of the sources as they are now."""
    return entry is not None and entry["source"] == job.digest and damage(tree, job.name, entry) is None


def damage(tree: Tree, name: str, entry: Entry) -> str | None:
    """Return what is wrong with a committed file, if anything."""
    path = tree.spirv / entry["file"]
    if not path.is_file():
        return f"{tree.shown(path)} is missing"
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        return f"{tree.shown(path)} is not the file that the manifest describes for {name}"
    return None

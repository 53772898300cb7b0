"""Decides which variants are stale, compiles those, and checks what is committed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import BuildError, compiler, declaration, manifest_file, reflect, rules, sources
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
    return entry is not None and entry["source"] == job.digest and _damage(tree, job.name, entry) is None


def _damage(tree: Tree, name: str, entry: Entry) -> str | None:
    """Return what is wrong with a committed file, if anything."""
    path = tree.spirv / entry["file"]
    if not path.is_file():
        return f"{tree.shown(path)} is missing"
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        return f"{tree.shown(path)} is not the file that the manifest describes for {name}"
    return None


def judge(tree: Tree, job: Job, spirv: bytes) -> reflect.Interface:
    """Return the interface of a variant's SPIR-V, or raise BuildError with the rules that it breaks."""
    shown = f"{tree.shown(job.declared.source)} ({job.name})"
    try:
        interface = reflect.reflect(spirv)
    except BuildError as error:
        raise BuildError(f"{shown}: {error}") from error
    found = rules.broken(job.declared, interface)
    if found:
        raise BuildError("\n".join(f"{shown}: {sentence}" for sentence in found))
    return interface


def make(tree: Tree, job: Job, tool: compiler.Compiler) -> tuple[bytes, Entry]:
    """Compile, validate and describe one variant."""
    declared = job.declared
    spirv = tool.compile(declared.source, declaration.defines(job.axes), tree.include_dirs, declared.target)
    interface = judge(tree, job, spirv)
    compiler.validate(spirv, declared.target, f"{tree.shown(declared.source)} ({job.name})", tree.root)
    entry = {
        "axes": dict(job.axes),
        "compiler": f"{tool.name} {tool.version()}",
        "file": f"{job.name}.spv",
        "kernel": declared.kernel,
        "sha256": hashlib.sha256(spirv).hexdigest(),
        "source": job.digest,
        **interface.entry(),
    }
    return spirv, entry


def build(tree: Tree, compiler_name: str, kernels: Sequence[str] = (), force: bool = False) -> Report:
    """Bring the SPIR-V and the manifest up to date; what compiles is written even if something else does not."""
    report = Report()
    wanted = jobs(tree, kernels, report)
    committed = _committed(tree, force)
    stale = []
    for job in wanted:
        if is_fresh(tree, job, committed.get(job.name)) and not force:
            report.guard(lambda job=job: _keep(tree, job, report))  # type: ignore[misc]
        else:
            stale.append(job)
    made = _make_all(tree, stale, committed, compiler_name, report) if stale else {}
    for name, (spirv, _) in made.items():
        manifest_file.write_if_changed(tree.spirv / f"{name}.spv", spirv)
    # Read again: another build of other kernels may have ended meanwhile.
    entries = _committed(tree, force)
    entries.update({name: entry for name, (_, entry) in made.items()})
    if not report.errors:
        _remove_undeclared(tree, wanted, kernels, entries, report)
    manifest_file.write_if_changed(tree.manifest, manifest_file.text(entries).encode())
    return report


def _committed(tree: Tree, force: bool) -> dict[str, Entry]:
    """Return the manifest's entries; with `force` a damaged manifest counts as an empty one."""
    try:
        return manifest_file.read(tree.manifest)
    except BuildError:
        if not force:
            raise
        return {}


def _keep(tree: Tree, job: Job, report: Report) -> None:
    """Keep a fresh variant; its declaration may have become stricter since it was compiled."""
    judge(tree, job, (tree.spirv / f"{job.name}.spv").read_bytes())
    report.kept.append(job.name)


def _make_all(
    tree: Tree, stale: Iterable[Job], committed: dict[str, Entry], compiler_name: str, report: Report
) -> dict[str, tuple[bytes, Entry]]:
    """Compile variants, two or more at a time."""
    tool = compiler.make(compiler_name, tree.root)
    made: dict[str, tuple[bytes, Entry]] = {}

    def one(job: Job) -> None:
        if compiler.is_enough(tool, job.declared.minimum):
            made[job.name] = make(tree, job, tool)
            report.built.append(job.name)
        elif is_fresh(tree, job, committed.get(job.name)):
            spirv = (tree.spirv / f"{job.name}.spv").read_bytes()
            made[job.name] = (spirv, committed[job.name])
            report.kept.append(job.name)
        else:
            raise BuildError(
                f"{tree.shown(job.declared.source)} ({job.name}): its SPIR-V is stale and it needs "
                f"{job.declared.minimum}; here is {tool.name} {tool.version()}. Hint: set VKATTN_GLSLANG to a newer one"
            )

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(lambda job: report.guard(lambda: one(job)), stale))
    report.built.sort()
    return made


def _remove_undeclared(
    tree: Tree, wanted: Sequence[Job], kernels: Sequence[str], entries: dict[str, Entry], report: Report
) -> None:
    """Drop entries and files that no declaration asks for; of `kernels` only, if only those are built."""
    names = {job.name for job in wanted}
    for name in [name for name, entry in entries.items() if not kernels or entry["kernel"] in kernels]:
        if name not in names:
            del entries[name]
            (tree.spirv / f"{name}.spv").unlink(missing_ok=True)
            report.removed.append(name)
    if not kernels:
        for path in sorted(tree.spirv.glob("*.spv")):
            if path.stem not in names:
                path.unlink()
                report.removed.append(path.stem)


def check(tree: Tree, compiler_name: str) -> Report:
    """Change nothing; report what is stale, missing, damaged or stray, and compile again what this compiler can."""
    report = Report()
    wanted = jobs(tree, (), report)
    committed = manifest_file.read(tree.manifest)
    names = {job.name for job in wanted}
    report.errors += [f"{name} is in the manifest and in no declaration" for name in sorted(set(committed) - names)]
    strays = sorted({path.name for path in tree.spirv.glob("*") if path.suffix != ".py"})
    strays = [name for name in strays if name != tree.manifest.name and name.removesuffix(".spv") not in names]
    report.errors += [f"{tree.shown(tree.spirv / name)} belongs to no variant" for name in strays]
    if committed and tree.manifest.read_bytes() != manifest_file.text(committed).encode():
        report.errors.append(f"{tree.shown(tree.manifest)} is not in the form that the build writes")
    tool = compiler.make(compiler_name, tree.root)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        one = lambda job: _check_one(tree, job, committed.get(job.name), tool, report)  # noqa: E731
        list(pool.map(lambda job: report.guard(lambda: one(job)), wanted))
    return report


def _check_one(tree: Tree, job: Job, entry: Entry | None, tool: compiler.Compiler, report: Report) -> None:
    """Check one variant; it counts as built where it was compiled again, as kept where it could not be."""
    if entry is None:
        raise BuildError(f"{job.name} is not in the manifest. Hint: python scripts/build_shaders.py")
    damage = _damage(tree, job.name, entry)
    if damage:
        raise BuildError(f"{damage}. Hint: python scripts/build_shaders.py")
    if entry["source"] != job.digest:
        raise BuildError(f"{job.name} is older than its sources. Hint: python scripts/build_shaders.py")
    spirv = (tree.spirv / entry["file"]).read_bytes()
    described = {**entry, **judge(tree, job, spirv).entry(), "axes": dict(job.axes), "kernel": job.declared.kernel}
    if described != entry:
        wrong = sorted(key for key in described if described[key] != entry.get(key))
        raise BuildError(f"{job.name}: the manifest's {', '.join(wrong)} is not what the SPIR-V holds")
    if not compiler.is_enough(tool, job.declared.minimum):
        report.kept.append(job.name)
        return
    again, fresh = make(tree, job, tool)
    if fresh["compiler"] == entry["compiler"] and again != spirv:
        raise BuildError(f"{job.name}: {entry['compiler']} now compiles the same source to other bytes")
    report.built.append(job.name)

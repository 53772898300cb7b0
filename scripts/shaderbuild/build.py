"""Compiles what is stale into the SPIR-V folder and brings the manifest up to date."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from . import BuildError, compiler, declaration, manifest_file, reflect, rules
from .manifest_file import Entry
from .tree import Job, Report, Tree, is_fresh, jobs


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

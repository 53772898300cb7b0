"""Checks what is committed: nothing stale, missing, damaged or stray, and the same bytes when compiled again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from . import BuildError, compiler, manifest_file
from .build import judge, make
from .manifest_file import Entry
from .tree import Job, Report, Tree, damage, jobs


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

    def one(job: Job) -> None:
        _check_one(tree, job, committed.get(job.name), tool, report)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(lambda job: report.guard(lambda: one(job)), wanted))
    return report


def _check_one(tree: Tree, job: Job, entry: Entry | None, tool: compiler.Compiler, report: Report) -> None:
    """Check one variant; it counts as built where it was compiled again, as kept where it could not be."""
    if entry is None:
        raise BuildError(f"{job.name} is not in the manifest. Hint: python scripts/build_shaders.py")
    wrong = damage(tree, job.name, entry)
    if wrong:
        raise BuildError(f"{wrong}. Hint: python scripts/build_shaders.py")
    if entry["source"] != job.digest:
        raise BuildError(f"{job.name} is older than its sources. Hint: python scripts/build_shaders.py")
    spirv = (tree.spirv / entry["file"]).read_bytes()
    described = {**entry, **judge(tree, job, spirv).entry(), "axes": dict(job.axes), "kernel": job.declared.kernel}
    if described != entry:
        keys = sorted(key for key in described if described[key] != entry.get(key))
        raise BuildError(f"{job.name}: the manifest's {', '.join(keys)} is not what the SPIR-V holds")
    if not compiler.is_enough(tool, job.declared.minimum):
        report.kept.append(job.name)
        return
    again, fresh = make(tree, job, tool)
    if fresh["compiler"] == entry["compiler"] and again != spirv:
        raise BuildError(f"{job.name}: {entry['compiler']} now compiles the same source to other bytes")
    report.built.append(job.name)

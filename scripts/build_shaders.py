"""Compile the shaders that changed into vkattn/_spirv, or check what is there.

    python scripts/build_shaders.py [kernel ...] [--force] [--compiler glslangValidator | pyshaderc]
    python scripts/build_shaders.py --check

A kernel is ``shaders/<kernel>.comp`` beside ``shaders/<kernel>.toml``; shaders/README.md describes both.
VKATTN_GLSLANG and VKATTN_SPIRV_VAL name other programs than those on PATH. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shaderbuild import BuildError, build, check, compiler
from shaderbuild.tree import Tree

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="build_shaders.py", description="Compile shaders/ into vkattn/_spirv.")
    parser.add_argument("kernels", nargs="*", metavar="kernel", help="only these kernels (default: all)")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if anything is stale")
    parser.add_argument("--force", action="store_true", help="compile also what is fresh")
    names = (compiler.Glslang.name, compiler.PyShaderc.name)
    parser.add_argument("--compiler", choices=names, default=names[0])
    options = parser.parse_args(arguments)
    if options.check and (options.kernels or options.force):
        parser.error("--check takes no kernels and no --force")
    tree = Tree(root)
    try:
        if options.check:
            report = check.check(tree, options.compiler)
        else:
            report = build.build(tree, options.compiler, options.kernels, options.force)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    verb, rest = ("compiled again", "not compilable here, digests checked") if options.check else ("built", "fresh")
    print(f"{len(report.built)} {verb}, {len(report.kept)} {rest}, {len(report.removed)} removed")
    for name in report.built if not options.check else []:
        print(f"  built {name}")
    for name in report.removed:
        print(f"  removed {name}")
    for message in sorted(report.errors):
        print(message, file=sys.stderr)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())

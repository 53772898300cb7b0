"""Compile the kernels of the decomposed baseline into SPIR-V beside them, or check what is there.

    python benchmarks/decomposed/build.py [--check] [--force]

They are declared, compiled and judged as the package's own are (shaders/README.md), by the same build.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from shaderbuild import BuildError, build, check, compiler  # noqa: E402
from shaderbuild.tree import Tree  # noqa: E402


class BaselineTree(Tree):
    """The folders of the baseline in place of the package's."""

    @property
    def shaders(self) -> Path:
        """The folder of the ``.comp`` and ``.toml`` files."""
        return HERE

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """None is needed, but the compiler is told where it would be."""
        return (ROOT / "shaders" / "include",)

    @property
    def spirv(self) -> Path:
        """The folder of the ``.spv`` files."""
        return HERE / "spirv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="build.py", description="Compile the kernels of the decomposed baseline.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if anything is stale")
    parser.add_argument("--force", action="store_true", help="compile also what is fresh")
    options = parser.parse_args(arguments)
    tree = BaselineTree(ROOT)
    tree.spirv.mkdir(exist_ok=True)
    try:
        report = (check.check(tree, compiler.Glslang.name) if options.check
                  else build.build(tree, compiler.Glslang.name, (), options.force))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(report.built)} {'compiled again' if options.check else 'built'}, {len(report.kept)} kept, "
          f"{len(report.removed)} removed")
    for message in sorted(report.errors):
        print(message, file=sys.stderr)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Check that the modules of vkattn import downwards only; exit status 1 if one does not.

    python scripts/check_layers.py

LAYERS is the one table: a module is found by its own name, else by its package's. It may import what is in a lower
layer, or in its own package; never sideways, never up. The sides are packages with a list of their own. ALONE says who
may import a foreign package that only one place is to know.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vkattn"

#: Lowest first, the commands on top. L0 to L6 are the layers as one says them; some are cut finer.
#: The names stand below `vkattn.`; a package stands for all its modules that are not named themselves.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "lru", "progress"}),  # L0
    frozenset({"dtypes", "paths"}),
    frozenset({"layout"}),
    frozenset({"formats"}),
    frozenset({"mask", "caps", "caps.model"}),  # L1
    frozenset({"problem"}),
    frozenset({"validate"}),
    frozenset({"kernels"}),  # L2
    frozenset({"graph", "dispatch", "spirv"}),  # L3
    frozenset({"runtime"}),  # L4
    frozenset({"cache"}),  # L5
    frozenset({"ops"}),  # L6
    frozenset({"setup_kompute", "_kompute_recipe", "info", "check", "demo", "bench", "tune", "reach",
               "check_cases", "check_results"}),
    frozenset({"cli", "__main__"}),
)

#: Modules of the top layers that may import each other: commands, which are programs rather than a library.
PEERS = LAYERS[-2] | LAYERS[-1] | {"bench.command"}

#: Module or package -> all of vkattn that it may import, whatever the layers say.
SIDES: dict[str, frozenset[str]] = {
    "caps.probe": frozenset({"errors", "dtypes", "layout", "caps.model", "caps.matrices"}),
    "oracle": frozenset({"oracle", "mask", "dtypes", "layout", "errors"}),
}

#: Side -> the modules that may import it. Tests and benchmarks may too; they are not checked.
SIDE_USERS: dict[str, frozenset[str]] = {
    "caps.probe": frozenset({"__init__", "runtime.device", "info"}),
    "oracle": frozenset({"__init__", "oracle", "ops.selftest", "ops.selftest_split", "check", "demo", "bench"}),
}

#: Foreign package -> the only modules or packages that may import it.
ALONE: dict[str, frozenset[str]] = {
    "kp": frozenset({"runtime"}),
    "vulkan": frozenset({"caps.probe"}),
}

#: Module or package -> the only foreign packages beyond the standard library that it may import.
FOREIGN: dict[str, frozenset[str]] = {
    "oracle": frozenset({"numpy"}),
    "kernels": frozenset({"numpy"}),
    "graph": frozenset({"numpy"}),
}


@dataclass(frozen=True)
class Import:
    """One import: the dotted name that is imported, and where."""

    name: str
    line: int


def belongs(module: str, group: str) -> bool:
    """Return whether `module` is `group` or lies in it."""
    return module == group or module.startswith(f"{group}.")


def find(module: str, groups: Sequence[str] | frozenset[str] | dict[str, frozenset[str]]) -> str | None:
    """Return the longest of `groups` to which `module` belongs."""
    return max((group for group in groups if belongs(module, group)), key=len, default=None)


def layer_of(module: str) -> int | None:
    """Return the layer's number."""
    homes = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    home = find(module, frozenset(homes))
    return None if home is None else homes[home]


def imports(tree: ast.Module, package: str, known: frozenset[str]) -> Iterator[Import]:
    """Yield every import in a file, also those inside functions, except below ``if TYPE_CHECKING``.

    `package` is the dotted package of the file, `known` the dotted names of all modules: ``from .x import y`` is an
    import of the module ``x.y`` if there is one, else of ``x``. A literal ``import_module("x")`` counts as well.
    """
    unchecked = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test).split(".")[-1] == "TYPE_CHECKING"
        for part in test.body
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in unchecked:
            continue
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield Import(deeper if deeper in known else base, node.lineno)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            yield Import(str(ast.literal_eval(node.args[0])), node.lineno)


def _is_import_call(node: ast.Call) -> bool:
    """Return whether a call is ``import_module`` or ``__import__`` of a literal."""
    is_literal = bool(node.args) and isinstance(node.args[0], ast.Constant)
    return is_literal and ast.unparse(node.func).endswith(("import_module", "__import__"))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the dotted module of a ``from`` import, dots resolved."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def broken(module: str, target: str) -> str | None:
    """Return the rule that an import of `target` (dotted) in `module` (below vkattn) breaks, if any."""
    if not belongs(target, PACKAGE):
        return _broken_foreign(module, target.split(".")[0])
    if target == PACKAGE:
        return None if module in PEERS or module == "__init__" else "only commands import the package itself"
    inner = target.removeprefix(f"{PACKAGE}.")
    target_side = find(inner, SIDES)
    if target_side and not belongs(module, target_side) and find(module, SIDE_USERS[target_side]) is None:
        return f"{target_side} is for {', '.join(sorted(SIDE_USERS[target_side]))} only"
    if module == "__init__":
        return None
    side = find(module, SIDES)
    if side:
        allowed = SIDES[side]
        return None if find(inner, allowed) else f"{side} imports {', '.join(sorted(allowed))} only"
    if target_side or {module, inner} <= PEERS or module.split(".")[0] == inner.split(".")[0]:
        return None
    own, other = layer_of(module), layer_of(inner)
    if own is None or other is None:
        return f"{module if own is None else inner} is in no layer; add it to LAYERS in scripts/check_layers.py"
    return None if other < own else f"{'sideways' if other == own else 'upwards'} (LAYERS in scripts/check_layers.py)"


def _broken_foreign(module: str, package: str) -> str | None:
    """Return the rule that an import of a foreign `package` breaks, if any."""
    if package in ALONE and find(module, ALONE[package]) is None:
        return f"only {', '.join(sorted(ALONE[package]))} may import {package}"
    home = find(module, FOREIGN)
    if home and package not in FOREIGN[home] and package not in sys.stdlib_module_names:
        return f"{home} imports {', '.join(sorted(FOREIGN[home]))} and the standard library only"
    return None


def check(root: Path) -> list[str]:
    """Return ``file:line: ...`` for each import that breaks a rule."""
    files = {path: _dotted(path.relative_to(root)) for path in sorted((root / PACKAGE).rglob("*.py"))}
    known = frozenset(files.values())
    found = []
    for path, dotted in files.items():
        package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
        module = dotted.removeprefix(PACKAGE).removeprefix(".") or "__init__"
        for item in imports(ast.parse(path.read_text(encoding="utf-8")), package, known):
            reason = broken(module, item.name)
            line = f"{path.relative_to(root).as_posix()}:{item.line}: imports {item.name}: {reason}"
            if reason and line not in found:
                found.append(line)
    return found


def _dotted(path: Path) -> str:
    """Return the module that a file is."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> int:
    """Check this repository."""
    found = check(ROOT)
    for line in found:
        print(line, file=sys.stderr)
    print(f"{len(found)} imports break the layers" if found else "the layers hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

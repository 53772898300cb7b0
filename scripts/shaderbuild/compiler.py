"""The one wrapper around GLSL compilers. A compiler has a name, a version, and turns one variant into SPIR-V."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from . import BuildError, sources
from .declaration import Minimum

INSTALL = "Hint: apt-get install glslang-tools spirv-tools, or set VKATTN_GLSLANG / VKATTN_SPIRV_VAL to the programs"


class Compiler(Protocol):
    """What the build asks of a compiler."""

    name: str

    def version(self) -> str:
        """Return the version as numbers joined by dots."""

    def compile(self, source: Path, defines: Sequence[str], include_dirs: Sequence[Path], target: str) -> bytes:
        """Return SPIR-V, or raise BuildError with the file, the line and the compiler's own words."""


def is_enough(compiler: Compiler, minimum: Minimum | None) -> bool:
    """Return whether `compiler` can compile a kernel that asks for `minimum`."""
    if minimum is None:
        return True
    have = tuple(int(part) for part in re.findall(r"\d+", compiler.version()))
    return compiler.name == minimum.name and have >= minimum.version


class Glslang:
    """glslangValidator of glslang-tools, run from the repository's root so that its messages have relative paths."""

    name = "glslangValidator"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.program = find_program("VKATTN_GLSLANG", "glslangValidator")
        self._version = ""

    def version(self) -> str:
        """Return for example "12.0.0"."""
        if not self._version:
            text = run([self.program, "--version"], self.root).stdout
            match = re.search(r"Glslang Version: (?:\d+:)?(\d+\.\d+\.\d+)", text)
            if match is None:
                raise BuildError(f"{self.program} --version says {text[:200]!r}, which holds no Glslang version")
            self._version = match[1]
        return self._version

    def compile(self, source: Path, defines: Sequence[str], include_dirs: Sequence[Path], target: str) -> bytes:
        """Return SPIR-V; a warning is an error, because glslang 12 has no option that makes it one."""
        shown = sources.relative(source, self.root)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.spv"
            command = [self.program, "-V", "--target-env", target, *(f"-D{define}=1" for define in defines)]
            command += [f"-I{sources.relative(path, self.root)}" for path in include_dirs]
            result = run([*command, "-o", str(out), shown], self.root)
            said = [line for line in result.stdout.splitlines() + result.stderr.splitlines() if line.strip()]
            said = [line for line in said if line.strip() != shown]
            if result.returncode or any(line.startswith(("WARNING", "ERROR")) for line in said):
                raise BuildError("\n".join(said) or f"{shown}: {self.name} failed with status {result.returncode}")
            return out.read_bytes()


class PyShaderc:
    """PyPI's pyshaderc 1.1.3, where it is importable. Its shaderc is of 2017.

    It cannot: target Vulkan 1.1 (it writes SPIR-V 1.0), use subgroup operations, 16-bit storage or cooperative
    matrices, define symbols, or search include folders; the last two are done here by writing them into the text.
    """

    name = "pyshaderc"

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.module: Any = importlib.import_module("pyshaderc")
        except ImportError as error:
            raise BuildError(f"pyshaderc cannot be imported ({error}). Hint: leave out --compiler pyshaderc") from error

    def version(self) -> str:
        """Return for example "1.1.3"."""
        return str(self.module.__version__)

    def compile(self, source: Path, defines: Sequence[str], include_dirs: Sequence[Path], target: str) -> bytes:
        """Return SPIR-V 1.0; `target` must be vulkan1.1, which accepts it."""
        shown = sources.relative(source, self.root)
        if target != "vulkan1.1":
            raise BuildError(f"{shown}: pyshaderc cannot compile for {target}")
        text, origin = sources.flatten(source, include_dirs, self.root, defines)
        try:
            return bytes(
                self.module.compile_into_spirv(
                    text.encode(), "comp", shown, optimization="zero", warnings_as_errors=True
                )
            )
        except self.module.CompilationError as error:
            raise BuildError(_original_lines(str(error), shown, origin)) from error


def _original_lines(message: str, shown: str, origin: list[tuple[str, int]]) -> str:
    """Return `message` with each ``file:line`` of the flattened text replaced by where that line is from."""

    def place(match: re.Match[str]) -> str:
        index = int(match[1]) - 1
        return f"{origin[index][0]}:{origin[index][1]}" if 0 <= index < len(origin) else match[0]

    return re.sub(re.escape(shown) + r":(\d+)", place, message.strip())


def make(name: str, root: Path) -> Compiler:
    """Return the compiler called `name`."""
    return PyShaderc(root) if name == PyShaderc.name else Glslang(root)


def validate(spirv: bytes, target: str, shown: str, root: Path) -> None:
    """Run spirv-val on a module, or raise BuildError with its words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.spv"
        path.write_bytes(spirv)
        result = run([find_program("VKATTN_SPIRV_VAL", "spirv-val"), "--target-env", target, str(path)], root)
    if result.returncode or result.stdout.strip() or result.stderr.strip():
        raise BuildError(f"{shown}: spirv-val: {(result.stderr or result.stdout).strip()}")


def find_program(variable: str, program: str) -> str:
    """Return the program that the environment `variable` names, else the one of that name on PATH."""
    named = os.environ.get(variable)
    found = shutil.which(named or program)
    if found is None:
        where = f"{variable}={named} is no program" if named else f"{program} is not on PATH"
        raise BuildError(f"{where}. {INSTALL}")
    return found


def run(command: Sequence[str], root: Path) -> subprocess.CompletedProcess[str]:
    """Run a program from the repository's root and return its result."""
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error

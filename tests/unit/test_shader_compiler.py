"""The wrapper around compilers: versions, missing programs, and pyshaderc with a stand-in module."""

from __future__ import annotations

import stat
import sys
import types
from pathlib import Path

import pytest

from tests import emulated
from tests.shader_tree import (
    TINY_COMP,
    BuildError,
    Tree,
    build,
    compiler,
    entries,
    errors,
    make,
    make_tiny,
    put,
    reflect,
    run,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path) -> Tree:
    return make_tiny(tmp_path)


def test_a_newer_compiler_keeps_committed_spirv(tiny: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny)
    put(tiny.root, "tiny", extra='compiler = "glslangValidator >= 99.1"\n')
    assert run(tiny) == 0, "the minimum does not make the SPIR-V stale"
    assert run(tiny, "--force") == 0
    assert run(tiny, "--check") == 0
    assert "0 compiled again, 1 not compilable here" in capsys.readouterr().out
    put(tiny.root, "tiny", TINY_COMP.replace("= 1;", "= 2;"), extra='compiler = "glslangValidator >= 99.1"\n')
    assert run(tiny) == 1
    assert "(tiny): its SPIR-V is stale and it needs glslangValidator >= 99.1; here is" in capsys.readouterr().err


def test_the_kernel_of_the_graph_tests_is_its_source() -> None:
    """After a change: cd tests; glslangValidator -V --target-env vulkan1.1 scale_and_add.comp -o scale_and_add.spv."""
    glslang = compiler.Glslang(ROOT)
    compiled = glslang.compile(ROOT / "tests" / "scale_and_add.comp", [], [], "vulkan1.1")
    committed = (ROOT / "tests" / "scale_and_add.spv").read_bytes()
    if glslang.version() == "12.0.0":
        assert compiled == committed
    assert reflect.reflect(compiled) == reflect.reflect(committed), "other versions order their words differently"


@pytest.mark.parametrize("name", emulated.NAMES)
def test_emulations_have_the_interface_of_their_source(name: str) -> None:
    """After a change of the kernel or of what it includes: python tests/emulated.py."""
    committed = reflect.reflect((emulated.FOLDER / f"{name}.spv").read_bytes())
    assert committed == reflect.reflect(emulated.compiled(name))
    assert committed.capabilities == []  # that any device may run


def test_missing_programs_are_named_with_the_remedy(tiny: Tree, monkeypatch, capsys) -> None:
    monkeypatch.setenv("VKATTN_GLSLANG", "/nonexistent/glslang")
    assert run(tiny) == 1
    assert "VKATTN_GLSLANG=/nonexistent/glslang is no program. Hint: apt-get install" in capsys.readouterr().err
    monkeypatch.delenv("VKATTN_GLSLANG")
    assert run(tiny) == 0
    monkeypatch.setenv("VKATTN_GLSLANG", "/nonexistent/glslang")
    assert run(tiny) == 0, "nothing is stale, so that no compiler is needed"
    monkeypatch.delenv("VKATTN_GLSLANG")
    monkeypatch.setenv("PATH", "")
    assert run(tiny, "--force") == 1
    assert "glslangValidator is not on PATH" in capsys.readouterr().err


def test_check_compares_bytes_only_with_the_same_compiler(tiny: Tree, monkeypatch, capsys) -> None:
    run(tiny)
    real = compiler.find_program("VKATTN_GLSLANG", "glslangValidator")
    other = tiny.root / "glslang"
    wrapper = '#!/bin/sh\ncase "$1" in --version) echo "Glslang Version: 11:VERSION";; *) exec REAL -g "$@";; esac\n'
    for version, status in (("77.0.0", 0), (compiler.Glslang(tiny.root).version(), 1)):
        other.write_text(wrapper.replace("VERSION", version).replace("REAL", real))
        other.chmod(other.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("VKATTN_GLSLANG", str(other))
        assert run(tiny, "--check") == status
    assert "now compiles the same source to other bytes" in capsys.readouterr().err


def test_pyshaderc_gets_flat_text_and_its_lines_are_mapped_back(tree: Tree, monkeypatch) -> None:
    """With a stand-in module: pyshaderc 1.1.3 itself does not build on Python 3.11."""
    fake = types.ModuleType("pyshaderc")
    seen: dict[str, str] = {}

    class CompilationError(Exception):
        pass

    def compile_into_spirv(raw: bytes, stage: str, filepath: str, **options: object) -> bytes:
        seen["text"] = raw.decode()
        assert stage == "comp"
        lines = seen["text"].splitlines()
        at = next(i for i, line in enumerate(lines, 1) if "uint twice" in line)
        raise CompilationError(f"\n\nCompilation error\nWarnings: 0, Errors: 1\n{filepath}:{at}: error: oh no")

    fake.CompilationError, fake.compile_into_spirv, fake.__version__ = CompilationError, compile_into_spirv, "1.1.3"
    monkeypatch.setitem(sys.modules, "pyshaderc", fake)
    report = build.build(tree, "pyshaderc", ["scale"])
    assert "shaders/include/one.glsl:1: error: oh no" in report.errors[0]
    assert seen["text"].startswith("#version 450\n#define KEY_F")
    assert "#include" not in seen["text"]
    # What it was given compiles to the same words as the source with its includes.
    put(tree.root, "flat", seen["text"])
    assert errors(tree) == ""
    name = "scale_f16_plain" if "KEY_F16 1" in seen["text"] else "scale_f32_plain"
    shared = [(entries(tree)[variant])["push"] for variant in ("flat", name)]
    assert shared[0] == shared[1]


def test_pyshaderc_missing(tiny: Tree, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyshaderc", None)
    with pytest.raises(BuildError, match="pyshaderc cannot be imported"):
        build.build(tiny, "pyshaderc")

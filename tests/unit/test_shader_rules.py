"""What a declaration and a compiled shader must keep to, one broken rule at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shader_tree import (
    SCALE_TOML,
    TINY_COMP,
    BuildError,
    Report,
    Tree,
    compiler,
    entries,
    errors,
    jobs,
    judge,
    make_tiny,
    put,
    reflect,
    run,
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make_tiny(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("binding = 0", "binding = 1", "its bindings are [1]; they must count from 0 without a gap"),
        ("binding = 0", "set = 1, binding = 0", "not in descriptor set 0"),
        ("local_size_x = 8", "local_size_x = 128", "256 invocations; the base tier allows 128"),
        ("void", "shared uint s[4097];\nvoid", None),
        ("void", "layout(push_constant) uniform P { int a; };\nvoid", "push constant 'a' is not a uint"),
        ("void", "layout(push_constant) uniform P { uint a[3]; };\nvoid", "push constant 'a' is not a uint"),
        ("void", "layout(push_constant) uniform P { layout(offset = 4) uint a; };\nvoid", "'a' is not at byte 0"),
        ("void", "layout(constant_id = 1) const uint A = 0;\nvoid", "spec constants have ids [1]"),
        ("void", "layout(constant_id = 0) const float A = 0;\nvoid", "spec constant 'A' is not a uint"),
        ("void", "layout(constant_id = 0) const bool A = true;\nvoid", "spec constant 'A' is not a uint"),
        ("void", "layout(binding = 1) uniform U { uint a; };\nvoid", "only storage buffers can be bound"),
    ],
)
def test_rules(tree: Tree, old: str, new: str, complaint: str | None) -> None:
    comp = TINY_COMP.replace(old, new, 1)
    if complaint is None:
        comp = comp.replace("dst[0] = 1", "s[0] = 1; barrier(); dst[0] = s[0]")
        complaint = "it shares 16388 bytes; the base tier allows 16384"
    put(tree.root, "tiny", comp)
    found = errors(tree, "tiny")
    assert "shaders/tiny.comp (tiny)" in found
    assert complaint in found


def test_capabilities_must_be_required(tree: Tree) -> None:
    comp = TINY_COMP.replace("450\n", "450\n#extension GL_KHR_shader_subgroup_arithmetic : require\n")
    put(tree.root, "tiny", comp.replace("= 1;", "= subgroupAdd(1u);"))
    assert "uses GroupNonUniform, GroupNonUniformArithmetic, which `requires` in tiny.toml" in errors(tree)
    put(tree.root, "tiny", extra='requires = ["GroupNonUniform", "GroupNonUniformArithmetic"]\n')
    assert run(tree) == 0
    assert entries(tree)["tiny"]["capabilities"] == ["GroupNonUniform", "GroupNonUniformArithmetic"]
    put(tree.root, "tiny")
    assert "GroupNonUniformArithmetic" in errors(tree), "a declaration made stricter holds for fresh variants too"
    put(tree.root, "tiny", comp.replace("8", "256"), extra='tier = "subgroup"\n')
    assert run(tree) == 0


def test_a_newer_target_is_refused_for_vulkan_1_1(tree: Tree) -> None:
    put(tree.root, "tiny", extra='target = "vulkan1.2"\n')
    assert run(tree) == 0
    spirv = (tree.spirv / "tiny.spv").read_bytes()
    assert reflect.reflect(spirv).version == (1, 5)
    put(tree.root, "tiny")
    job = jobs(tree, ["tiny"], Report())[0]
    with pytest.raises(BuildError, match=r"SPIR-V 1\.5; vulkan1\.1 takes 1\.3"):
        judge(tree, job, spirv)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("purpose", "porpoise", "unknown key porpoise; known: axes, compiler, exclude"),
        ('kernel = "scale"', 'kernel = "other"', "kernel 'other' must be the file's stem"),
        ('purpose = "a kernel of the tests"', "", "`purpose` is missing"),
        ('why = "nobody asks for it"', "", "has no `why`"),
        ('why = "nobody asks for it"', 'why = "  "', "has no `why`"),
        ('mode = "odd" }', 'mode = "even" }', "names mode = 'even', which no axis has"),
        ('key = "f32", mode', 'kay = "f32", mode', "names kay = 'f32', which no axis has"),
        ("[axes]", "[axes]\ntwo = []", "axes.two must hold at least one value"),
        ('"plain", "odd"', '"odd", "odd"', "each once"),
        ('"plain", "odd"', '"Plain", "odd"', "'Plain' must be small letters"),
        ("[axes]", 'compiler = "glslang 15"\n[axes]', "write it like"),
        ("[axes]", 'target = "vulkan9"\n[axes]', "`target` is 'vulkan9'; known: vulkan1.1"),
        ("[axes]", 'tier = "gold"\n[axes]', "`tier` is 'gold'; known: base"),
        ("[axes]", 'requires = "Int8"\n[axes]', "`requires` must be a list of texts"),
        ("[axes]", "[axes", "Expected ']' at the end of a table declaration"),
        (
            "[[exclude]]",
            '[[exclude]]\nwhen = { mode = "odd" }\nwhy = "all"\n[[exclude]]',
            "excludes nothing that is left",
        ),
        ("[[exclude]]", '[[exclude]]\nwhen = { mode = "odd" }\nwhy = "x"\nwho = 1\n[[exclude]]', "`when` and `why`"),
    ],
)
def test_declarations(tree: Tree, old: str, new: str, complaint: str) -> None:
    put(tree.root, "scale", TINY_COMP, SCALE_TOML.replace(old, new, 1))
    found = errors(tree, "scale")
    assert complaint in found
    assert found.startswith("shaders/scale.toml: ")


@pytest.mark.parametrize("data", [b"", b"\x03\x02\x23\x07", b"\0" * 24, b"\x03\x02\x23\x07" + b"\0" * 17 + b"\0" * 3])
def test_what_is_not_spirv(data: bytes) -> None:
    with pytest.raises(BuildError, match="not SPIR-V"):
        reflect.reflect(data)


def test_names_must_not_be_stripped(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    stripper = tree.root / "glslang"
    real = compiler.find_program("VKATTN_GLSLANG", "glslangValidator")
    stripper.write_text(f'#!/bin/sh\ncase "$1" in --version) exec {real} --version;; *) exec {real} -g0 "$@";; esac\n')
    stripper.chmod(0o755)
    monkeypatch.setenv("VKATTN_GLSLANG", str(stripper))
    assert "its buffers are named ['']; each needs a name of its own" in errors(tree, "tiny")

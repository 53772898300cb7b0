"""What the shader build builds, keeps, removes and refuses; it needs glslangValidator and spirv-val."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shader_tree import (
    SCALE_TOML,
    TINY_COMP,
    BuildError,
    Tree,
    build,
    build_shaders,
    entries,
    errors,
    make,
    make_tiny,
    put,
    run,
)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return make(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path) -> Tree:
    return make_tiny(tmp_path)


def test_the_manifest_holds_what_the_glsl_says(tree: Tree) -> None:
    assert run(tree) == 0
    found = entries(tree)
    assert sorted(found) == ["scale_f16_odd", "scale_f16_plain", "scale_f32_plain", "tiny"]
    entry = found["scale_f16_plain"]
    assert entry["kernel"] == "scale"
    assert entry["axes"] == {"key": "f16", "mode": "plain"}
    assert entry["bindings"] == [
        {"name": "src", "access": "read", "coherent": False},
        {"name": "dst_view", "access": "readwrite", "coherent": True},
        {"name": "unused_words", "access": "write", "coherent": False},
    ]
    assert entry["push"] == ["offset", "count"]
    assert entry["spec"] == [
        {"id": 0, "name": "local_size_x", "default": 1},
        {"id": 1, "name": "BLOCK", "default": 16},
    ]
    assert entry["local_size"] == [1, 1, 1]
    assert entry["shared_bytes"] == (16 * 4 + 3) * 4 + 2 * 16
    assert entry["capabilities"] == []
    assert entry["compiler"].startswith("glslangValidator ")
    assert found["tiny"]["local_size"] == [8, 2, 1]
    assert found["scale_f16_plain"]["sha256"] != found["scale_f32_plain"]["sha256"]
    assert [path.stem for path in sorted(tree.spirv.glob("*.spv"))] == sorted(found)


def test_only_what_changed_is_built(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    run(tree)
    before = tree.manifest.read_bytes()
    assert run(tree) == 0
    assert "0 built, 4 fresh" in capsys.readouterr().out
    include = tree.shaders / "include" / "one.glsl"
    include.write_text(include.read_text() + "// a comment\n")
    assert run(tree, "--check") == 1
    assert "scale_f16_odd is older than its sources" in capsys.readouterr().err
    assert run(tree) == 0
    assert "3 built, 1 fresh" in capsys.readouterr().out
    assert tree.manifest.read_bytes() != before
    assert run(tree, "--check") == 0
    assert "4 compiled again, 0 not compilable here" in capsys.readouterr().out
    assert run(tree, "--force", "tiny") == 0
    assert "1 built, 0 fresh" in capsys.readouterr().out


def test_bytes_and_digests_do_not_depend_on_the_folder_or_line_ends(tree: Tree, tmp_path: Path) -> None:
    run(tree)
    other = Tree(tmp_path / "elsewhere")
    (other.shaders / "include").mkdir(parents=True)
    for path in tree.shaders.rglob("*.*"):
        copy = other.root / path.relative_to(tree.root)
        copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    run(other)
    assert other.manifest.read_bytes() == tree.manifest.read_bytes()


def test_removed_variants_and_strays_go(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    run(tree)
    (tree.spirv / "stray.spv").write_bytes(b"x")
    put(tree.root, "scale", toml=SCALE_TOML.replace('"plain", "odd"', '"odd"').replace('"f32"]', '"f32", "x"]'))
    assert run(tree, "--check") == 1
    complaints = capsys.readouterr().err
    assert "vkattn/_spirv/stray.spv belongs to no variant" in complaints
    assert "scale_f16_plain is in the manifest and in no declaration" in complaints
    put(tree.root, "scale", toml=SCALE_TOML.replace('"plain", "odd"', '"odd"'))
    assert run(tree) == 0
    assert sorted(entries(tree)) == ["scale_f16_odd", "tiny"]
    assert [path.name for path in sorted(tree.spirv.glob("*.spv"))] == ["scale_f16_odd.spv", "tiny.spv"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda tree: (tree.spirv / "tiny.spv").write_bytes(b"\0" * 40), "is not the file that the manifest describes"),
        (lambda tree: (tree.spirv / "tiny.spv").unlink(), "vkattn/_spirv/tiny.spv is missing"),
        (
            lambda tree: tree.manifest.write_text(tree.manifest.read_text().replace("[8, 2, 1]", "[4, 2, 1]")),
            "tiny: the manifest's local_size is not what the SPIR-V holds",
        ),
        (lambda tree: tree.manifest.write_text(tree.manifest.read_text() + " "), "not in the form that the build"),
    ],
)
def test_check_sees_damage(tiny, damage, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny)
    damage(tiny)
    assert run(tiny, "--check") == 1
    assert complaint in capsys.readouterr().err


def test_a_damaged_manifest_is_replaced_by_force_only(tiny: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny)
    tiny.manifest.write_text("{")
    assert run(tiny) == 1
    assert "--force" in capsys.readouterr().err
    assert run(tiny, "--force") == 0
    assert len(entries(tiny)) == 1


def test_an_error_names_file_line_and_the_compilers_words(tree: Tree) -> None:
    (tree.shaders / "include" / "one.glsl").write_text("\nuint twice(uint x) { return nothing; }\n")
    found = errors(tree)
    assert "ERROR: shaders/include/one.glsl:2: 'nothing' : undeclared identifier" in found
    assert str(tree.root) not in found
    assert sorted(entries(tree)) == ["tiny"], "what compiles is kept although another kernel does not"


def test_a_missing_include_names_the_line(tree: Tree) -> None:
    (tree.shaders / "include" / "one.glsl").unlink()
    assert 'shaders/include/twice.glsl:1: error: #include "one.glsl": no such file' in errors(tree)


def test_a_warning_is_an_error(tiny: Tree) -> None:
    put(tiny.root, "tiny", TINY_COMP.replace("void", "#extension GL_FOO_bar : enable\nvoid"))
    assert "WARNING: shaders/tiny.comp:4: '#extension' : extension not supported: GL_FOO_bar" in errors(tiny)


def test_a_kernel_needs_both_files_and_a_known_name(tree: Tree) -> None:
    (tree.shaders / "lone.comp").write_text(TINY_COMP)
    assert "shaders/lone.toml is missing" in errors(tree)
    with pytest.raises(BuildError, match="no kernel scall; there are: lone, scale, tiny"):
        build.build(tree, "glslangValidator", ["scall"])


def test_the_committed_shaders_are_fresh() -> None:
    """What CI asks of the repository itself."""
    assert build_shaders.main(["--check"]) == 0

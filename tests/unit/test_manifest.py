"""The manifest as the package reads it, and the SPIR-V that belongs to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vkattn import spirv
from vkattn.errors import ShaderDataError
from vkattn.kernels.manifest import Binding, load_manifest, read_manifest, spirv_folder, variant

FOLDER = Path(str(spirv_folder()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the manifest with the one shader `fill`."""
    for name in ("manifest.json", "fill.spv"):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


def test_a_variant_as_committed() -> None:
    fill = variant("fill")
    assert (fill.name, fill.kernel, dict(fill.axes)) == ("fill", "fill", {})
    assert fill.bindings == (Binding("dst", "write", True),)
    assert (fill.bindings[0].reads, fill.bindings[0].writes) == (False, True)
    assert fill.push == ("offset", "count", "value")
    assert (fill.spec, fill.capabilities) == ((), frozenset())
    assert fill.local_size == (64, 1, 1)
    assert fill.shared_bytes == 0
    assert {fill: 1}[variant("fill")] == 1, "a variant can be the key of a cache"


def test_every_variant_loads_and_its_name_follows_from_its_axes() -> None:
    for name, entry in load_manifest().items():
        assert name == "_".join([entry.kernel, *entry.axes.values()])
        assert spirv.load(entry)[:4] == b"\x03\x02\x23\x07"


def test_nothing_can_be_changed() -> None:
    with pytest.raises(TypeError):
        load_manifest()["fill"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        variant("fill").axes["a"] = "b"  # type: ignore[index]


def test_an_unknown_name_lists_near_ones() -> None:
    with pytest.raises(ShaderDataError, match=r"no shader variant 'fil'; near names: fill"):
        variant("fil")
    with pytest.raises(ShaderDataError, match="near names: attn_"):
        variant("0")


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", '{"variants": 3}', '{"variants": {"a": {}}}', '{"variants": {"a": 1}}'],
)
def test_a_damaged_manifest(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ShaderDataError, match=r"shader manifest .*manifest\.json cannot be used: .* Hint: reinstall"):
        read_manifest(tmp_path)


def test_a_binding_with_an_unknown_field(folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    data["variants"]["fill"]["bindings"][0]["extra"] = 1
    (folder / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ShaderDataError, match="extra"):
        read_manifest(folder)


def test_damaged_spirv_is_refused(folder: Path) -> None:
    fill = read_manifest(folder)["fill"]
    good = spirv.load(fill, folder)
    for bad in (good[:-4], good[:-1] + b"\xff", b""):
        (folder / "fill.spv").write_bytes(bad)
        with pytest.raises(ShaderDataError, match=r"SPIR-V of fill \(.*\) is damaged: .* Hint: reinstall"):
            spirv.load(fill, folder)
    (folder / "fill.spv").unlink()
    with pytest.raises(ShaderDataError, match="SPIR-V of fill cannot be read"):
        spirv.load(fill, folder)

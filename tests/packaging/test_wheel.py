"""The wheel that users get: all SPIR-V and its manifest, the typing marker, nothing that is not the package."""

from __future__ import annotations

import email
import json
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPIRV = ROOT / "vkattn" / "_spirv"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the source distribution with the hatchling of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_holds_every_shader_as_it_is_in_the_tree(wheel: zipfile.ZipFile) -> None:
    shaders = sorted(SPIRV.glob("*.spv"))
    assert shaders
    for path in [*shaders, SPIRV / "manifest.json"]:
        assert wheel.read(f"vkattn/_spirv/{path.name}") == path.read_bytes()


def test_manifest_names_every_shader_file() -> None:
    text = json.dumps(json.loads((SPIRV / "manifest.json").read_text(encoding="utf-8")))
    assert [path.name for path in SPIRV.glob("*.spv") if path.stem not in text] == []


def test_holds_every_module_and_the_typing_marker(wheel: zipfile.ZipFile) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vkattn").rglob("*.py")}
    assert {*modules, "vkattn/py.typed"} <= set(wheel.namelist())


def test_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0].split("-")[0] for name in wheel.namelist()}
    assert tops == {"vkattn"}
    suffixes = {Path(name).suffix for name in wheel.namelist() if name.startswith("vkattn/")}
    assert suffixes == {".py", ".spv", ".json", ".toml", ".typed"}


def test_holds_the_numbers_and_problems_that_are_data(wheel: zipfile.ZipFile) -> None:
    data = [*(ROOT / "vkattn" / "_tuning").glob("*.toml"), ROOT / "vkattn" / "bench" / "grid.toml"]
    assert len(data) == 6
    assert {path.relative_to(ROOT).as_posix() for path in data} <= set(wheel.namelist())


def test_is_pure_python(dist: Path) -> None:
    assert [path.name.endswith("-py3-none-any.whl") for path in dist.glob("*.whl")] == [True]


def test_base_dependencies_are_numpy_and_vulkan(metadata: Message) -> None:
    requires = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">=")[0] for line in requires) == ["numpy", "vulkan"]


def test_kompute_extra_is_the_version_that_setup_builds(metadata: Message) -> None:
    from vkattn._kompute_recipe import KP_VERSION
    from vkattn.runtime import kompute

    assert f"kp=={KP_VERSION}; extra == 'kompute'" in metadata.get_all("Requires-Dist", [])
    assert kompute.KP_VERSION == KP_VERSION  # what a user is told where it is missing


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "vkattn"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"


def test_has_the_command(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "vkattn = vkattn.cli:main" in wheel.read(name).decode()


def test_source_distribution_holds_what_builds_the_shaders(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shaders").rglob("*.*")}
    assert sources
    assert {*sources, "LICENSE", "README.md", "scripts/build_shaders.py", "vkattn/_spirv/manifest.json"} <= names

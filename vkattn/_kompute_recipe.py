"""How kp 0.9.0 is built from its source distribution: versions, settings and edits, as plain data.

`setup_kompute` is the only user. The digest of this file is part of the key of a cached wheel, so that a
change here makes a new wheel. Standard library only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

KP_VERSION = "0.9.0"

#: What the build environment holds. pybind11 >= 2.12 makes one wheel work with numpy 1.26 and 2; setuptools gives
#: kp's setup.py the `distutils` that Python 3.12 no longer has.
BUILD_REQUIREMENTS = ("pybind11==3.1.0", "setuptools==84.2.1")

#: Environment variables that kp's CMakeLists.txt reads as options.
BUILD_SETTINGS = {
    # Headers, fmt and pybind11 of this machine, instead of downloads from GitHub in the middle of the build.
    "KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_FMT": "OFF",
    "KOMPUTE_OPT_USE_BUILT_IN_PYBIND11": "OFF",
    # The loader negotiates versions; headers newer than the driver are no reason to stop.
    "KOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK": "ON",
    # The install rules of 0.9.0 do not work with a pybind11 that is found instead of downloaded.
    "KOMPUTE_OPT_INSTALL": "OFF",
    # Compiled in, they turn the validation layer on wherever it is installed, and do not compile with headers 1.4.
    "KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS": "ON",
}


@dataclass(frozen=True)
class Edit:
    """One replacement in a file of the unpacked sources: ``old`` must occur exactly once."""

    file: str
    old: str
    new: str
    why: str


EDITS = (
    Edit(
        "setup.py",
        "'-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON'\n",
        "'-DKOMPUTE_OPT_DISABLE_VULKAN_VERSION_CHECK=ON',\n",
        "a comma is missing: PYTHON_EXECUTABLE never reaches cmake, which then picks any Python on PATH",
    ),
    Edit(
        "setup.py",
        '"numpy<2.0.0"',
        '"numpy"',
        "built with this pybind11 it works with numpy 2, and `pip check` should say so",
    ),
    Edit(
        "CMakeLists.txt",
        "-Wall -Wextra -Wpedantic -Werror",
        "-Wall -Wextra -Wpedantic",
        "a newer compiler's new warning is no reason to stop",
    ),
)


def recipe_digest() -> str:
    """Return a short digest of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def edit_sources(source_dir: Path) -> None:
    """Apply `EDITS` to the sources in ``source_dir``; ValueError if one of them does not fit."""
    for edit in EDITS:
        path = source_dir / edit.file
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != 1:
            raise ValueError(f"{edit.file} of kp {KP_VERSION} holds {edit.old!r} {count} times, not once")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")

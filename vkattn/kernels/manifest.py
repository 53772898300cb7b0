"""The compiled variants of every kernel, as the shader build describes them in ``_spirv/manifest.json``.

Read by the declarations of the kernels, by `vkattn.spirv` and by ``vkattn info``. The build takes all of it from the
GLSL itself (scripts/build_shaders.py), so nothing here repeats what a shader says.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

from ..errors import ShaderDataError


@dataclass(frozen=True)
class Binding:
    """One storage buffer of a shader: its GLSL name, "read", "write" or "readwrite", and whether it is coherent."""

    name: str
    access: str
    coherent: bool

    @property
    def reads(self) -> bool:
        """Whether the shader may read it."""
        return self.access != "write"

    @property
    def writes(self) -> bool:
        """Whether the shader may write it."""
        return self.access != "read"


@dataclass(frozen=True)
class Spec:
    """One specialisation constant, a uint: its name, its id (also its place in the list) and its default."""

    name: str
    id: int
    default: int


@dataclass(frozen=True)
class Variant:
    """One compiled shader.

    ``bindings`` are in the order of their numbers, ``push`` names the uint words of the push constants,
    ``capabilities`` are those of SPIR-V beyond Shader; ``local_size`` and ``shared_bytes`` are those of the default
    spec constants.
    """

    name: str
    kernel: str
    axes: Mapping[str, str] = field(hash=False)
    bindings: tuple[Binding, ...]
    push: tuple[str, ...]
    spec: tuple[Spec, ...]
    capabilities: frozenset[str]
    local_size: tuple[int, int, int]
    shared_bytes: int
    file: str
    sha256: str
    compiler: str


def spirv_folder() -> Traversable:
    """Return the folder of the manifest and the ``.spv`` files, wherever vkattn is installed."""
    return importlib.resources.files("vkattn") / "_spirv"


@functools.cache
def load_manifest() -> Mapping[str, Variant]:
    """Return every variant by its name; read once."""
    return read_manifest(spirv_folder())


def variant(name: str) -> Variant:
    """Return the variant called ``name``, or raise ShaderDataError with the names nearest to it."""
    known = load_manifest()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
        raise ShaderDataError(f"There is no shader variant {name!r}; near names: {', '.join(near)}.")
    return known[name]


def read_manifest(folder: Traversable) -> Mapping[str, Variant]:
    """Read the manifest in ``folder``, or raise ShaderDataError if it is missing or damaged."""
    path = folder / "manifest.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["variants"]
        return MappingProxyType({name: _variant(name, entry) for name, entry in entries.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShaderDataError(
            f"The shader manifest {path} cannot be used: {type(error).__name__}: {error}. "
            "Hint: reinstall vkattn; in a checkout run scripts/build_shaders.py."
        ) from error


def _variant(name: str, entry: Mapping[str, Any]) -> Variant:
    """Return one entry as a value."""
    x, y, z = entry["local_size"]
    return Variant(
        name=name,
        kernel=entry["kernel"],
        axes=MappingProxyType(dict(entry["axes"])),
        bindings=tuple(Binding(**binding) for binding in entry["bindings"]),
        push=tuple(entry["push"]),
        spec=tuple(Spec(**spec) for spec in entry["spec"]),
        capabilities=frozenset(entry["capabilities"]),
        local_size=(x, y, z),
        shared_bytes=entry["shared_bytes"],
        file=entry["file"],
        sha256=entry["sha256"],
        compiler=entry["compiler"],
    )

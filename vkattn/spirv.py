"""The SPIR-V of a variant, from the package's data, its digest checked. Used by the runtime's pipelines."""

from __future__ import annotations

import hashlib
from importlib.resources.abc import Traversable

from .errors import ShaderDataError
from .kernels.manifest import Variant, spirv_folder


def load(variant: Variant, folder: Traversable | None = None) -> bytes:
    """Return the SPIR-V of ``variant``.

    Parameters
    ----------
    variant : Variant, from `vkattn.kernels.manifest.variant`.
    folder : where the ``.spv`` files are; None for those of the installed package.

    Raises
    ------
    ShaderDataError : the file is missing, or not the one that the manifest describes.
    """
    path = (folder or spirv_folder()) / variant.file
    hint = "Hint: reinstall vkattn; in a checkout run scripts/build_shaders.py."
    try:
        spirv = path.read_bytes()
    except OSError as error:
        raise ShaderDataError(f"The SPIR-V of {variant.name} cannot be read: {error}. {hint}") from error
    digest = hashlib.sha256(spirv).hexdigest()
    if digest != variant.sha256:
        raise ShaderDataError(
            f"The SPIR-V of {variant.name} ({path}) is damaged: {len(spirv)} bytes with SHA-256 {digest[:16]}..., "
            f"the manifest has {variant.sha256[:16]}.... {hint}"
        )
    return spirv

"""The shader build behind ``scripts/build_shaders.py``: GLSL and its declaration in, SPIR-V and a manifest out.

Imports the standard library only, so that it runs before anything of vkattn is installed.

================  ==============================================================
`declaration`     one ``.toml`` file: the variants of a kernel and what they need
`sources`         a shader with its includes: digest, flattened text
`compiler`        the one wrapper around GLSL compilers, and spirv-val
`spirv_module`    the words of a SPIR-V module, as names, types and constants
`reflect`         bindings, push words, spec constants ... of a compiled module
`rules`           what a compiled module must keep to
`manifest_file`   reads and writes ``manifest.json``
`tree`            the folders, the variants to be had, which are fresh
`build`           compiles what is stale
`check`           checks what is committed, for CI
================  ==============================================================
"""


class BuildError(Exception):
    """A mistake in a shader, its declaration or the tools at hand; the message is all that a user sees."""

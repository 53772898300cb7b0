"""A little repository for tests of the shader build: `scale` (variants, an include of an include) and `tiny`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import build_shaders
from shaderbuild import BuildError, build, compiler, reflect
from shaderbuild.build import judge
from shaderbuild.tree import Report, Tree, jobs

__all__ = ["BuildError", "Report", "Tree", "build", "build_shaders", "compiler", "jobs", "judge", "reflect"]

SCALE_COMP = """\
#version 450
#extension GL_GOOGLE_include_directive : require
#include "twice.glsl"
layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint BLOCK = 16;
layout(push_constant) uniform Push { uint offset; uint count; } push;
layout(std430, binding = 0) readonly buffer Src { uint src[]; };
layout(std430, binding = 1) coherent buffer Dst { uint dst[]; } dst_view;
layout(std430, binding = 1) coherent writeonly buffer Quads { uvec4 dst[]; } dst_quads;
layout(std430, binding = 2) writeonly buffer Unused { uint unused_words[]; };
shared float tile[BLOCK * 4 + 3];
shared vec3 pair[2];
#if defined(KEY_F16)
const uint FACTOR = 2;
#elif defined(KEY_F32)
const uint FACTOR = 3;
#else
#error "no key type"
#endif
void main() {
    tile[0] = 1.0;
    pair[0] = vec3(2.0);
    barrier();
    dst_view.dst[push.offset] = twice(src[push.count]) * FACTOR + uint(tile[0]) + uint(pair[0].x);
    dst_quads.dst[1] = uvec4(0);
}
"""
SCALE_TOML = """\
kernel = "scale"
purpose = "a kernel of the tests"
[axes]
key = ["f16", "f32"]
mode = ["plain", "odd"]
[[exclude]]
when = { key = "f32", mode = "odd" }
why = "nobody asks for it"
"""
TINY_COMP = """\
#version 450
layout(local_size_x = 8, local_size_y = 2) in;
layout(std430, binding = 0) writeonly buffer Dst { uint dst[]; };
void main() { dst[0] = 1; }
"""


def make_tiny(root: Path) -> Tree:
    """Write the kernel `tiny` below `root`."""
    (root / "shaders" / "include").mkdir(parents=True)
    put(root, "tiny", TINY_COMP)
    return Tree(root)


def make(root: Path) -> Tree:
    """Write the two kernels below `root`."""
    make_tiny(root)
    (root / "shaders" / "include" / "twice.glsl").write_text('#include "one.glsl"\n')
    (root / "shaders" / "include" / "one.glsl").write_text("uint twice(uint x) { return 2 * x; }\n")
    put(root, "scale", SCALE_COMP, SCALE_TOML)
    return Tree(root)


def put(root: Path, kernel: str, comp: str | None = None, toml: str | None = None, extra: str = "") -> None:
    """Write a kernel's two files; a declaration without axes where none is given."""
    if comp is not None:
        (root / "shaders" / f"{kernel}.comp").write_text(comp)
    text = f'kernel = "{kernel}"\npurpose = "a kernel of the tests"\n' if toml is None else toml
    (root / "shaders" / f"{kernel}.toml").write_text(text + extra)


def run(tree: Tree, *arguments: str) -> int:
    return build_shaders.main(arguments, tree.root)


def entries(tree: Tree) -> dict:
    return json.loads(tree.manifest.read_text())["variants"]


def errors(tree: Tree, *kernels: str) -> str:
    """Build and return what was complained about."""
    return "\n".join(build.build(tree, "glslangValidator", kernels).errors)

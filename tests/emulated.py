"""`split`'s kernel on matrix units for any device: the units are written out in the shader, for workgroups of 32.

Few devices have the units, and none that CI has; a wrong index in the kernel shows here. After a change of the kernel:
``python tests/emulated.py``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from vkattn.caps.model import DeviceInfo
from vkattn.kernels import split, split_cut, split_matrix
from vkattn.kernels.manifest import Variant, variant
from vkattn.problem import Problem
from vkattn.runtime import pipeline

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("emulated")
LANES = 32

#: Formats and widths that are tried: all code of the kernel is in one of them.
NAMES = ("int8_d64", "int8_d128", "q8_0_d64", "q4_0_d64", "q4_0_d128")


def compiled(name: str) -> bytes:
    """Return the SPIR-V of the emulation, compiled now."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from shaderbuild import compiler

    key, width = name.rsplit("_", 1)
    return compiler.Glslang(ROOT).compile(
        ROOT / "shaders" / f"{split_matrix.KERNEL}.comp",
        [f"KEY_{key.upper()}", f"WIDTH_{width.upper()}", "EMULATED"], [ROOT / "shaders" / "include"], "vulkan1.1")


def emulated(name: str) -> Variant:
    """Return the variant as the runtime is to see it: nothing but what Vulkan 1.1 has."""
    real = variant(variant_name(name))
    return dataclasses.replace(real, name=f"emulated {name}", capabilities=frozenset())


def fitting(problem: Problem, info: DeviceInfo) -> str | None:
    """Return the name of the emulation that can compute ``problem`` by `split`, or None."""
    real = split_matrix.candidate(problem, dataclasses.replace(info, subgroup_size=LANES))
    return None if real is None else next((name for name in NAMES if variant_name(name) == real.name), None)


def variant_name(name: str) -> str:
    """Return the name of the variant that is emulated."""
    return f"{split_matrix.KERNEL}_{name}_l{LANES}"


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Let `split` take the emulation for every problem that fits it."""
    kernel, other, load = emulated(name), split.shape, pipeline.load

    def shape(problem: Problem, info: DeviceInfo) -> split_cut.Shape:
        if fitting(problem, info) != name:
            return other(problem, info)
        spec = LANES, int(split_matrix.is_full(kernel, problem)), *split.constant_sizes(problem, info)
        return split_cut.Shape(kernel, split.BASE_ROWS, spec)

    def code(wanted: Variant) -> bytes:
        return (FOLDER / f"{name}.spv").read_bytes() if wanted.name == kernel.name else load(wanted)

    with mock.patch.object(split, "shape", shape), mock.patch.object(pipeline, "load", code):
        yield


if __name__ == "__main__":
    for each in NAMES:
        (FOLDER / f"{each}.spv").write_bytes(compiled(each))

"""Every way to compute one call on a device: each algorithm, with each kernel of it that the device can run.

A device chooses one kernel for an algorithm; here the others are forced, so that what another device would choose is
tried too. `VKATTN_TIERS` could not: it names tiers, and the sizes of tiles are a matter of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

from tests import emulated
from vkattn.caps.model import DeviceInfo
from vkattn.dispatch import by_name
from vkattn.kernels import fused, split, split_cut, three_pass
from vkattn.kernels.manifest import variant
from vkattn.kernels.support import device_reasons
from vkattn.problem import Problem


@dataclass(frozen=True)
class Way:
    """An algorithm, the variants it is to use, and for `split` the shape of its kernel, or which one is emulated."""

    algorithm: str
    kernels: tuple[str, ...]
    shape: split_cut.Shape | None = None
    emulation: str = ""

    def __str__(self) -> str:
        return "+".join(self.kernels)

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Let the algorithm use these variants, whatever the device."""
        if self.emulation:
            with emulated.forced(self.emulation):
                yield
            return
        kernel = variant(self.kernels[0])
        with (mock.patch.object(fused, "candidates", lambda problem, info: [(kernel, [])]) if self.shape is None else
              mock.patch.object(split, "shape", lambda problem, info: self.shape)):
            yield


def splits_of(count: int | None) -> AbstractContextManager[object]:
    """Let `split` cut the keys into so many parts, whole rounds or not; None leaves it the choice."""
    if count is None:
        return nullcontext()
    return mock.patch.multiple(split_cut, round_keys=lambda chosen: 1,
                               num_splits=lambda items, max_kv_len, info: max(1, min(count, max_kv_len)))


def ways(problem: Problem, info: DeviceInfo, *, shuffles: bool = True) -> list[Way]:
    """Return the ways to compute ``problem``; of `split`'s kernels only the device's own one unless ``shuffles``.

    Its kernel on matrix units is emulated, where there is an emulation of the format and width; the families of prefill
    on matrix units have a tolerance of their own and are left to tests/gpu/kernels/test_attn_coopmat.py.
    """
    found = [Way("three_pass", tuple(kernel.name for kernel in three_pass.variants(problem)))]
    # Of all device types a CPU has the most candidates.
    for kernel, _ in fused.candidates(problem, replace(info, device_type="cpu", tuning=None)):
        if not fused.variant_reasons(kernel, info):
            found.append(Way("fused", (kernel.name,)))
    shapes = [split.shape(problem, info)]
    if shuffles:
        shapes += [split.shape(problem, replace(info, device_type=kind, tuning=None)) for kind in ("cpu", "discrete")]
    for shape in dict.fromkeys(shapes):
        if not device_reasons(shape.kernel, info):
            found.append(Way("split", (shape.kernel.name,), shape))
    name = emulated.fitting(problem, info) if shuffles else None
    if name is not None:
        found.append(Way("split", (f"emulated {name}",), emulation=name))
    able = []
    for way in found:
        with way.forced():
            if not by_name(way.algorithm).not_supported_reasons(problem, info):
                able.append(way)
    return able

"""Dispatches as plain data: which kernel, on which buffers, with which push constants. Used by graph and runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import PlanError
from ..kernels.manifest import Variant


@dataclass(frozen=True)
class Binding:
    """One storage buffer of a dispatch, and the part of it that the dispatch touches.

    ``buffer`` is whatever the runtime binds. ``region`` is the touched part, as words (start, stop); None is all of it.
    """

    buffer: Any
    region: tuple[int, int] | None = None

    def overlaps(self, other: Binding) -> bool:
        """Whether both may touch the same words."""
        if self.buffer is not other.buffer:
            return False
        if self.region is None or other.region is None:
            return True
        return self.region[0] < other.region[1] and other.region[0] < self.region[1]


@dataclass(frozen=True)
class Dispatch:
    """One recorded run of a kernel.

    Parameters
    ----------
    variant : the compiled kernel; its declaration says which bindings it reads and writes.
    bindings : one per binding of the variant, in order.
    push : value of each push constant of the variant, by name, as unsigned 32-bit words.
    groups : workgroups in x.
    submission : dispatches with different numbers are never put into one submission; ascending.
    code : SPIR-V of a kernel that is not in the manifest; None for one that is.
    label : what the dispatch is for, such as the node of a graph; only shown.
    spec : value of each specialization constant of the variant, in order; () leaves the defaults.
    unwritten : names of bindings that the variant may write but this dispatch does not.
    """

    variant: Variant
    bindings: tuple[Binding, ...]
    push: Mapping[str, int] = field(default_factory=dict)
    groups: int = 1
    submission: int = 0
    code: bytes | None = field(default=None, repr=False)
    label: str = ""
    spec: tuple[int, ...] = ()
    unwritten: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if len(self.bindings) != len(self.variant.bindings):
            expected = ", ".join(binding.name for binding in self.variant.bindings)
            raise PlanError(f"{self.variant.name} takes {len(self.variant.bindings)} buffers ({expected}); "
                            f"got {len(self.bindings)}.")
        if set(self.push) != set(self.variant.push):
            raise PlanError(f"{self.variant.name} takes the push constants {sorted(self.variant.push)}; "
                            f"got {sorted(self.push)}.")
        if self.spec and len(self.spec) != len(self.variant.spec):
            raise PlanError(f"{self.variant.name} takes {len(self.variant.spec)} specialization constants; "
                            f"got {len(self.spec)}.")

    @property
    def push_words(self) -> np.ndarray:
        """The push constants in the order of the shader's block, uint32."""
        return np.array([self.push[name] for name in self.variant.push], np.uint32)

    def accesses(self) -> list[tuple[Binding, bool]]:
        """Return each binding with whether it is written."""
        return [(binding, declared.writes and declared.name not in self.unwritten)
                for binding, declared in zip(self.bindings, self.variant.bindings, strict=True)]

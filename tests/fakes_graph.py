"""Stand-ins for compiled shaders and dispatches, for tests of pure graph code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import Binding as Declared
from vkattn.kernels.manifest import Variant


def shader(access: Sequence[str], push: tuple[str, ...] = (), name: str = "fake") -> Variant:
    """Return a variant whose bindings have these accesses ("read", "write", "readwrite")."""
    bindings = tuple(Declared(f"binding{i}", kind, True) for i, kind in enumerate(access))
    return Variant(name, name, {}, bindings, push, (), frozenset(), (64, 1, 1), 0, f"{name}.spv", "", "")


def dispatch(*, reads: Sequence[Any] = (), writes: Sequence[Any] = (), updates: Sequence[Any] = (),
             submission: int = 0) -> Dispatch:
    """Return a dispatch that touches these buffers."""
    access = ["read"] * len(reads) + ["write"] * len(writes) + ["readwrite"] * len(updates)
    bindings = tuple(Binding(buffer) for buffer in (*reads, *writes, *updates))
    return Dispatch(shader(access), bindings, submission=submission)

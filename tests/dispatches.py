"""Dispatches that need no attention: words filled and copied."""

from __future__ import annotations

from typing import Any

from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels.manifest import variant

NO_INDEX = 0xFFFFFFFF


def fill(buffer: Any, value: int, count: int, offset: int = 0, groups: int = 2) -> Dispatch:
    return Dispatch(variant("fill"), (Binding(buffer),), {"offset": offset, "count": count, "value": value}, groups)


def copy(source: Any, target: Any, count: int, src: int = 0, dst: int = 0, params: Any = None, index: int = NO_INDEX,
         groups: int = 2) -> Dispatch:
    bindings = (Binding(params or source), Binding(source), Binding(target))
    push = {"count_index": index, "count": count, "src_offset": src, "dst_offset": dst}
    return Dispatch(variant("copy"), bindings, push, groups)

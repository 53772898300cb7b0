"""Where a recording needs a boundary: pure code that cuts a list of dispatches into segments.

Dispatches of one segment may run at the same time and in any order. A dispatch therefore starts a new segment when it
reads what one of the open segment wrote (read after write), overwrites what one read (write after read) or overwrites
what one wrote (write after write).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .node import Dispatch


def conflict(earlier: Dispatch, later: Dispatch) -> str | None:
    """Return "read after write", "write after read", "write after write", or None if the order is free."""
    for first, first_writes in earlier.accesses():
        for second, second_writes in later.accesses():
            if (first_writes or second_writes) and first.overlaps(second):
                return f"{'write' if second_writes else 'read'} after {'write' if first_writes else 'read'}"
    return None


def segments(dispatches: Iterable[Dispatch]) -> list[list[Dispatch]]:
    """Cut ``dispatches``, in their order, into the fewest runs without a conflict inside."""
    result: list[list[Dispatch]] = []
    for dispatch in dispatches:
        together = bool(result) and result[-1][0].submission == dispatch.submission
        if not together or any(conflict(earlier, dispatch) for earlier in result[-1]):
            result.append([])
        result[-1].append(dispatch)
    return result


def split_at_regions(segment: Sequence[Dispatch]) -> list[list[Dispatch]]:
    """Cut a segment further, wherever nothing but the regions of a buffer keeps two dispatches apart.

    For the validation layer, which takes every dispatch to touch the whole of its buffers. Where two dispatches do
    conflict nothing is cut, so that the layer finds what `segments` has missed.
    """
    result: list[list[Dispatch]] = []
    for dispatch in segment:
        if not result or any(_only_regions_apart(earlier, dispatch) for earlier in result[-1]):
            result.append([])
        result[-1].append(dispatch)
    return result


def _only_regions_apart(earlier: Dispatch, later: Dispatch) -> bool:
    """Whether two dispatches are free of each other, but would not be if each touched the whole of its buffers."""
    whole = (replace(dispatch, bindings=tuple(replace(binding, region=None) for binding in dispatch.bindings))
             for dispatch in (earlier, later))
    return conflict(earlier, later) is None and conflict(*whole) is not None

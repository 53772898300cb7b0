"""Where a recording needs a boundary: pure code that cuts a list of dispatches into segments.

Dispatches of one segment may run at the same time and in any order. A dispatch therefore starts a new segment when it
reads what one of the open segment wrote (read after write), overwrites what one read (write after read) or overwrites
what one wrote (write after write).
"""

from __future__ import annotations

from collections.abc import Iterable

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

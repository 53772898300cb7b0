"""Where temporaries lie: pure code that lets those whose lifetimes do not meet share memory.

A temporary lives from the first step that touches it to the last. The largest is placed first, each at the lowest
offset that is free for its whole life. Arenas are no larger than a storage buffer of the device may be.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ..errors import CapacityError

#: Temporaries start on multiples of this many words (256 bytes, the largest alignment that Vulkan lets a device ask).
ALIGN_WORDS = 64


@dataclass(frozen=True)
class Need:
    """A temporary: its key, its words, and the first and last step that touches it, both inclusive."""

    key: Hashable
    words: int
    first: int
    last: int

    def meets(self, other: Need) -> bool:
        """Whether both are alive at some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Spot:
    """A place in an arena, in words: [start, stop)."""

    arena: int
    start: int
    stop: int


def padded(words: int) -> int:
    """Return ``words`` rounded up to the alignment; nothing takes no space at all."""
    return -(-max(words, 1) // ALIGN_WORDS) * ALIGN_WORDS


def place(needs: Iterable[Need], max_words: int) -> dict[Hashable, Spot]:
    """Return a spot for each temporary; those in one arena overlap only if their lives do not meet.

    Raises
    ------
    CapacityError
        A temporary is larger than an arena may be.
    """
    placed: list[tuple[Need, Spot]] = []
    for need in sorted(needs, key=lambda need: (-need.words, need.first)):
        size = padded(need.words)
        if size > max_words:
            name = " ".join(map(str, need.key)) if isinstance(need.key, tuple) else need.key
            raise CapacityError(f"{name} needs {4 * size} bytes; the device's largest storage buffer is "
                                f"{4 * max_words} bytes. Hint: lower a capacity.")
        arena = 0
        while True:
            start = _lowest(size, [spot for other, spot in placed if spot.arena == arena and need.meets(other)])
            if start + size <= max_words:
                break
            arena += 1
        placed.append((need, Spot(arena, start, start + size)))
    return {need.key: spot for need, spot in placed}


def _lowest(size: int, taken: list[Spot]) -> int:
    """Return the lowest start of ``size`` free words beside the ``taken`` spots."""
    start = 0
    for spot in sorted(taken, key=lambda spot: spot.start):
        if start + size <= spot.start:
            break
        start = max(start, spot.stop)
    return start


def arena_words(spots: Iterable[Spot]) -> list[int]:
    """Return the words of each arena."""
    sizes: dict[int, int] = {}
    for spot in spots:
        sizes[spot.arena] = max(sizes.get(spot.arena, 0), spot.stop)
    return [sizes[arena] for arena in sorted(sizes)]

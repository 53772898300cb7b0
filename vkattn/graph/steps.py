"""A graph before it has memory: steps that touch resources, each at most one dispatch of the recording."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from ..kernels.manifest import Variant


@dataclass(frozen=True)
class Resource:
    """Words that steps read and write: a tensor, scratch, or a layer of a cache. Compared by identity of ``key``.

    ``pool`` says where they lie: "arena" (device memory that temporaries share), "input" and "output" (host-visible),
    "constant" (device memory, written once), "zeroed" (device memory, 0 between runs), "params", "cache", or "nothing".
    """

    key: Hashable
    words: int
    pool: str


#: The params buffer that runs write, and the one in the device's memory that its words are copied to where memory is
#: not one: kernels read params word after word, so what is far away costs them many times its latency.
FAR_PARAMS = Resource("params", 0, "params")
NEAR_PARAMS = Resource("params (device)", 0, "params")


@dataclass(frozen=True)
class Base:
    """A push constant that tells a kernel where a resource starts: in units of ``unit_words`` words."""

    push: str
    binding: int
    unit_words: int


@dataclass(frozen=True)
class Step:
    """A dispatch to be. ``block`` is the key of its params block; ``chunk`` counts chunks of query rows.

    ``seconds`` is a rough upper estimate of what it takes at capacity, for what must not be one submission.
    ``unwritten`` names bindings that the variant may write but this step does not.
    ``mode`` is "short" or "long" for a step of one way to compute a node, which every run chooses by its live lengths;
    "" for one that always runs.
    """

    node: str
    variant: Variant
    resources: tuple[Resource, ...]
    bases: tuple[Base, ...]
    block: Hashable = None
    push: Mapping[str, int] = field(default_factory=dict)
    groups: int = 1
    chunk: int = 0
    mode: str = ""
    spec: tuple[int, ...] = ()
    code: bytes | None = field(default=None, repr=False)
    unwritten: frozenset[str] = frozenset()
    seconds: float = 0.0

    def touched(self) -> list[tuple[Resource, bool]]:
        """Return each resource with whether it is written."""
        return [(resource, declared.writes and declared.name not in self.unwritten)
                for resource, declared in zip(self.resources, self.variant.bindings, strict=True)]


def submissions(steps: Iterable[Step], most_seconds: float) -> list[int]:
    """Return the number of the submission of each step: none is estimated to take longer, unless one step does."""
    numbers, spent, number = [], 0.0, 0
    for step in steps:
        if spent and spent + step.seconds > most_seconds:
            spent, number = 0.0, number + 1
        spent += step.seconds
        numbers.append(number)
    return numbers

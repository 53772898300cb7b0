"""What the dispatches of a graph took on the device, for people and for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, overload

from ..errors import OptionError


class Span(NamedTuple):
    """One dispatch: the node of the graph that it belongs to, its kernel variant, nanoseconds on the device."""

    node: str
    variant: str
    nanoseconds: float


class Timings(Sequence[Span]):
    """The dispatches of one run, in their order: a sequence of `Span`, and what they add up to.

    Each dispatch is timed by itself: none overlaps the next, so the sum is at least what an untimed run takes.

    Example
    -------
    >>> timings = Timings([Span("sdpa", "kv_append_f16_f16", 2048.0), Span("sdpa", "attn_softmax", 4096.0)])
    >>> timings.total_ns
    6144.0
    >>> print(timings)
    node  variant            microseconds
    sdpa  kv_append_f16_f16          2.05
    sdpa  attn_softmax               4.10
    total of 2 dispatches            6.14
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = tuple(spans)

    @classmethod
    def median_of(cls, runs: Sequence[Timings]) -> Timings:
        """Return each dispatch's median over ``runs`` of one recording; the total is then the sum of the medians."""
        if len({tuple(span[:2] for span in run) for run in runs}) != 1:
            raise OptionError("`runs` must be timings of one recording, at least one of them.")
        return cls(same[0]._replace(nanoseconds=median(span.nanoseconds for span in same))
                   for same in zip(*runs, strict=True))

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    def __repr__(self) -> str:
        return f"Timings({list(self._spans)!r})"

    @property
    def total_ns(self) -> float:
        """Nanoseconds of all dispatches."""
        return float(sum(span.nanoseconds for span in self))

    def by_node(self) -> dict[str, float]:
        """Return the nanoseconds of each node, in the order of their first dispatches."""
        return self._sums(0)

    def by_variant(self) -> dict[str, float]:
        """Return the nanoseconds of each kernel variant, in the order of their first dispatches."""
        return self._sums(1)

    def _sums(self, field: int) -> dict[str, float]:
        sums: dict[str, float] = {}
        for span in self:
            name = str(span[field])
            sums[name] = sums.get(name, 0.0) + span.nanoseconds
        return sums

    def as_dict(self) -> dict[str, object]:
        """Return all of it for JSON."""
        return {"total_ns": self.total_ns, "by_variant_ns": self.by_variant(), "by_node_ns": self.by_node(),
                "dispatches": [span._asdict() for span in self]}

    def __str__(self) -> str:
        """Return a table: a line for each dispatch, and each variant's sum if some variant has several."""
        total = f"total of {len(self)} dispatch{'' if len(self) == 1 else 'es'}"
        wide = max(len(name) for name in ("node", *(span.node for span in self)))
        rows = [(f"{span.node:<{wide}}  {span.variant}", span.nanoseconds) for span in self]
        sums = self.by_variant()
        if len(sums) < len(self):
            rows += [(f"{'all':<{wide}}  {name}", nanoseconds) for name, nanoseconds in sums.items()]
        rows.append((total, self.total_ns))
        title = f"{'node':<{wide}}  variant"
        width = max(len(label) for label in (title, *(label for label, _ in rows)))
        return "\n".join([f"{title:<{width}}  microseconds",
                          *(f"{label:<{width}}  {nanoseconds / 1e3:12.2f}" for label, nanoseconds in rows)])

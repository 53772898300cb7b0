"""What a run found, as rows: for people, for JSON, and to compare one run with another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .clock import Spread
from .problems import BenchProblem
from .roofline import Roofline

#: The form of the JSON document.
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One problem by one runner ("vkattn split", "torch cuda flash"): times, or the reason why there are none.

    ``device_ns`` is of dispatches each behind a boundary, ``streamed_ns`` of dispatches back to back. ``limit_ns`` is
    the roofline's for the arithmetic that the runner uses, None if that is not known; ``worst_share`` the largest error
    of a sampled row as a share of its bound.
    """

    problem: dict[str, Any]
    runner: str
    reason: str = ""
    device_ns: dict[str, float] | None = None
    call_ns: dict[str, float] | None = None
    limit_ns: float | None = None
    worst_share: float | None = None
    streamed_ns: dict[str, float] | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What the same row of another run is found by."""
        return str(self.problem["name"]), self.runner

    @property
    def time_ns(self) -> float | None:
        """The median of the device's time, else of the host's, else None."""
        times = self.device_ns or self.call_ns
        return times["median"] if times else None

    @property
    def share_of_limit(self) -> float | None:
        """How near the device's time is to the roofline: 1 is there."""
        if self.device_ns is None or not self.limit_ns:
            return None
        return self.limit_ns / self.device_ns["median"]


def row(problem: BenchProblem, runner: str, roofline: Roofline, *, device_ns: Spread | None = None,
        call_ns: Spread | None = None, streamed_ns: Spread | None = None, reason: str = "",
        worst_share: float | None = None, uses_matrix_units: bool | None = False, **details: Any) -> Row:
    """Return the row of one outcome; ``uses_matrix_units`` None is not known."""
    has_limit = not reason and uses_matrix_units is not None
    limit_ns = roofline.limit_ns(problem, bool(uses_matrix_units)) if has_limit else None
    return Row(problem.as_dict(), runner, reason, device_ns.as_dict() if device_ns else None,
               call_ns.as_dict() if call_ns else None, limit_ns, worst_share,
               streamed_ns.as_dict() if streamed_ns else None, details)


def document(header: dict[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a run as what `read` takes."""
    return {"format": FORMAT, **header, "rows": [vars(row) for row in rows]}


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the header and the rows of a run, or raise OptionError if the file holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise OptionError(f"{path} has the form {data['format']!r}; this vkattn reads {FORMAT}.")
        rows = [Row(**entry) for entry in data.pop("rows")]
        for row in rows:
            _ = row.key, row.problem["length"], row.time_ns  # whoever reads rows takes these to be there
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{path} is no result of vkattn bench --json: {type(error).__name__}: {error}.") from error
    return data, rows


def microseconds(nanoseconds: float | None) -> str:
    """Return a time with three digits that mean something, or a dash."""
    if nanoseconds is None:
        return "-"
    value = nanoseconds / 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as lines of text, the problems in their order."""
    lines = []
    wide = max((len(row.runner) for row in rows), default=0)
    for index, row in enumerate(rows):
        if not index or rows[index - 1].problem["name"] != row.problem["name"]:
            limit = next((other.limit_ns for other in rows if other.problem == row.problem and other.limit_ns), None)
            lines.append(f"{row.problem['name']}   limit {microseconds(limit)} us")
        if row.reason:
            lines.append(f"    {row.runner:<{wide}}  {row.reason}")
            continue
        parts = [f"{label} {microseconds(times['median'])}" + (f" ({microseconds(times['low'])} .. "
                 f"{microseconds(times['high'])})" if label == "device" else "")
                 for label, times in (("device", row.device_ns), ("back to back", row.streamed_ns),
                                      ("call", row.call_ns)) if times]
        if row.share_of_limit is not None:
            which = "the limit" if row.limit_ns == limit else f"its limit, {microseconds(row.limit_ns)} us"
            parts.append(f"{100 * row.share_of_limit:.1f}% of {which}")
        lines.append(f"    {row.runner:<{wide}}  {', '.join(parts)}")
    return "\n".join(lines)


def compare(before: Sequence[Row], after: Sequence[Row]) -> str:
    """Return a line for each row of both runs: the times, and how many times as long the second took."""
    old = {row.key: row for row in before}
    lines = [f"{'problem':<44} {'runner':<22} {'before us':>10} {'after us':>10} {'ratio':>6}"]
    for row in after:
        other = old.pop(row.key, None)
        if other is None or row.time_ns is None or other.time_ns is None:
            continue
        if (row.device_ns is None) != (other.device_ns is None):
            continue  # a device's time says nothing of a host's
        ratio = row.time_ns / other.time_ns
        mark = "" if _overlap(row, other) else "  faster" if ratio < 1 else "  slower"
        lines.append(f"{row.key[0]:<44} {row.runner:<22} {microseconds(other.time_ns):>10} "
                     f"{microseconds(row.time_ns):>10} {ratio:>6.2f}{mark}")
    return "\n".join(lines)


def _overlap(one: Row, other: Row) -> bool:
    """Return whether the middle halves of both rows' times meet, so that the difference may be chance."""
    first, second = one.device_ns or one.call_ns, other.device_ns or other.call_ns
    return bool(first and second and first["low"] <= second["high"] and second["low"] <= first["high"])

"""``vkattn bench --plot``: time against length, a line for each runner, with the limit of the roofline below them.

matplotlib is an extra (``pip install vkattn[plot]``); it is imported here and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .results import Row

#: Problems that differ in length alone share a panel if there are at least this many lengths.
LEAST_LENGTHS = 2


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return, by what problems share, the points (length, microseconds) of each runner and of the limit."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row.time_ns is None:
            continue
        name, length = str(row.problem["name"]), int(row.problem["length"])
        lines = found.setdefault(" ".join(name.replace(f"S{length} ", "").split()), {})
        lines.setdefault(row.runner, {})[length] = row.time_ns / 1e3
        if row.limit_ns:
            limit = lines.setdefault("limit", {})
            limit[length] = min(limit.get(length, float("inf")), row.limit_ns / 1e3)
    return {title: {runner: sorted(points.items()) for runner, points in lines.items()}
            for title, lines in found.items() if len(lines.get("limit", {})) >= LEAST_LENGTHS}


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw every panel into one file; OptionError if matplotlib is missing or there is nothing to draw."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise OptionError("--plot needs matplotlib. Hint: pip install matplotlib") from error
    drawn = panels(rows)
    if not drawn:
        raise OptionError("there is nothing to plot: no two problems differ in length alone.")
    columns = min(3, len(drawn))
    lines_of_panels = -(-len(drawn) // columns)
    figure = pyplot.Figure(figsize=(5 * columns, 4 * lines_of_panels), layout="constrained")
    figure.suptitle(title)
    runners = [runner for lines in drawn.values() for runner in lines if runner != "limit"]
    colours = {runner: f"C{index % 10}" for index, runner in enumerate(dict.fromkeys(runners))}
    for index, (name, found) in enumerate(drawn.items()):
        axes = figure.add_subplot(lines_of_panels, columns, index + 1, xscale="log", yscale="log", title=name,
                                  xlabel="length (tokens)", ylabel="microseconds")
        axes.set_xscale("log", base=2)
        for runner, points in found.items():
            style = ({"color": "black", "linestyle": "--"} if runner == "limit" else
                     {"color": colours[runner], "marker": "o", "markersize": 3})
            axes.plot(*zip(*points, strict=True), label=runner, **style)
        axes.legend(fontsize=6)
    figure.savefig(path)

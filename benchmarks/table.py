"""Prints the results of the benchmarks as Markdown tables, or puts them into a page between its markers.

    python benchmarks/table.py RESULTS.json [MORE.json ...] [--into docs/performance.md --section NAME]

The files are those of ``vkattn bench --out`` and of ``bench_decomposed.py --json``, of one device. With ``--into``,
each table replaces what stands between ``<!-- begin NAME table -->`` and ``<!-- end NAME table -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from targets import targets_table

from vkattn.bench.results import Row, microseconds, read

#: Peers in the order of their columns.
PEERS = ("torch cuda flash", "torch cuda cudnn", "torch cuda efficient", "torch cuda math", "torch cpu", "numpy",
         "aule-attention", "computeml")


def limits_line(header: Mapping[str, Any]) -> str:
    """Return what was measured and how fast the device copies and computes."""
    roofline = header["roofline"]
    matrix = (f"{roofline['matrix'] / 1e3:.0f} TFLOP/s on matrix units ({roofline['matrix_source']})"
              if roofline["matrix"] else f"matrix units not measured: {roofline['matrix_source']}")
    return (f"{header['device']}, {header['driver']}, {header['host_cores']} cores of the host. Measured in this run: "
            f"copy {roofline['copy']:.4g} GB/s, float32 {roofline['fma'] / 1e3:.3g} TFLOP/s, {matrix}.")


def grid_table(rows: Sequence[Row], kind: str) -> str:
    """Return a line for each problem: the limit, vkattn's algorithms, then peers."""
    chosen = [row for row in rows if row.problem["kind"] == kind]
    ways = list(dict.fromkeys(row.runner for row in chosen if row.runner.startswith("vkattn ") and row.time_ns))
    peers = [name for name in PEERS if any(row.runner == name and row.time_ns for row in chosen)]
    has_streamed = any(row.streamed_ns for row in chosen)
    heads = [*ways, *(["back to back"] if has_streamed else []), "of the limit", "whole call", *peers]
    lines = [f"| {kind} | limit | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    by_problem: dict[str, dict[str, Row]] = {}
    for row in chosen:
        by_problem.setdefault(row.problem["name"].removeprefix(f"{kind} "), {})[row.runner] = row
    for name, found in by_problem.items():
        own = [row for runner, row in found.items() if runner in ways and row.device_ns]
        if not own:
            continue
        best = min(own, key=lambda row: (not row.details.get("auto"), row.time_ns or 0.0))
        calls = [row.call_ns["median"] for row in own if row.call_ns]
        cells = [_cell(found.get(way), found.get(way) is not None and bool(found[way].details.get("auto")))
                 for way in ways]
        if has_streamed:
            cells.append(microseconds(best.streamed_ns["median"] if best.streamed_ns else None))
        cells += [f"{100 * (best.share_of_limit or 0):.0f}%", microseconds(min(calls, default=None))]
        cells += [_cell(found.get(peer)) for peer in peers]
        lines.append(f"| {name} | {microseconds(best.limit_ns)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row | None, is_auto: bool = False) -> str:
    """Return the device's time, bold if a user gets it; the host's in brackets if there is no other; a dash if none."""
    if row is None or row.time_ns is None:
        return "-"
    time = microseconds(row.time_ns)
    return f"({time})" if not row.device_ns else f"**{time}**" if is_auto else time


def left_out(rows: Sequence[Row]) -> str:
    """Return why rows are missing, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason and row.runner.startswith("vkattn"):
            reasons.setdefault(row.reason, []).append(f"{row.problem['name']} by {row.runner}")
    return "\n".join(f"- {reason} ({len(names)}: {names[0]}{' ...' if len(names) > 1 else ''})"
                     for reason, names in reasons.items()) or "- nothing"


def layers_table(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the decode of all layers: general operators, three passes, one kernel."""
    lines = ["| length | by | dispatches | all dispatches | whole recording | whole call | times `split` |",
             "|---" * 7 + "|"]
    for entry in layers:
        same = [other for other in layers if other["problem"] == entry["problem"] and other["way"] == "split"]
        ratio = entry["device_ns"]["median"] / same[0]["device_ns"]["median"] if same else float("nan")
        times = " | ".join(microseconds(entry[which]["median"]) for which in ("device_ns", "recording_ns", "call_ns"))
        lines.append(f"| {entry['problem']['length']} | {entry['way']} | {entry['dispatches']} | {times} | "
                     f"{ratio:.2f} |")
    return "\n".join(lines)


def load(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Row], list[dict[str, Any]]]:
    """Return the header, the rows and the layers of all files."""
    header: dict[str, Any] = {}
    rows: list[Row] = []
    layers: list[dict[str, Any]] = []
    for path in paths:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "decomposed" in data:
            layers += data["decomposed"]
        else:
            header, more = read(path)
            rows += more
    return header, rows, layers


def tables(header: Mapping[str, Any], rows: Sequence[Row], layers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return every table by its name."""
    found = {}
    if rows:
        found = {"limits": limits_line(header), "decode": grid_table(rows, "decode"),
                 "prefill": grid_table(rows, "prefill"), "missing": left_out(rows)}
    if layers:
        found["layers"] = layers_table(layers)
    if rows or layers:
        found["targets"] = targets_table(rows, layers)
    return found


def insert(page: str, section: str, found: Mapping[str, str]) -> str:
    """Return ``page`` with each table between its markers; a table without markers is left out."""
    for name, text in found.items():
        begin, end = (f"<!-- {which} {section} {name} -->" for which in ("begin", "end"))
        made = f"{begin}\n{text}\n{end}"
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, made=made: made, page, flags=re.DOTALL)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Markdown tables of benchmark results.")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, metavar="PAGE")
    parser.add_argument("--section", default="gpu", metavar="NAME")
    args = parser.parse_args(arguments)
    found = tables(*load(args.results))
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(insert(page, args.section, found), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in found.items()))


if __name__ == "__main__":
    main()

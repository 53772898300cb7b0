"""The figures that the project set itself for an NVIDIA H200, as data, and what a run says of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vkattn.bench.results import Row, microseconds

DECODE = "decode 24/8 D128 S{} B1 float16"
PREFILL = "prefill 24/8 D128 S{} B1 float16 causal"


@dataclass(frozen=True)
class Target:
    """At most ``factor`` times a bound: of another runner, of another problem, of the roofline, or nanoseconds.

    Parameters
    ----------
    problem, runner : the row that is judged
    what : the target in words
    factor : times the bound
    bound : runner of the same problem, or of ``of_problem``; "limit" for the roofline; or nanoseconds
    """

    problem: str
    runner: str
    what: str
    factor: float
    bound: str | float
    of_problem: str = ""


TARGETS = (
    Target(DECODE.format(4096), "vkattn auto", "1.25 x cuDNN", 1.25, "torch cuda cudnn"),
    Target(DECODE.format(32768), "vkattn auto", "1.0 x cuDNN", 1.0, "torch cuda cudnn"),
    Target(DECODE.format(131072), "vkattn auto", "92% of the copy bandwidth", 1 / 0.92, "limit"),
    Target("decode 24/8 D128 S8192 B8 float16", "vkattn auto", "1.05 x cuDNN", 1.05, "torch cuda cudnn"),
    Target("decode 24/8 D128 S131072 B1 int8", "vkattn auto", "0.60 x float16", 0.60, "vkattn auto",
           DECODE.format(131072)),
    Target("decode 24/8 D128 S131072 B1 q4_0", "vkattn auto", "0.40 x float16", 0.40, "vkattn auto",
           DECODE.format(131072)),
    Target(PREFILL.format(2048), "vkattn coopmat2", "1.25 x flash", 1.25, "torch cuda flash"),
    Target(PREFILL.format(8192), "vkattn coopmat2", "1.25 x flash", 1.25, "torch cuda flash"),
    Target(PREFILL.format(2048), "vkattn coopmat", "2.2 x flash", 2.2, "torch cuda flash"),
    Target(PREFILL.format(2048), "vkattn coopmat", "half of llama.cpp's 639 us", 0.5, 639e3),
    Target(PREFILL.format(8192), "vkattn coopmat", "2.2 x flash", 2.2, "torch cuda flash"),
    Target(PREFILL.format(2048), "vkattn fused", "1150 us", 1.0, 1150e3),
    Target(PREFILL.format(8192), "vkattn fused", "15.9 ms", 1.0, 15.9e6),
    Target("prefill 32/32 D64 S4096 B4 float32 full", "vkattn fused", "1.3 x efficient", 1.3, "torch cuda efficient"),
)

#: Decode of all layers in one recording: how many times as fast `split` must be at 2048 tokens.
LAYERS_LENGTH = 2048
LAYERS_TARGETS = {"decomposed": 5.0, "three_pass": 2.0}


def other_names(row: Row) -> list[str]:
    """Return what else a row is called: by being the automatic choice, and by the matrix kernels that it used."""
    names = ["vkattn auto"] if row.details.get("auto") else []
    kernels = row.details.get("variants", [])
    return names + [f"vkattn {name}" for name in ("coopmat", "coopmat2")
                    if any(kernel.startswith(f"attn_{name}_") for kernel in kernels)]


def judge(target: Target, rows: Mapping[tuple[str, str], Row]) -> tuple[str, str, str]:
    """Return the time, the bound, and "reached", "not reached" or why it cannot be said."""
    row = rows.get((target.problem, target.runner))
    if row is None or row.device_ns is None:
        return "-", "-", row.reason if row is not None else "not measured"
    time = row.device_ns["median"]
    if target.bound == "limit":
        bound = row.limit_ns
    elif isinstance(target.bound, str):
        other = rows.get((target.of_problem or target.problem, target.bound))
        if other is None or other.device_ns is None:
            return microseconds(time), "-", f"{target.bound}: {other.reason if other is not None else 'not measured'}"
        bound = other.device_ns["median"]
    else:
        bound = target.bound
    if bound is None:
        return microseconds(time), "-", "the limit was not measured"
    most = target.factor * bound
    if time <= most or row.streamed_ns is None:
        return microseconds(time), microseconds(most), "reached" if time <= most else "not reached"
    streamed = row.streamed_ns["median"]
    said = "reached" if streamed <= most else "not reached"
    return microseconds(time), microseconds(most), f"not reached; back to back ({microseconds(streamed)}) {said}"


def targets_table(rows: Sequence[Row], layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the targets as a Markdown table."""
    found = {row.key: row for row in rows}
    found |= {(row.key[0], name): row for row in rows for name in other_names(row)}
    lines = ["| problem | by | at most | us | bound us | |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        time, bound, verdict = judge(target, found)
        lines.append(f"| {target.problem} | {target.runner} | {target.what} | {time} | {bound} | {verdict} |")
    times = {entry["way"]: entry["device_ns"]["median"] for entry in layers
             if entry["problem"]["length"] == LAYERS_LENGTH}
    for way, factor in LAYERS_TARGETS.items():
        if {way, "split"} <= times.keys():
            ratio = times[way] / times["split"]
            verdict = "reached" if ratio >= factor else "not reached"
            lines.append(f"| all layers, decode S{LAYERS_LENGTH} | split | {way} / {factor:g} | "
                         f"{microseconds(times['split'])} | {microseconds(times[way] / factor)} | {verdict}: "
                         f"{ratio:.1f} times as fast |")
    return "\n".join(lines)

"""``vkattn tune``: measures the numbers of `vkattn.caps.tuning` on a device, one after another, and keeps the best.

A number is changed only if the problems that depend on it get faster by more than `GAIN` in the geometric mean, and do
so a second time; what the others are meanwhile is what was found for them before. Results stay right whatever the
numbers are; each graph is compared with the oracle all the same.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..caps.tuning import CHOICES, Tuning, user_path, write_table
from ..errors import DeviceError, OptionError
from ..paths import write_whole
from ..progress import Progress
from ..runtime.device import Device
from .case import POOL_SEED, Case
from .inputs import Pool
from .problems import BenchProblem

#: A candidate must be faster than what there is by this part.
GAIN = 0.02

#: Seconds of timed work for each candidate and problem.
SECONDS = 0.1


@dataclass(frozen=True)
class Knob:
    """One number: its name, the candidates in the place of ``value``, and by which algorithm its problems are timed."""

    name: str
    candidates: Callable[[Any], Sequence[Any]]
    kind: str
    algorithm: str


def around(value: float) -> Sequence[Any]:
    """Return a number's neighbours: half of it to twice it, none below the least that is allowed."""
    found = (value / 2, value / math.sqrt(2), value * math.sqrt(2), value * 2)
    return [max(1, round(number)) if isinstance(value, int) else max(0.01, round(number, 2)) for number in found]


def opposite(value: bool) -> Sequence[bool]:
    """Return the other one."""
    return (not value,)


#: In the order in which they are measured.
KNOBS = (
    Knob("split_subgroups", opposite, "decode", "split"),
    Knob("split_lanes", opposite, "decode", "split"),
    Knob("split_threads", lambda value: CHOICES["split_threads"], "decode", "split"),
    Knob("split_groups", around, "decode", "split"),
    Knob("split_root_divisor", around, "decode", "split"),
    Knob("fused_subgroups", opposite, "prefill", "fused"),
    Knob("fused_large_tiles", opposite, "prefill", "fused"),
    Knob("grid_groups", around, "prefill", "fused"),
)


def tune_problems(device_type: str, is_quick: bool) -> dict[str, list[BenchProblem]]:
    """Return the problems that are timed, by their kind."""
    is_small = is_quick or device_type == "cpu"
    decode, prefill = ((512, 2048), (256,)) if is_small else ((4096, 32768, 131072), (2048,))
    model = ("SmolLM2", 9, 3, 64) if is_small else ("Llama-3.2-3B", 24, 8, 128)
    return {kind: [BenchProblem(kind, *model, length) for length in lengths]
            for kind, lengths in (("decode", decode), ("prefill", prefill))}


def best_of(start: Tuning, measure: Callable[[Knob, Tuning, bool], float],
            say: Callable[[Knob, Any, float, bool], None] = lambda *_: None) -> Tuning:
    """Return ``start`` with every number replaced whose candidate ``measure`` finds clearly faster, twice.

    ``measure`` returns a mean time; its last argument is whether to measure again what it has measured before.
    """
    current = start
    for knob in KNOBS:
        base, value = measure(knob, current, False), getattr(current, knob.name)
        say(knob, value, base, True)
        times = {}
        for candidate in dict.fromkeys(knob.candidates(value)):
            if candidate != value:
                times[candidate] = measure(knob, replace(current, **{knob.name: candidate}), False)
                say(knob, candidate, times[candidate], False)
        chosen = min(times, key=lambda candidate: times[candidate], default=value)
        other = replace(current, **{knob.name: chosen})
        if times and times[chosen] < base * (1 - GAIN):
            base, again = measure(knob, current, True), measure(knob, other, True)  # what else ran may have disturbed
            say(knob, chosen, again, False)
            current = other if again < base * (1 - GAIN) else current
    return current


class Bench:
    """Times the problems of each kind on a device under any tuning; the inputs are made once."""

    def __init__(self, device: Device, is_quick: bool) -> None:
        self.device = device
        self._pool = Pool(POOL_SEED)
        self._problems = tune_problems(device.info.device_type, is_quick)
        self._cases: dict[str, list[Case]] = {}
        self._known: dict[tuple[str, Tuning], float] = {}

    def __call__(self, knob: Knob, tuning: Tuning, again: bool) -> float:
        """Return the geometric mean of the problems' nanoseconds."""
        key = (knob.kind, tuning)
        if again or key not in self._known:
            self.device.info = replace(self.device.info, tuning=tuning)
            if knob.kind not in self._cases:
                self.close()
                self._cases[knob.kind] = [Case(self.device, problem, knob.algorithm, self._pool)
                                          for problem in self._problems[knob.kind]]
            self._known[key] = math.exp(sum(self._log_time(case) for case in self._cases[knob.kind])
                                        / len(self._cases[knob.kind]))
        return self._known[key]

    def _log_time(self, case: Case) -> float:
        case.rebuild()
        share = case.worst_share()
        if not share <= 1:
            raise DeviceError(f'"{self.device.info.name}" computes {case.problem.name} wrongly: {share:.3g} times its '
                              "bound. Hint: vkattn check tells which kernel it is.")
        return math.log(case.device_times(SECONDS).median)

    def close(self) -> None:
        """Free the inputs."""
        for case in (case for cases in self._cases.values() for case in cases):
            case.close()
        self._cases = {}


def main(args: argparse.Namespace) -> int:
    """Measure, print, and write the user's file; return 2 for wrong usage or no device."""
    path = user_path()
    if path is None and not args.dry_run:
        print("vkattn tune: there is no file to write (VKATTN_TUNING is empty, or there is no home). Hint: --dry-run",
              file=sys.stderr)
        return 2
    try:
        if path is not None and not args.dry_run:
            # A file that VKATTN_TUNING names must be there when the device is opened; and what cannot be written is
            # better said before anything is measured.
            write_whole(path, path.read_text(encoding="utf-8") if path.exists() else "")
        device = Device(args.device)
    except (DeviceError, OptionError) as error:
        print(f"vkattn tune: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeError) as error:
        print(f"vkattn tune: the file {path} cannot be rewritten ({error}). Hint: VKATTN_TUNING names another, "
              "and --dry-run goes without one.", file=sys.stderr)
        return 2
    with device:
        info, before = device.info, device.info.tuned
        print(f'"{info.name}" ({info.driver_name} {info.driver_info}); the mean time under each value, microseconds',
              flush=True)
        bench, progress = Bench(device, args.quick), Progress(len(KNOBS))
        done: list[Knob] = []

        def say(knob: Knob, value: Any, nanoseconds: float, is_current: bool) -> None:
            progress.close()
            print(f"  {knob.name:<20} {value!s:>20} {nanoseconds / 1e3:12.2f}{'  now' if is_current else ''}",
                  flush=True)
            done.extend([knob] if is_current else [])
            progress.show(len(done), knob.name)

        found = best_of(before, bench, say)
        bench.close()
        progress.close()
    changed = [name for name in vars(before) if getattr(before, name) != getattr(found, name)]
    print("\n".join(f"{name} = {getattr(found, name)} (was {getattr(before, name)})" for name in changed)
          or f"nothing is faster by more than {GAIN:.0%}")
    if path is not None and changed and not args.dry_run:
        write_table(path, info.name, found, info.device_type)
        print(f"written to {path}")
    return 0

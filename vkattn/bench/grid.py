"""Measures a list of problems, one after another, until the time is up: vkattn by each algorithm, then the peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..dispatch import ALGORITHMS
from ..errors import CapacityError, VkattnError
from ..progress import Progress
from ..runtime.device import Device
from . import peers, peers_torch, peers_vulkan
from .case import POOL_SEED, Case, Inputs, num_sets
from .clock import host_times
from .inputs import Pool
from .problems import BenchProblem
from .results import Row, row
from .roofline import Roofline, measure_roofline

#: In the order in which they are asked.
PEERS: dict[str, peers.Peer] = {
    "torch cuda": peers_torch.torch_cuda,
    "torch cpu": peers_torch.torch_cpu,
    "numpy": peers.numpy_float32,
    "aule-attention": peers_vulkan.aule_attention,
    "computeml": peers_vulkan.computeml,
}

#: Seconds of timed work for each figure, after its warm-up.
SECONDS = 0.3


@dataclass
class Grid:
    """What to measure, and how long at most.

    ``algorithms`` replaces those of the problems if it is not empty: names, "auto" or "all". ``peers`` names those that
    are asked.
    """

    device: Device
    problems: Sequence[BenchProblem]
    algorithms: tuple[str, ...] = ()
    peers: tuple[str, ...] = tuple(PEERS)
    budget_seconds: float = 300.0
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        self.pool = Pool(POOL_SEED)
        self.roofline = Roofline(1.0, 1.0)
        #: False once a result was wrong.
        self.is_right = True

    def header(self) -> dict[str, Any]:
        """Return what the rows were measured on."""
        info = self.device.info
        return {"device": info.name, "device_type": info.device_type,
                "driver": f"{info.driver_name} {info.driver_info}".strip(), "host_cores": os.cpu_count(),
                "roofline": self.roofline.as_dict()}

    def run(self, keep: Callable[[list[Row]], object] = len) -> list[Row]:
        """Measure the roofline, then every problem for which there is time; return a row for each runner.

        ``keep`` is given all rows so far after each problem, so that a run that is ended leaves something.
        """
        start, progress = time.perf_counter(), Progress(len(self.problems) + 1)
        rows: list[Row] = []
        try:
            progress.show(0, "roofline")
            self.roofline = measure_roofline(self.device)
            matrix, source = peers_torch.matrix_rate(self.device.info) if self.peers else (None, "no peer was asked")
            self.roofline = replace(self.roofline, matrix=matrix, matrix_source=source)
            for done, problem in enumerate(self.problems, start=1):
                progress.show(done, problem.name)
                if time.perf_counter() - start > self.budget_seconds:
                    rows.append(row(problem, "vkattn", self.roofline,
                                    reason=f"the {self.budget_seconds:.0f} seconds of this run were over"))
                    continue
                rows += self._vkattn(problem)
                if not problem.is_quantised:
                    rows += self._peers(problem)
                keep(rows)
        finally:
            progress.close()
        return rows

    def _vkattn(self, problem: BenchProblem) -> Iterator[Row]:
        """Measure the algorithms that are wanted, first what the library chooses itself."""
        wanted = self.algorithms or problem.algorithms
        names = ALGORITHMS if "all" in wanted else tuple(name for name in wanted if name != "auto")
        done: set[str] = set()
        for algorithm in (("auto",) if {"auto", "all"} & set(wanted) else ()) + names:
            if algorithm in done:
                continue
            try:
                case = Case(self.device, problem, algorithm, self.pool)
            except (VkattnError, MemoryError) as error:
                if algorithm != "auto" or not names:  # else each name tells its own reason
                    yield row(problem, f"vkattn {algorithm}", self.roofline, reason=_short(error))
                continue
            done.add(case.chosen)
            try:
                yield self._measure(case, f"vkattn {case.chosen}", algorithm == "auto")
            except CapacityError as error:  # the whole call needs more room than the recording did
                yield row(problem, f"vkattn {case.chosen}", self.roofline, reason=_short(error))
            finally:
                case.close()

    def _measure(self, case: Case, runner: str, is_auto: bool) -> Row:
        """Check a case, then time it; what is wrong is not timed."""
        share = case.worst_share()
        if not share <= 1:
            self.is_right = False
            return row(case.problem, runner, self.roofline, variants=case.variants, auto=is_auto, reason=(
                f"WRONG: the worst error is {share:.3g} times its bound, so nothing was timed. Hint: vkattn check"))
        device_ns = case.device_times(self.seconds)
        streamed_ns = case.streamed_times(self.seconds) if is_auto else None
        call_ns = host_times(case.call(), self.seconds) if is_auto else None
        return row(case.problem, runner, self.roofline, device_ns=device_ns, call_ns=call_ns, streamed_ns=streamed_ns,
                   worst_share=share, uses_matrix_units=case.uses_matrix_units, variants=case.variants,
                   sets=case.sets, auto=is_auto)

    def _peers(self, problem: BenchProblem) -> Iterator[Row]:
        sets = num_sets(problem, self.device.info.device_type)
        for name in self.peers:
            try:
                for found in PEERS[name](problem, Inputs(problem, self.pool), sets, self.seconds):
                    yield row(problem, found.runner, self.roofline, device_ns=found.device_ns, call_ns=found.call_ns,
                              reason=found.reason, uses_matrix_units=found.uses_matrix_units)
            except ImportError:
                continue  # a peer that is not installed is not a result
            except (MemoryError, RuntimeError, OSError) as error:
                yield row(problem, name, self.roofline, reason=peers.first_line(error))


def _short(error: BaseException) -> str:
    """Return a refusal in a line: of several reasons the indented ones."""
    lines = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
    return f"{type(error).__name__}: {'; '.join(lines)}" if lines else peers.first_line(error)

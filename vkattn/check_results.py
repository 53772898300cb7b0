"""What ``vkattn check`` knows of each variant, and how it says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .kernels.manifest import load_manifest


@dataclass
class Result:
    """What is known of one variant: its worst share of a bound over the cases run, and what went wrong.

    ``not_run`` says why the device does not use it; empty for a variant that must be right.
    """

    worst: float = 0.0
    cases: int = 0
    problem: str = ""
    not_run: str = ""

    def add(self, label: str, share: float) -> None:
        """Note the outcome of one case."""
        self.cases += 1
        self.worst = max(self.worst, share)
        if not share <= 1 and not self.problem:
            self.problem = f"{label}: error is {share:.3g} times the bound"


def failed(result: Result) -> bool:
    """Whether the variant is wrong or was missed (not: that the device or a package lacks something)."""
    return bool(result.problem)


def as_text(results: dict[str, Result]) -> str:
    """Return a line for each variant that was run or missed, then for each reason how many were not run, by kernel."""
    width = max(map(len, results))
    lines, reasons = [], dict[str, list[str]]()
    for name, result in sorted(results.items()):
        if result.not_run:
            reasons.setdefault(result.not_run, []).append(load_manifest()[name].kernel)
            continue
        cases = "1 case" if result.cases == 1 else f"{result.cases} cases"
        detail = result.problem or f"worst error {result.worst:.2f} of the bound, {cases}"
        lines.append(f"  {'FAILED' if failed(result) else 'ok':6} {name:{width}} {detail}")
    for reason, kernels in reasons.items():
        counts = ", ".join(f"{count} of {kernel}" for kernel, count in Counter(kernels).items())
        lines.append(f"  {'-':6} {len(kernels)} not run ({counts}): {reason}")
    bad, idle = sum(map(failed, results.values())), sum(bool(result.not_run) for result in results.values())
    return "\n".join([*lines, f"{len(results) - bad - idle} passed, {bad} failed, {idle} not run"])

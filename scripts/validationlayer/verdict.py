"""What a log means: which messages are allowed, which are not, and whether the layer was there at all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from validationlayer.allowed import Allowed
from validationlayer.messages import BEFORE, PLANTED, Log, Message

#: Different texts of one message id that a report shows in full.
SHOWN = 4


@dataclass
class Verdict:
    """The messages of one run, sorted. ``failures`` are sentences; the run is clean if there is none."""

    allowed: list[tuple[Allowed, int]] = field(default_factory=list)
    unexpected: list[Message] = field(default_factory=list)
    planted: int = 0
    failures: list[str] = field(default_factory=list)


def judge(log: Log, run: str, feature: str, plant: str, entries: Sequence[Allowed]) -> Verdict:
    """Judge the log of the run ``run``.

    ``feature`` is what the layer must have reported as enabled, ``plant`` the id of the message that it must have
    written about the fault that was planted, or nothing that it did not write means anything.
    """
    verdict = Verdict()
    counts: Counter[int] = Counter()
    for message in log.messages:
        entry = next((at for at, entry in enumerate(entries) if entry.covers(message, run)), None)
        if message.place == PLANTED and message.id == plant:
            verdict.planted += 1
        elif entry is None:
            verdict.unexpected.append(message)
        else:
            counts[entry] += 1
    verdict.allowed = [(entries[at], counts[at]) for at in sorted(counts)]
    verdict.failures = [*_absences(log, verdict, feature, plant), *(f"not understood: {line}" for line in log.strays)]
    if verdict.unexpected:
        verdict.failures.append(f"{len(verdict.unexpected)} messages are not in validation_allowed.toml")
    return verdict


def _absences(log: Log, verdict: Verdict, feature: str, plant: str) -> list[str]:
    """Return the signs that the layer did not watch."""
    found = []
    if not log.active:
        found.append("the layer was not active: it did not report itself in any Vulkan instance")
    elif not any(feature in name for name in log.features):
        found.append(f"the layer was active without {feature}; it had {', '.join(sorted(log.features)) or 'nothing'}")
    if log.active and not set(log.active) - {PLANTED, BEFORE}:
        found.append("the layer was active for the planted fault only, and in no test")
    if not verdict.planted:
        found.append(f"the planted fault was not reported: no {plant} before the tests")
    return found


def report(log: Log, verdict: Verdict) -> list[str]:
    """Return the lines that say what was found: the allowed by entry with counts, the others by id and text."""
    lines = [f"the layer watched {sum(log.active.values())} Vulkan instances; planted fault: "
             f"{verdict.planted or 'NOT'} reported; {len(log.messages) - verdict.planted} other messages"]
    for entry, count in verdict.allowed:
        lines += [f"  allowed {count:5} x {entry.id}", f"          {entry.reason}"]
    groups: dict[str, dict[str, list[Message]]] = {}
    for message in verdict.unexpected:
        groups.setdefault(message.id or "(no id)", {}).setdefault(message.pattern, []).append(message)
    for name, texts in sorted(groups.items()):
        lines.append(f"  NOT ALLOWED {sum(map(len, texts.values()))} x {name}")
        for messages in list(texts.values())[:SHOWN]:
            places = Counter(message.place for message in messages)
            shown = ", ".join(f"{place} ({count})" for place, count in places.most_common(3))
            lines += [f"    {messages[0].severity} in {shown}{' and others' if len(places) > 3 else ''}:",
                      *(f"      {line}" for line in messages[0].text.splitlines())]
        if len(texts) > SHOWN:
            lines.append(f"    and {len(texts) - SHOWN} other texts")
    return [*lines, *(f"  FAILED: {failure}" for failure in verdict.failures)]

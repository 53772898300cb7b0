"""What the Khronos validation layer writes, as data. Pure: text in, messages out.

A message begins with a line such as ``SYNC-HAZARD-READ-AFTER-WRITE(ERROR / SPEC): msgNum: ... | text`` and goes on
over the lines that follow. Between messages stand marks, lines of our own that `validationlayer.child` writes into the
same pipe: they say which test is running, so that each message has a place. The layer's word that it is active, with
the features that are switched on, is a message too; it is counted and not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

MARK = "@@ "
#: The places that are not a test.
BEFORE, PLANTED, BETWEEN = "before the tests", "planted", "between tests"

STATUS_ID = "UNASSIGNED-khronos-validation-createinstance-status-message"
_START = re.compile(r"^\s*(?P<id>[^\s(]*)\((?P<severity>[A-Z]+) / [A-Z]+\): msgNum: ")
_HANDLES = re.compile(r"0x[0-9a-f]+(\[\])?")
_NUMBERS = re.compile(r"\b\d+\b")


@dataclass(frozen=True)
class Message:
    """One message: its id, ERROR or WARN or INFO, its text (all lines), and the test or place that it belongs to."""

    id: str
    severity: str
    text: str
    place: str

    @property
    def pattern(self) -> str:
        """The text after the last ``|`` of its first line, without handles and numbers: equal for equal causes."""
        first = self.text.splitlines()[0].rpartition(" | ")[2]
        return _NUMBERS.sub("#", _HANDLES.sub("#", first))


@dataclass
class Log:
    """Everything that one run of the layer wrote.

    ``active`` counts the Vulkan instances that the layer reported itself active in, by place; ``features`` is what it
    called enabled; ``strays`` are lines that are neither a message nor a part of one.
    """

    messages: list[Message] = field(default_factory=list)
    active: dict[str, int] = field(default_factory=dict)
    features: set[str] = field(default_factory=set)
    strays: list[str] = field(default_factory=list)


def parse(lines: Iterable[str]) -> Log:
    """Return the messages in ``lines``, each with the place of the mark before it."""
    log = Log()
    place = BEFORE
    open_message: list[str] = []

    def finish() -> None:
        if open_message:
            _add(log, open_message, place)
            open_message.clear()

    for raw in lines:
        line = raw.rstrip("\n")
        if line.startswith(MARK):
            finish()
            place = line.removeprefix(MARK)
        elif "msgNum: " in line:
            finish()
            open_message.append(line)
        elif open_message:
            open_message.append(line)
        elif line.strip():
            log.strays.append(line)
    finish()
    return log


def _add(log: Log, lines: list[str], place: str) -> None:
    """Put one message into the log."""
    start = _START.match(lines[0])
    if start is None:
        log.strays.append(lines[0])
        return
    text = "\n".join(lines).rstrip()
    if start["id"] == STATUS_ID:
        log.active[place] = log.active.get(place, 0) + 1
        for enables in re.findall(r"Current Enables: (.*)\.$", text, re.MULTILINE):
            log.features.update(enables.split(", "))
    else:
        log.messages.append(Message(start["id"], start["severity"], text, place))

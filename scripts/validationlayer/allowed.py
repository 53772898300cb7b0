"""The messages that are no fault of ours: validation_allowed.toml, read and applied. Pure."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from validationlayer.messages import Message

FILE = Path(__file__).resolve().parent.parent / "validation_allowed.toml"


@dataclass(frozen=True)
class Allowed:
    """One entry: a message with this id whose text holds ``text``, in one of the named runs."""

    id: str
    text: str
    runs: tuple[str, ...]
    reason: str
    cause: str

    def covers(self, message: Message, run: str) -> bool:
        """Whether the entry allows ``message`` in the run of that name."""
        return run in self.runs and message.id == self.id and self.text in message.text


def load(path: Path = FILE) -> list[Allowed]:
    """Read the entries; ValueError if one lacks a field or a field is empty, so that none is without its reason."""
    names = {field.name for field in fields(Allowed)}
    entries = []
    for number, table in enumerate(tomllib.loads(path.read_text(encoding="utf-8")).get("allowed", []), 1):
        if set(table) != names or not all(table.values()):
            raise ValueError(f"{path.name}, entry {number}: each of {', '.join(sorted(names))} must be there and say "
                             f"something; it has {', '.join(sorted(name for name in table if table[name]))}.")
        entries.append(Allowed(**{**table, "runs": tuple(table["runs"])}))
    return entries

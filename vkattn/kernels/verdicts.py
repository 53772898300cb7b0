"""What the self-tests of kernels on matrix units found, by device, driver and SPIR-V; kept on disk.

Kompute cannot enable the features of these kernels, so that nothing but their results says whether a driver runs them.
A verdict is "" for a kernel that passed, else the reason why it is not used. `vkattn.ops.selftest` finds them.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..caps.model import DeviceInfo
from ..errors import OptionError
from ..paths import cache_dir, write_whole
from .manifest import Variant

#: Noted before a test and replaced after it: what is left if the driver takes the process down.
UNFINISHED = "its self-test on this device did not finish"

_here: dict[str, str] = {}


def path() -> Path:
    """Return the file of the verdicts."""
    return cache_dir() / "self_tests.json"


def key(kernel: Variant, info: DeviceInfo) -> str:
    """Return what a verdict is about: another driver or another build of the kernel needs a test of its own."""
    return " | ".join((info.name, info.driver_name, info.driver_info, str(info.driver_version), kernel.name,
                       kernel.sha256[:16]))


def verdict(kernel: Variant, info: DeviceInfo) -> str | None:
    """Return "" if the kernel passed on the device, the reason if it did not, None if it has not been tested."""
    name = key(kernel, info)
    if name not in _here:
        found = _read().get(name)
        if found is None or found == UNFINISHED:  # that another process may be at it
            return found
        _here[name] = found
    return _here[name]


def note(kernel: Variant, info: DeviceInfo, text: str, *, is_lasting: bool = True) -> None:
    """Remember a verdict, in this process and, if it is lasting and the folder can be written, for those to come."""
    name = key(kernel, info)
    _here[name] = text
    _write({name: text if is_lasting else None})


def withdraw(kernel: Variant, info: DeviceInfo) -> None:
    """Take back what was noted: the kernel counts as not tested."""
    _here.pop(key(kernel, info), None)
    _write({key(kernel, info): None})


def _write(changes: dict[str, str | None]) -> None:
    """Change verdicts on disk; None takes one out."""
    try:
        everything = {name: text for name, text in (_read() | changes).items() if text is not None}
        write_whole(path(), json.dumps(everything, indent=1, sort_keys=True))
    except (OSError, OptionError):  # OptionError: the user has no home
        pass  # then each process tests anew


def forget() -> None:
    """Forget what this process knows; what is on disk stays."""
    _here.clear()


def _read() -> dict[str, str]:
    """Return the verdicts on disk; none where the file is missing or damaged."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # an OptionError is a ValueError
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}

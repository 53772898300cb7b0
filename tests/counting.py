"""A proxy in the place of kp that counts what is made, recorded and evaluated, and words that count what is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vkattn.runtime.device import Device


class Proxy:
    """Stands for ``real``: counts every call of a method under the method's name; wraps the sequences that are made."""

    def __init__(self, real: Any, calls: Counter[str]) -> None:
        self._real, self._calls = real, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found) or name == "TensorTypes":
            return found

        def call(*arguments: Any) -> Any:
            self._calls[name] += 1
            result = found(*arguments)
            return Proxy(result, self._calls) if name == "sequence" else result

        return call


@contextmanager
def counted_device(index: int) -> Iterator[tuple[Device, Counter[str]]]:
    """Open a device whose kp and manager are proxies; yield it with the counts of calls by name."""
    calls: Counter[str] = Counter()
    with Device(index) as own:
        own.kp = Proxy(own.kp, calls)  # type: ignore[assignment]
        own.manager = own.adopt(Proxy(own.manager, calls))
        yield own, calls


class CountingWords(np.ndarray):
    """Mapped words that add the bytes of every assignment, through any view of them, to `written`."""

    written = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        target = super().__getitem__(key)
        CountingWords.written += target.nbytes if isinstance(target, np.ndarray) else self.itemsize
        super().__setitem__(key, value)


def resident_bytes() -> int:
    """Return the process's resident memory."""
    import resource

    with open("/proc/self/statm") as file:  # noqa: PTH123 - not a file that a Path could hold
        return int(file.read().split()[1]) * resource.getpagesize()

"""An open Vulkan device: the owner of buffers and recordings, and the guard against use after close or fork."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from ..caps.model import DeviceInfo
from ..caps.probe import devices, select_device
from ..caps.tuning import tuning_for
from ..errors import ClosedError, DeviceError, OptionError
from ..graph.node import Dispatch
from ..lru import BoundedPlans
from ..mask import as_integer
from . import kompute
from .buffer import Buffer, Kind
from .pipeline import Pipelines
from .recording import Recording

BOUNDARIES = ("coherent", "full")

#: Plans of the functional API together take at most this part of the largest heap (one alone may take more).
PLANS_HEAP_FRACTION = 0.25

#: Score matrices of the three-pass kernels are cut into chunks of at most this many bytes.
DEFAULT_SCORE_BUDGET_BYTES = 64 << 20

_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()


class Device:
    """An open Vulkan device.

    Parameters
    ----------
    select : int, str or None
        Index in `vkattn.devices`, part of a name, or None: the environment variable VKATTN_DEVICE if it is set, else
        the best there is (discrete, then integrated, virtual, cpu).
    score_budget_bytes : int
        The largest score buffer of the three-pass kernels, in bytes; longer problems go in chunks of query rows.
    boundary : "coherent", "full" or None
        How dependent kernels are kept apart: inside one submission, or by one submission each (slow, for validation
        layers). None: the environment variable VKATTN_BOUNDARY if it is set, else "coherent".

    Raises
    ------
    DeviceError
        No Vulkan loader, driver or matching device; or Kompute is missing (``python -m vkattn setup``).
    OptionError
        An argument, or the user's tuning file (`vkattn.caps.tuning`), makes no sense.

    Example
    -------
    >>> with vkattn.Device("llvmpipe") as device:  # doctest: +SKIP
    ...     out = vkattn.attention(query, key, value, device=device)
    """

    def __init__(self, select: int | str | None = None, *, score_budget_bytes: int = DEFAULT_SCORE_BUDGET_BYTES,
                 boundary: str | None = None) -> None:
        if boundary is None:
            boundary = os.environ.get("VKATTN_BOUNDARY") or "coherent"
        if not isinstance(boundary, str) or boundary not in BOUNDARIES:
            raise OptionError(f"`boundary` is {boundary!r}; supported: {', '.join(map(repr, BOUNDARIES))}.")
        if (as_integer(score_budget_bytes) or 0) < 1:
            raise OptionError(f"`score_budget_bytes` is {score_budget_bytes!r}; it must be an integer of at least 1.")
        self.boundary = boundary
        self.score_budget_bytes = int(score_budget_bytes)
        _refuse_after_fork()
        chosen = select_device(devices(), select)
        self.info: DeviceInfo = replace(chosen, tuning=tuning_for(chosen.device_type, chosen.name))
        self.lock = threading.RLock()
        self.allocated_bytes = 0
        self.allocation_count = 0
        self.plans = BoundedPlans(max_bytes=int(self.info.device_local_bytes * PLANS_HEAP_FRACTION))
        self._dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        self._live: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._pid = os.getpid()
        self._handles: dict[int, Any] = {}
        self._closed = False
        self.kp = kompute.load()
        self.manager: Any = self.adopt(self.kp.Manager(self.info.index))
        self._boundary: Buffer | None = None
        _open_devices.add(self)

    def __repr__(self) -> str:
        return f"<vkattn.Device {self.info.index} {self.info.name!r}{' closed' if self._closed else ''}>"

    @property
    def usable(self) -> bool:
        """Whether handles of this device may still be touched: it is open, and this is the process that opened it."""
        return not self._closed and os.getpid() == self._pid

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the device, and the device was open then."""
        return os.getpid() != self._pid and not self._closed

    def check(self) -> None:
        """Raise ClosedError after `close`, DeviceError in a forked child (where Kompute would hang)."""
        if self._closed:
            raise ClosedError(f"the device {self.info.name!r} was used after close(). Hint: open a new vkattn.Device.")
        if self.forked:
            raise DeviceError("this device was opened before fork(); a child process cannot use it. "
                              'Hint: open a vkattn.Device in the child, or start processes with "spawn".')

    @property
    def boundary_tensor(self) -> Any:
        """The 16-byte tensor whose read-back orders two segments."""
        if self._boundary is None:
            self._boundary = self.buffer(4, "synced", "boundary")
        return self._boundary.tensor

    def buffer(self, num_words: int, kind: Kind, name: str) -> Buffer:
        """Allocate ``num_words`` 32-bit words; CapacityError if a limit of the device or of Kompute forbids it."""
        self.check()
        with self.lock:
            return Buffer(self, num_words, kind, name)

    def recording(self, segments: Sequence[Sequence[Dispatch]], pipelines: Pipelines | None = None) -> Recording:
        """Record ``segments``, with pipelines of its own or shared ones; nothing runs yet."""
        self.check()
        with self.lock:
            return Recording(self, segments, pipelines)

    def pipelines(self) -> Pipelines:
        """Return an empty set of pipelines for several recordings to share."""
        return Pipelines(self)

    def adopt(self, handle: Any) -> Any:
        """Remember a Kompute object that lives on this device; return it."""
        self._handles[id(handle)] = handle
        return handle

    def release(self, handle: Any) -> None:
        """Destroy an adopted object. After close there is nothing left to destroy; in a forked child nothing may be."""
        if self.usable:
            del self._handles[id(handle)]
            handle.destroy()

    def abandon(self) -> None:
        """Keep every handle alive for ever: called in a forked child, where a destructor would wait for ever."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._handles))

    def close_first(self, dependent: Any) -> None:
        """Have ``dependent.close()`` called when the device is closed, if it is still alive then."""
        self._dependents.add(dependent)

    def track(self, buffer: Buffer, size_bytes: int, count: int) -> None:
        """Count an allocation."""
        self._live.add(buffer)
        self.allocated_bytes += size_bytes
        self.allocation_count += count

    def untrack(self, buffer: Buffer, size_bytes: int, count: int) -> None:
        """Forget an allocation."""
        self._live.discard(buffer)
        self.allocated_bytes -= size_bytes
        self.allocation_count -= count

    def close(self) -> None:
        """Free everything on the device. Plans, caches and graphs made on it raise ClosedError afterwards."""
        with self.lock:
            if not self.usable:
                return
            self.plans.clear()
            for dependent in list(self._dependents):
                dependent.close()
            for buffer in list(self._live):
                buffer.destroy()
            manager, self.manager = self.manager, None
            self.release(manager)
            self._handles.clear()
            self._closed = True

    def __del__(self) -> None:
        if hasattr(self, "manager"):
            self.close()

    def __enter__(self) -> Device:
        self.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _refuse_after_fork() -> None:
    """Raise DeviceError if a parent process had a device open when it forked this one: drivers do not survive that."""
    if any(device.forked for device in _open_devices):
        raise DeviceError("a Vulkan device was open when this process was forked; neither it nor a new one can be "
                          'used here. Hint: start processes with the "spawn" method, or before the first device.')


_default: Device | None = None
_default_lock = threading.Lock()


def default_device() -> Device:
    """Return the device that calls without ``device=`` use: opened at the first call, closed at exit.

    It is chosen as by ``Device(None)``; if it was closed, the next call opens another.
    """
    global _default
    if _default is not None and _default.forked:
        _refuse_after_fork()
    with _default_lock:
        if _default is None or not _default.usable:
            _default = Device()
        return _default


def resolve_device(device: Any) -> Device:
    """Return ``device``, ready for use; None is `default_device`. OptionError if it is no Device."""
    if device is None:
        device = default_device()
    if not isinstance(device, Device):
        raise OptionError(f"`device` is {device!r}; it must be a vkattn.Device, or None for the default device. "
                          "Hint: vkattn.Device(...) takes an index or a name.")
    device.check()
    return device


def _close_all() -> None:
    for device in list(_open_devices):
        device.close()


def _abandon_all() -> None:
    for device in list(_open_devices):
        if device.forked:
            device.abandon()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)

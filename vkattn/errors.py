"""Every exception that vkattn raises on purpose.

A user's mistake is a ``ValueError`` or ``TypeError``; a limit of a kernel or of a device is a
``NotImplementedError`` or ``RuntimeError``. Each message says what was given, what is allowed, and,
where one action fixes it, a sentence that starts with "Hint:".
"""


class VkattnError(Exception):
    """Base class of every exception in this module."""


class ShapeError(VkattnError, ValueError):
    """The shape of an array does not fit the others, or the call."""


class DTypeError(VkattnError, TypeError):
    """The dtype of an array is not supported here."""


class OptionError(VkattnError, ValueError):
    """An option has a value that it cannot have, or two options exclude each other."""


class CapacityError(VkattnError, ValueError):
    """More rows, words or bytes are asked for than there is room."""


class PlanError(VkattnError, RuntimeError):
    """A plan or graph was declared or run in a way that it was not made for."""


class NoKernelError(VkattnError, NotImplementedError):
    """No kernel computes this; the message lists each kernel with its reasons."""


class DeviceError(VkattnError, RuntimeError):
    """The Vulkan device, its driver or Kompute is missing, was lost, or belongs to another process."""


class ClosedError(DeviceError):
    """The object was used after ``close()``."""


class ShaderDataError(VkattnError, RuntimeError):
    """The SPIR-V or its manifest is missing, damaged or does not match."""

"""What one dispatch of an attention algorithm binds, by name: shared by the functional plans and the graphs.

An algorithm is a list of passes. The name of a binding says which tensor it is; the push constant that tells the kernel
where the tensor starts is the name with ``_base``, in the tensor's own unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .. import formats
from ..caps.model import DeviceInfo
from ..layout import words_per_vec
from ..problem import Problem
from .grid import num_groups
from .manifest import Variant

VEC4_WORDS = 4


@dataclass(frozen=True)
class Pass:
    """One kernel of an algorithm and the tensors that it binds after params, in order.

    ``appended`` names tensors that the kernel writes only where it appends new rows to a cache.
    ``pushed`` names the push constant of a tensor where it is not the tensor's own name.
    ``most_groups`` is how many workgroups have work at most, or None if it is not known: those without cost time too.
    The last ``num_sizes`` of ``spec`` are sizes of the problem, which may be 0: read from the params then.
    """

    kernel: Variant
    tensors: tuple[str, ...]
    spec: tuple[int, ...] = ()
    pushed: dict[str, str] = field(default_factory=dict, hash=False)
    appended: frozenset[str] = frozenset()
    most_groups: int | None = None
    num_sizes: int = 0

    def for_any_size(self) -> Pass:
        """Return it without what holds for the sizes of one problem only."""
        kept = len(self.spec) - self.num_sizes
        return replace(self, most_groups=None, spec=self.spec[:kept] + (0,) * self.num_sizes)

    def groups(self, info: DeviceInfo) -> int:
        """Return the workgroups of its dispatch."""
        return num_groups(info) if self.most_groups is None else min(num_groups(info), self.most_groups)

    def base(self, tensor: str) -> str:
        """Return the push constant that says where ``tensor`` starts."""
        return f"{self.pushed.get(tensor, tensor)}_base"


def unit_words(tensor: str, problem: Problem) -> int:
    """Return the words of the unit in which a kernel is told where ``tensor`` starts."""
    if tensor in ("query", "out", "new_key", "new_value"):
        return words_per_vec(problem.query_dtype)
    if tensor in ("key", "value"):
        return formats.unit_words(problem.key_dtype, problem.value_dtype)
    return VEC4_WORDS if tensor in ("scores", "parts") else 1


@dataclass(frozen=True)
class Cut:
    """How one run is cut: params words by name, and how many chunks of rows have work."""

    words: dict[str, int]
    num_chunks: int = 1


def even_cut(tiles: int, most: int) -> Cut:
    """Return how ``tiles`` row tiles go in chunks of at most ``most``: all about as large, so that no device idles."""
    chunks = -(-tiles // most)
    per_chunk = -(-tiles // max(chunks, 1))
    return Cut({"tiles_per_chunk": max(per_chunk, 1)}, chunks)

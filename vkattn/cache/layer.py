"""`CacheLayer`: what attention takes of a cache of several layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .kv_cache import KVCache


class CacheLayer:
    """One layer of a `KVCache`."""

    def __init__(self, cache: KVCache, index: int) -> None:
        self.cache = cache
        self.index = index

    def __repr__(self) -> str:
        return f"<layer {self.index} of {self.cache!r}>"

    @property
    def lengths(self) -> np.ndarray:
        """Live tokens, int64 ``[batch]``; a copy."""
        return np.array(self.cache.lengths[self.index])

    def update(self, key: Any, value: Any, input_pos: Any) -> None:
        """`KVCache.update` of this layer."""
        self.cache.update(key, value, input_pos, self.index)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """`KVCache.read` of this layer."""
        return self.cache.read(self.index)

    def raw(self) -> dict[str, np.ndarray | None]:
        """`KVCache.raw` of this layer."""
        return self.cache.raw(self.index)

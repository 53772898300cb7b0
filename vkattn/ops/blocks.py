"""Params blocks of a graph: what is written into the params buffer once, and in every run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..caps.model import DeviceInfo
from ..dispatch import by_name
from ..errors import ShapeError
from ..graph.values import Size, live
from ..kernels import params
from ..kernels.passes import Cut
from .spec import AttentionSpec, Dims, Scalars


class Block:
    """A params block in a graph: where it lies, and how it is filled for a run."""

    def __init__(self, spec: AttentionSpec, base: int, info: DeviceInfo) -> None:
        self.spec = spec
        self.base = base
        self.num_words = params.block_words(spec.batch_size, spec.num_heads)
        self._info = info
        self._headers: dict[tuple[int, ...], np.ndarray] = {}
        #: Found now, as they depend on which kernel was chosen: runs may be allowed other tiers.
        self._cutters = {algorithm: self._cutter(algorithm) for algorithm in spec.algorithms}
        self._dims = sorted({size.name for size in (spec.q_len, spec.kv_len, spec.new_len, *(spec.mask_shape or ()))
                             if not isinstance(size, int)})

    def prepare(self, words: np.ndarray) -> None:
        """Write what never changes into the params buffer ``words``."""
        spec = self.spec
        slopes, sinks = (None if values is None else np.array(values, np.float32)
                         for values in (spec.alibi_slopes, spec.sinks))
        block = words[self.base : self.base + self.num_words]
        params.write_heads(block, spec.batch_size, spec.num_heads, slopes, sinks)

    @property
    def is_choosing(self) -> bool:
        """Whether there is an algorithm for short runs and another for long ones."""
        return len(self.spec.algorithms) > 1

    def is_short(self, dims: Dims) -> bool:
        """Whether the algorithm for short runs can compute this run."""
        spec = self.spec
        return live(spec.q_len, dims) <= spec.problem_of(spec.algorithms[0]).max_q_len

    def write(self, words: np.ndarray, dims: Dims, scalars: Scalars, mode: str) -> int:
        """Write this run's header and lengths; return the chunks of rows that have work."""
        spec, block = self.spec, words[self.base : self.base + self.num_words]
        kv_len, q_offset, input_pos = spec.lengths(dims, scalars)
        block[: params.HEADER_WORDS] = self._header(dims)
        max_kv_len = max(kv_len.tolist())
        columns = 1 if spec.mask_shape is None else live(spec.mask_shape[-1], dims)
        if 1 < columns < max_kv_len:
            raise ShapeError(f"a mask has {columns} columns; it needs at least {max_kv_len}, the longest live length, "
                             "or 1.")
        block[params.INDEX["max_kv_len"]] = max_kv_len
        chunks = 1
        if spec.algorithms:
            algorithm = spec.algorithms[0 if mode == "short" else -1]
            run = self._cutters[algorithm](live(spec.q_len, dims), max_kv_len)
            for name, word in run.words.items():
                block[params.INDEX[name]] = word
            chunks = run.num_chunks
        elif spec.score_words:
            cut = spec.cut(live(spec.q_len, dims), max_kv_len, self._info)
            block[params.INDEX["score_stride"]] = cut.score_stride
            block[params.INDEX["tiles_per_chunk"]] = cut.tiles_per_chunk
            chunks = cut.num_chunks
        if spec.run_layer is not None and spec.storage is not None:
            layer = int(scalars[spec.run_layer.name][0])
            for name, offset in spec.storage.offsets(layer).items():
                block[params.INDEX[name]] = offset
        params.write_lengths(block, spec.batch_size, kv_len, q_offset, input_pos)
        return chunks

    def _cutter(self, algorithm: str) -> Callable[[int, int], Cut]:
        """Return the algorithm's `cut` as a function of the live lengths."""
        module, problem = by_name(algorithm), self.spec.problem_of(algorithm)
        scratch, info = dict(self.spec.scratch), self._info
        if hasattr(module, "cutter"):
            cutter: Callable[[int, int], Cut] = module.cutter(problem, scratch, info)
            return cutter
        return lambda q_len, max_kv_len: module.cut(problem, q_len, max_kv_len, scratch, info)

    def _header(self, dims: Dims) -> np.ndarray:
        key = tuple(dims[name] for name in self._dims)
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) >= 64:
                self._headers.clear()
            header = self._headers[key] = np.zeros(params.HEADER_WORDS, np.uint32)
            params.write_header(header, self.spec.header(dims))
        return header


class DimsBlock:
    """The params block of a user's kernel: the live sizes it asked for, a word each."""

    def __init__(self, sizes: tuple[Size, ...], base: int) -> None:
        self.sizes = sizes
        self.base = base
        self.num_words = max(len(sizes), 1)

    def prepare(self, words: np.ndarray) -> None:
        """Nothing is fixed."""

    def write(self, words: np.ndarray, dims: Dims, scalars: Scalars, mode: str) -> int:
        """Write the live sizes."""
        for index, size in enumerate(self.sizes):
            words[self.base + index] = live(size, dims)
        return 1

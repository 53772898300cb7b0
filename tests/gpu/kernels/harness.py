"""One kernel by itself on the device: guarded buffers, a hand-made params block, bases that are not 0.

Everything that a case does not write is `GUARD`, which is NaN in every dtype: what a kernel must not read poisons its
result if it does, and what it must not write is compared bit for bit. A `Rig` is recorded once and replayed for every
case, long and short ones in turn; `Rigs` keeps one of each variant for all tests of a module, as most of the time goes
into compiling.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
import numpy as np

from tests.gpu.kernels.cases import TILE_ROWS, Case
from vkattn.dtypes import AXIS, numpy_dtype
from vkattn.graph.hazards import segments
from vkattn.graph.node import Binding, Dispatch
from vkattn.kernels import params
from vkattn.kernels.manifest import Variant, load_manifest
from vkattn.layout import pack_into, packed_words, row_quads
from vkattn.ops.inputs import mask_strides, mask_words, write_mask
from vkattn.runtime.device import Device

#: NaN as float32, and NaN twice as float16 and as bfloat16.
GUARD = 0x7FC17FCD
#: Each chunk of the recording has its own part of the score buffer, in vec4s; later ones may have no work.
CHUNKS, CHUNK_VEC4S = 4, 1 << 13
#: Where the live words of each buffer start, in the unit of its push constant.
BASES = {"params_base": 5, "query_base": 6, "key_base": 10, "value_base": 2, "out_base": 14, "mask_base": 3,
         "scores_base": 7, "probs_base": 7, "lse_base": 9}
DTYPE = {axis: dtype for dtype, axis in AXIS.items()}
#: Identical runs; a test of tests/gpu/test_races.py repeats whole calls of every variant too.
REPEATS = 200 if os.environ.get("VKATTN_LONG") == "1" else 12


def variants_of(kernel: str) -> list[Variant]:
    """Return every compiled variant of ``kernel`` for floats; those for quantised rows are tested over caches."""
    return [variant for variant in load_manifest().values()
            if variant.kernel == kernel and "any" not in variant.axes.values()]


class Rig:
    """A recording of one variant, one dispatch for each of ``pushes``, over host buffers of the given words."""

    def __init__(self, device: Device, variant: Variant, pushes: Sequence[Mapping[str, int]], words: Mapping[str, int],
                 groups: int = 3, spec: tuple[int, ...] = ()) -> None:
        self.device, self.variant = device, variant
        self._before: dict[str, np.ndarray] = {}
        self._buffers = {binding.name: device.buffer(words[binding.name], "host", binding.name)
                         for binding in variant.bindings}
        bindings = tuple(Binding(buffer) for buffer in self._buffers.values())
        self._recording = device.recording(segments(
            Dispatch(variant, bindings, push, groups, spec=spec) for push in pushes))

    def run(self, inputs: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> dict[str, np.ndarray]:
        """Write (offset, words) pieces into buffers full of GUARD, run, return a copy of each buffer that is written.

        What is only read must not have changed.
        """
        before = self._before = {name: np.full(buffer.num_words, GUARD, np.uint32)
                                 for name, buffer in self._buffers.items()}
        for name, pieces in inputs.items():
            for offset, words in pieces:
                assert offset + words.size < before[name].size, f"`{name}` is too small for this case"
                before[name][offset : offset + words.size] = words
        for name, buffer in self._buffers.items():
            buffer.words[...] = before[name]
        self._recording.run()
        after = {name: buffer.words.copy() for name, buffer in self._buffers.items()}
        for binding in self.variant.bindings:
            if not binding.writes:
                np.testing.assert_array_equal(after.pop(binding.name), before[binding.name])
        return after

    def again(self) -> dict[str, np.ndarray]:
        """Do what the last `run` did once more, faster: what is only read is left and not looked at."""
        written = [binding.name for binding in self.variant.bindings if binding.writes]
        for name in written:
            self._buffers[name].words[...] = self._before[name]
        self._recording.run()
        return {name: self._buffers[name].words.copy() for name in written}

    def close(self) -> None:
        self._recording.close()
        for buffer in self._buffers.values():
            buffer.destroy()


class Rigs:
    """A rig of each variant that is asked for, with buffers of ``words``."""

    def __init__(self, device: Device, words: Mapping[str, int]) -> None:
        self.device, self._words = device, words
        self._made: dict[str, Rig] = {}

    def of(self, variant: Variant) -> Rig:
        if variant.name not in self._made:
            self._made[variant.name] = self.make(variant)
        return self._made[variant.name]

    def make(self, variant: Variant, groups: int = 3, chunks: int | None = None, spec: tuple[int, ...] = (),
             **words: int) -> Rig:
        """Return a rig for one test, which closes it; ``words`` stand in place of the module's."""
        pushes = chunk_pushes(variant, chunks or CHUNKS)
        return Rig(self.device, variant, pushes, {**self._words, **words}, groups, spec)

    def close(self) -> None:
        for rig in self._made.values():
            rig.close()


def assert_the_same_bits(rigs: Rigs, rig: Rig, inputs: Mapping[str, Sequence[tuple[int, np.ndarray]]]) -> None:
    """Assert that every word is the same in all runs of a case of one chunk, and whatever the number of workgroups.

    What workgroups share out does not depend on dtypes: one workgroup is tried with float32 only.
    """
    first = rig.run(inputs)
    for groups in (64,) if {"f16", "bf16"} & set(rig.variant.axes.values()) else (64, 1):
        other = rigs.make(rig.variant, groups, chunks=1)
        assert_same_words(other.run(inputs), first)
        for _ in range(REPEATS if groups > 1 else 0):
            assert_same_words(other.again(), first)
        other.close()


def assert_same_words(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name, words in expected.items():
        np.testing.assert_array_equal(got[name], words, err_msg=name)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, size: float = 2.0,
         level: float = 0.0) -> np.ndarray:
    """Return normal random numbers around ``level``."""
    return (level + size * rng.standard_normal(shape, np.float32)).astype(numpy_dtype(dtype))


def chunk_pushes(variant: Variant, chunks: int = CHUNKS) -> list[dict[str, int]]:
    """Return the push constants of each chunk: all bases, the scores of each chunk in their own place."""
    pushes = []
    for chunk in range(chunks):
        push = {"chunk": chunk} | {name: BASES[name] for name in variant.push if name != "chunk"}
        for name in {"scores_base", "probs_base"} & set(push):
            push[name] += chunk * CHUNK_VEC4S
        pushes.append(push)
    return pushes


def as_tiles(case: Case, array: np.ndarray, missing: Any) -> np.ndarray:
    """Return ``[batch, heads, q_len, n]`` as ``[row tile, 32, score_cols]``; ``missing`` where there is no element."""
    split = array.reshape(case.batch_size, case.num_kv_heads, case.group_size, case.q_len, array.shape[3])
    num_rows = case.q_len * case.group_size
    rows = split.transpose(0, 1, 3, 2, 4).reshape(case.batch_size * case.num_kv_heads, num_rows, array.shape[3])
    cols = min(array.shape[3], case.score_cols)
    tiled = np.full((len(rows), case.tiles_per_head * TILE_ROWS, case.score_cols), missing, array.dtype)
    tiled[:, :num_rows, :cols] = rows[..., :cols]
    return tiled.reshape(case.num_tiles, TILE_ROWS, case.score_cols)


def from_tiles(case: Case, tiled: np.ndarray) -> np.ndarray:
    """Return ``[batch, heads, q_len, score_cols]``; the inverse of `as_tiles`."""
    heads = (case.batch_size, case.num_kv_heads)
    rows = tiled.reshape(*heads, case.tiles_per_head * TILE_ROWS, case.score_cols)[:, :, : case.q_len * case.group_size]
    split = rows.reshape(*heads, case.q_len, case.group_size, case.score_cols)
    return split.transpose(0, 1, 3, 2, 4).reshape(case.batch_size, case.num_heads, case.q_len, case.score_cols)


def place_tiles(case: Case, tiled: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return the pieces of the score buffer that hold these tiles, chunk by chunk."""
    assert case.tiles_per_chunk * TILE_ROWS * case.score_cols // 4 <= CHUNK_VEC4S
    assert case.num_tiles <= CHUNKS * case.tiles_per_chunk
    words = np.ascontiguousarray(tiled).view(np.uint32)
    return [(4 * (BASES["scores_base"] + chunk * CHUNK_VEC4S), part.ravel()) for chunk in range(CHUNKS)
            if (part := words[chunk * case.tiles_per_chunk : (chunk + 1) * case.tiles_per_chunk]).size]


def take_tiles(case: Case, words: np.ndarray) -> np.ndarray:
    """Return the tiles (uint32) of a score buffer, and check that all other words are GUARD."""
    empty = np.full((case.num_tiles, TILE_ROWS, case.score_cols), GUARD, np.uint32)
    rest = words.copy()
    parts = []
    for offset, part in place_tiles(case, empty):
        parts.append(words[offset : offset + part.size])
        rest[offset : offset + part.size] = GUARD
    assert (rest == GUARD).all(), "written outside the tiles of a chunk"
    return np.concatenate(parts).reshape(empty.shape) if parts else empty


class Store:
    """An array ``[batch, heads, tokens, dim]`` as a kernel sees it: padded rows, a quad of GUARD between them, one more
    row of GUARD after the last of each head (bhsd) or token (bshd).
    """

    def __init__(self, case: Case, array: np.ndarray, dtype: str, dead: np.ndarray | None = None) -> None:
        if dead is not None:
            dead = np.broadcast_to(dead, array.shape[:3])
        if case.layout == "bshd":
            array = array.transpose(0, 2, 1, 3)
            dead = None if dead is None else dead.transpose(0, 2, 1)
        packed = np.empty(packed_words(array.shape, dtype), np.uint32)
        pack_into(packed, array, dtype)
        self.dtype, self.layout, self.dim = dtype, case.layout, array.shape[3]
        self._row_words = 4 * row_quads(self.dim, dtype)
        outer, middle, inner = array.shape[:3]
        self.words = np.full((outer, middle, inner + 1, self._row_words + 4), GUARD, np.uint32)
        live = self.words[:, :, :inner, : self._row_words]
        live[...] = packed.reshape(live.shape)
        if dead is not None:
            live[dead] = GUARD
        self._vec_words = 4 if dtype == "float32" else 2

    @classmethod
    def unwritten(cls, case: Case, dtype: str) -> Store:
        """Return an output of ``case`` before it is computed, GUARD throughout."""
        shape = (case.batch_size, case.num_heads, case.q_len, case.value_dim)
        return cls(case, np.zeros(shape, numpy_dtype(dtype)), dtype, np.ones(shape[:3], bool))

    def strides(self, name: str) -> dict[str, int]:
        """Return the header words of the strides, in vecs."""
        batch, middle, inner = (stride // 4 // self._vec_words for stride in self.words.strides[:3])
        head, row = (middle, inner) if self.layout == "bhsd" else (inner, middle)
        return {f"{name}_stride_batch": batch, f"{name}_stride_head": head, f"{name}_stride_row": row}

    def place(self, base: str) -> list[tuple[int, np.ndarray]]:
        """Return the piece of the buffer that holds the array, ``base`` vecs from its start."""
        return [(self._vec_words * BASES[base], self.words.ravel())]

    def take(self, words: np.ndarray, base: str) -> np.ndarray:
        """Return the array in a buffer that was GUARD but for its rows; padding must be 0 and the rest GUARD."""
        start = self._vec_words * BASES[base]
        rest = words.copy()
        mine = rest[start : start + self.words.size].reshape(self.words.shape)
        rows = mine[:, :, :-1, : self._row_words].copy()
        mine[:, :, :-1, : self._row_words] = GUARD
        assert (rest == GUARD).all(), "written outside the rows"
        elements = rows.view(np.dtype(self.dtype))
        assert not elements[..., self.dim :].view(np.uint8).any(), "the padding of a row is not 0"
        elements = elements[..., : self.dim]
        return elements.transpose(0, 2, 1, 3) if self.layout == "bshd" else elements


def block(case: Case, strides: Mapping[str, int], mask: np.ndarray | None = None,
          alibi_slopes: np.ndarray | None = None, sinks: np.ndarray | None = None,
          out_vecs: int = 0) -> list[tuple[int, np.ndarray]]:
    """Return the piece of the params buffer for ``case``; words that it does not need stay GUARD."""
    words = np.full(params.block_words(case.batch_size, case.num_heads), GUARD, np.uint32)
    kind = None if mask is None else mask.dtype.name
    flags = ({None: 0, "bool": params.FLAG_MASK_BITS, "float32": params.FLAG_MASK_FLOAT}[kind]
             | (params.FLAG_ALIBI if case.alibi else 0) | (params.FLAG_SINKS if case.sinks else 0)
             | (params.FLAG_LSE if case.lse else 0))
    left, right = (params.WINDOW_OFF if bound is None else bound for bound in case.window)
    steps = dict(zip(("batch", "head", "row", "col"), mask_strides(mask), strict=True))
    params.write_header(words, {
        "batch_size": case.batch_size, "num_kv_heads": case.num_kv_heads, "group_size": case.group_size,
        "q_len": case.q_len, "max_kv_len": case.max_kv_len, "head_vecs": -(-case.head_dim // 4),
        "value_vecs": -(-case.value_dim // 4), "out_vecs": out_vecs, "flags": flags, "scale": case.scale,
        "softcap": case.softcap or 0.0, "window_left": left, "window_right": right, "key_offset": 0, "value_offset": 0,
        "score_stride": case.score_cols // 4, "tiles_per_chunk": case.tiles_per_chunk,
        **{f"mask_stride_{axis}": step for axis, step in steps.items()}, **strides,
    })  # fmt: skip
    params.write_lengths(words, case.batch_size, np.array(case.kv_len, np.int64), np.array(case.q_offset, np.int64))
    params.write_heads(words, case.batch_size, case.num_heads, alibi_slopes, sinks)
    return [(BASES["params_base"], words)]


def place_mask(mask: np.ndarray | None) -> list[tuple[int, np.ndarray]]:
    """Return the piece of the mask buffer."""
    if mask is None:
        return []
    words = np.empty(mask_words(mask), np.uint32)
    write_mask(words, mask)
    return [(BASES["mask_base"], words)]


def take_lse(case: Case, words: np.ndarray) -> np.ndarray | None:
    """Return lse ``[batch, heads, q_len]``; rows must be padded to a quad with 0, and all else must be GUARD."""
    if not case.lse:
        assert (words == GUARD).all()
        return None
    padded, start = -(-case.q_len // 4) * 4, BASES["lse_base"]
    rest = words.copy()
    mine = rest[start : start + case.batch_size * case.num_heads * padded]
    rows = mine.reshape(case.batch_size, case.num_heads, padded).copy()
    mine[...] = GUARD
    assert (rest == GUARD).all(), "written outside the rows of lse"
    assert (rows[..., case.q_len :] == 0).all(), "the padding of lse is not 0"
    return rows[..., : case.q_len].view(np.float32)

"""Hypothesis strategies for calls of attention: sizes at the edges of tiles, every option, views, and poison.

A drawn `Case` holds a seed and small choices; the arrays are made from them, so that hypothesis shrinks choices and
not millions of floats. What no query row attends is filled with NaN or infinity: keys, values, mask columns beyond the
live length, and queries that attend nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
import numpy as np
from hypothesis import strategies as st

from tests.poison import VIEWS, poisoned_arrays
from vkattn.dtypes import FLOAT_DTYPES, numpy_dtype

#: Lengths around the tiles of 32 and 64 rows that kernels work in, and the smallest ones.
EDGES = (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)
HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256, 257)
GROUPS = (1, 2, 3, 4, 5, 7, 8)
#: Numbers of keys around the blocks of 256 and 1024 keys that kernels sum, for few query rows.
MANY_KEYS = (255, 256, 257, 511, 513, 1023, 1024, 1025)
#: Sizes of a key row that make four kernels of `split` by subgroup shuffles, not all of them.
FEW_HEAD_DIMS = (8, 33, 64, 128)
#: Multiplications of one product above which heads and batch entries are dropped, to keep an example short.
MAX_WORK = 2**22
#: Largest score beside sinks: these, ALiBi and a mask take it down to 85 below the sink at most, and e^-87 is the
#: least normal float32.
MAX_PEAK_WITH_SINKS = 20.0
#: Below this, random signs could cancel in a whole row, whose relative error would then mean nothing.
MIN_DIM_OF_FREE_SIGNS = 8


@dataclass
class Case:
    """One call: arrays (query, key, value) twice, the options, and the choices that they came from.

    ``poisoned`` holds poison in everything without effect, in odd memory layouts; ``clean`` holds none, contiguous.
    """

    poisoned: tuple[np.ndarray, ...]
    clean: tuple[np.ndarray, ...]
    options: dict[str, Any]
    choices: dict[str, Any]

    def __repr__(self) -> str:
        parts = [f"{name}={given!r}" for name, given in self.choices.items()]
        for name, given in self.options.items():
            brief = f"<{given.dtype.name} {given.shape}>" if isinstance(given, np.ndarray) and given.ndim > 1 else given
            parts.append(f"{name}={brief!r}")
        return f"Case({', '.join(parts)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Let hypothesis print the choices, not the arrays."""
        printer.text(repr(self))


def one_in(draw: st.DrawFn, times: int) -> bool:
    """Draw True once in so many times; False is the simpler one."""
    return draw(st.integers(1, times)) == times


lengths = st.one_of(st.sampled_from(EDGES), st.integers(1, 140))
head_dims = st.one_of(st.sampled_from(HEAD_DIMS), st.integers(1, 257))


@st.composite
def sizes(draw: st.DrawFn, is_short: bool = False) -> dict[str, int]:
    """Draw batch_size, num_heads, num_kv_heads, q_len, num_keys, head_dim and value_dim.

    Half of them, or all if ``is_short``, have the few query rows and maybe the many keys of decoding.
    """
    is_short = is_short or draw(st.booleans())
    q_len = draw(st.integers(1, 8) if is_short else lengths)
    num_keys = draw(st.one_of(lengths, st.sampled_from(MANY_KEYS)) if is_short else lengths)
    if one_in(draw, 20):
        num_keys = 0
    head_dim = draw(head_dims)
    value_dim = draw(st.one_of(st.just(head_dim), head_dims))
    batch_size, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    group_size = draw(st.sampled_from(GROUPS))
    work = q_len * max(num_keys, 1) * max(head_dim, value_dim)
    while batch_size * num_kv_heads * group_size * work > MAX_WORK and batch_size * num_kv_heads * group_size > 1:
        batch_size, num_kv_heads, group_size = max(1, batch_size - 1), max(1, num_kv_heads - 1), max(1, group_size - 1)
    return {
        "batch_size": batch_size,
        "num_heads": num_kv_heads * group_size,
        "num_kv_heads": num_kv_heads,
        "q_len": q_len,
        "num_keys": num_keys,
        "head_dim": head_dim,
        "value_dim": value_dim,
    }


@st.composite
def places(draw: st.DrawFn, size: dict[str, int]) -> dict[str, Any]:
    """Draw causal, window, q_offset and kv_len, with a q_offset wherever it is needed."""
    batch_size, q_len, num_keys = size["batch_size"], size["q_len"], size["num_keys"]

    def per_batch(low: int, high: int) -> st.SearchStrategy[Any]:
        one = st.integers(low, high)
        return st.one_of(one, st.lists(one, min_size=batch_size, max_size=batch_size).map(np.array))

    options: dict[str, Any] = {}
    causal = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    bound = st.one_of(st.none(), st.integers(0, 3), st.sampled_from(EDGES))
    window = draw(st.one_of(st.just((None, None)), st.tuples(bound, bound)))
    kv_len = draw(st.one_of(st.none(), st.none(), per_batch(num_keys // 2, num_keys), per_batch(0, num_keys)))
    if causal is not None:
        options["causal"] = causal
    if window != (None, None):
        options["window"] = window
    if kv_len is not None:
        options["kv_len"] = kv_len
    is_needed = causal is None and window != (None, None)
    if is_needed or one_in(draw, 3):
        options["q_offset"] = draw(st.one_of(per_batch(0, num_keys), per_batch(-q_len - 3, num_keys + 3)))
    return options


@st.composite
def masks(draw: st.DrawFn, size: dict[str, int], dtype: str, rng: np.random.Generator) -> np.ndarray | None:
    """Draw a mask or None: bool or additive, any broadcast shape, with closed rows, columns, tiles, or all closed.

    An additive mask closes with -inf, or with the least float32, as models do: those are then attended all the same.
    """
    kind = draw(st.sampled_from(["bool", "bool", "float", "float_inf", "float_min", "none"]))
    if kind == "none":
        return None
    full = (size["batch_size"], size["num_heads"], size["q_len"], size["num_keys"])
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.sampled_from([length, length, 1])) for length in full[4 - rank :])
    is_open = rng.random(shape) < draw(st.sampled_from([1.0, 0.9, 0.5, 0.1]))
    if one_in(draw, 20):
        is_open[...] = False
    for closed in draw(st.lists(st.sampled_from(["rows", "columns", "tile", "first_tile"]), max_size=2)):
        tile = draw(st.sampled_from([32, 64]))
        columns = slice(0, tile) if closed == "first_tile" else _slice(rng, shape[-1], tile)
        rows = _slice(rng, shape[-2], tile) if rank > 1 else slice(None)
        if closed == "rows" and rank > 1:
            is_open[..., rows, :] = False
        elif closed in ("columns", "first_tile"):
            is_open[..., columns] = False
        elif closed == "tile":
            is_open[(..., rows, columns) if rank > 1 else columns] = False
    if kind == "bool":
        return is_open
    bias = rng.normal(scale=3, size=shape).astype(np.float32)
    if kind == "float_min":
        return np.where(is_open, bias, np.finfo(np.float32).min)
    if kind == "float_inf":
        bias = np.where(is_open, bias, np.float32(-np.inf))
    return bias.astype(numpy_dtype(draw(st.sampled_from(["float32", dtype]))))


def _slice(rng: np.random.Generator, length: int, tile: int) -> slice:
    """Return a whole tile of an axis, as its kernel would cut it."""
    start = int(rng.integers(0, max(length, 1))) // tile * tile
    return slice(start, start + tile)


#: Which kinds of options `cases` draws: one kind at a time finds a fault in few examples, all at once in combination.
THEMES = {
    "sizes": frozenset(),
    "masks": frozenset({"mask"}),
    "places": frozenset({"place"}),
    "scores": frozenset({"score"}),
    "everything": frozenset({"mask", "place", "score"}),
}


@st.composite
def cases(draw: st.DrawFn, theme: str = "everything", few_kernels: bool = False,
          dtypes: tuple[str, ...] = FLOAT_DTYPES) -> Case:
    """Draw a whole call of attention with the options of one of THEMES, and with ``dtypes`` among these.

    ``few_kernels`` keeps to short queries, float16 and sizes that few kernels of `split` serve.
    """
    kinds = THEMES[theme]
    size = draw(sizes(is_short=few_kernels))
    if few_kernels:
        size["head_dim"] = size["value_dim"] = draw(st.sampled_from(FEW_HEAD_DIMS))
    dtype = "float16" if few_kernels else draw(st.sampled_from(dtypes))
    kv_dtype = draw(st.sampled_from(dtypes)) if dtype == "float32" else dtype
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    options = draw(places(size)) if "place" in kinds else {}
    options["layout"] = layout
    mask = draw(masks(size, dtype, rng)) if "mask" in kinds else None
    if mask is not None:
        options["mask"] = mask
    choices = {**size, "dtype": dtype, "kv_dtype": kv_dtype, "seed": seed}

    amplitude = choices["amplitude"] = draw(st.sampled_from([1.0, 30.0]))
    query, key, value = _numbers(rng, size, amplitude, draw(st.booleans()))
    query = query.astype(numpy_dtype(dtype))
    key, value = key.astype(numpy_dtype(kv_dtype)), value.astype(numpy_dtype(kv_dtype))
    peak = choices["peak"] = draw(st.sampled_from([None, 1.0, 20.0, 150.0, -150.0]))
    if peak is not None or amplitude > 1:
        options["scale"] = scale_for(query, key, peak or 10.0)
    if "score" in kinds:
        options |= draw(score_options(size, options, rng))
        if "sinks" in options and abs(peak or 0) > MAX_PEAK_WITH_SINKS:  # a row that the sink dwarfs is below float32
            options["scale"] = scale_for(query, key, np.copysign(MAX_PEAK_WITH_SINKS, peak))

    clean = (query, key, value)
    poison = choices["poison"] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    poisoned = poisoned_arrays(clean, options, poison)
    if layout == "bshd":
        clean, poisoned = (tuple(array.transpose(0, 2, 1, 3) for array in arrays) for arrays in (clean, poisoned))
    clean = tuple(map(np.ascontiguousarray, clean))
    views = choices["views"] = draw(st.tuples(*[st.sampled_from(sorted(VIEWS))] * 3))
    poisoned = tuple(VIEWS[view](array) for view, array in zip(views, poisoned, strict=True))
    return Case(poisoned, clean, options, choices)


def _numbers(
    rng: np.random.Generator, size: dict[str, int], amplitude: float, has_mean: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return query, key and value in bhsd: signed, and values with a mean of either sign in each column if asked."""
    batch_size, dim, value_dim = size["batch_size"], size["head_dim"], size["value_dim"]
    query = amplitude * rng.normal(size=(batch_size, size["num_heads"], size["q_len"], dim))
    key = amplitude * rng.normal(size=(batch_size, size["num_kv_heads"], size["num_keys"], dim))
    value = rng.normal(size=(batch_size, size["num_kv_heads"], size["num_keys"], value_dim))
    if has_mean or value_dim < MIN_DIM_OF_FREE_SIGNS:
        mean = 3 * rng.choice([-1.0, 1.0], size=(batch_size, size["num_kv_heads"], 1, value_dim))
        value = mean + np.clip(value, -2, 2)
    return query, key, value


def scale_for(query: np.ndarray, key: np.ndarray, peak: float) -> float:
    """Return the scale that makes the largest score, either sign, ``peak``."""
    group_size = query.shape[1] // key.shape[1]
    keys = key.astype(np.float64).repeat(group_size, axis=1)
    dots = query.astype(np.float64) @ keys.swapaxes(-1, -2)
    largest = np.abs(dots).max(initial=0)
    return float(np.float32(peak / largest)) if largest > 0 else 1.0


@st.composite
def score_options(
    draw: st.DrawFn, size: dict[str, int], options: dict[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
    """Draw softcap, sinks and ALiBi slopes, the latter with a q_offset if ``options`` leave it open."""
    drawn: dict[str, Any] = {}
    if one_in(draw, 3):
        drawn["softcap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    if one_in(draw, 3):
        drawn["sinks"] = np.clip(rng.normal(scale=5, size=size["num_heads"]), -8, 8).astype(np.float32)
    if one_in(draw, 3):
        if "causal" not in options and "q_offset" not in options:
            drawn["q_offset"] = draw(st.sampled_from([0, size["num_keys"] - size["q_len"], 3]))
        drawn["alibi_slopes"] = _slopes(rng, size, options | drawn)
    return drawn


def _slopes(rng: np.random.Generator, size: dict[str, int], options: dict[str, Any]) -> np.ndarray:
    """Return slopes that keep slope times distance below 40, so that float32 has digits left."""
    offset = options.get("q_offset", size["q_len"] + size["num_keys"])
    furthest = size["q_len"] + size["num_keys"] + int(np.abs(offset).max())
    return (rng.uniform(0, 40, size["num_heads"]) / furthest).astype(np.float32)

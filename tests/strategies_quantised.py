"""Hypothesis strategies for attention over quantised keys and values: codes and scales that no quantiser would make.

What no row attends has the scale NaN or infinity. Scores keep to a drawn peak, whatever codes and scales are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.strategies import MAX_PEAK_WITH_SINKS, masks, places, scale_for, score_options, sizes
from vkattn import oracle
from vkattn.dtypes import FLOAT_DTYPES, numpy_dtype
from vkattn.formats import CODE_RANGE, QUANTISED, QuantisedRows, num_blocks
from vkattn.oracle.problem import Problem
from vkattn.validate import Call, attention_call

#: Formats of keys and values: of one there are kernels of their own, the rest share those for mixtures.
PAIRS = [*((name, name) for name in QUANTISED), ("int8", "q4_0"), ("q8_0", "float16"), ("float32", "int8"),
         ("q4_0", "bfloat16")]
#: Scales of blocks lie in float16's normal range, those of int8 in float32's; outputs must fit the query's dtype.
FACTORS = [1.0, 1e-2]
WIDE_FACTORS = [*FACTORS, 1e-20, 1e15]

Rows = QuantisedRows | np.ndarray


@dataclass
class QuantisedCase:
    """One call: the query, rows of keys and values (bhsd) as they are stored, poisoned and clean, and their meaning."""

    query: np.ndarray
    poisoned: tuple[Rows, Rows]
    clean: tuple[Rows, Rows]
    exact: tuple[np.ndarray, np.ndarray]
    options: dict[str, Any]
    choices: dict[str, Any]

    def __repr__(self) -> str:
        brief = {name: f"<{np.asarray(given).dtype} {np.shape(given)}>" if np.ndim(given) > 1 else given
                 for name, given in self.options.items()}
        return f"QuantisedCase({self.choices | brief})"

    def call(self, rows: tuple[Rows, Rows], *, return_lse: bool = True) -> Call:
        """Return the checked call over ``rows``."""
        stand_ins = [np.broadcast_to(np.zeros((), self.query.dtype), array.shape) for array in self.exact]
        call = attention_call(self.query, *stand_ins, return_lse=return_lse, **self.options)
        pair = self.choices["pair"]
        return replace(call, problem=replace(call.problem, key_dtype=pair[0], value_dtype=pair[1]), key=rows[0],
                       value=rows[1])


@st.composite
def quantised_cases(draw: st.DrawFn) -> QuantisedCase:
    """Draw a call over stored rows, with every option."""
    size = draw(sizes(is_short=draw(st.sampled_from([True, True, False]))))
    pair, dtype = draw(st.sampled_from(PAIRS)), draw(st.sampled_from(FLOAT_DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options = draw(places(size))
    mask = draw(masks(size, "float32", rng))
    if mask is not None:
        options["mask"] = mask
    query = rng.normal(size=(size["batch_size"], size["num_heads"], size["q_len"], size["head_dim"])).astype(
        numpy_dtype(dtype))
    shape = (size["batch_size"], size["num_kv_heads"], size["num_keys"])
    clean = tuple(
        draw(stored_rows((*shape, size[dim]), name, rng, may_be_0=dim == "head_dim",
                         factors=WIDE_FACTORS if name == "int8" and dtype != "float16" else FACTORS))
        for dim, name in zip(("head_dim", "value_dim"), pair, strict=True))
    exact = tuple(exact_rows(rows) for rows in clean)
    peak = draw(st.sampled_from([1.0, 20.0, 150.0, -150.0]))
    options["scale"] = scale_for(query, exact[0], peak)
    options |= draw(score_options(size, options, rng))
    if "sinks" in options:  # as in `cases`
        options["scale"] = scale_for(query, exact[0], np.copysign(min(abs(peak), MAX_PEAK_WITH_SINKS), peak))
    is_dead = dead_keys(query, exact[0], options)
    poison = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    poisoned = tuple(poisoned_rows(rows, is_dead, poison) for rows in clean)
    return QuantisedCase(query, poisoned, clean, exact, options,  # type: ignore[arg-type]
                         {**size, "pair": pair, "dtype": dtype, "peak": peak, "poison": poison})


@st.composite
def stored_rows(draw: st.DrawFn, shape: tuple[int, ...], name: str, rng: np.random.Generator, *,
                may_be_0: bool, factors: list[float]) -> Rows:
    """Draw rows of a format: codes all over their range or at its ends, scales of any size and sign.

    Unless they ``may_be_0``, no row is: beside a row of zeros that weighs most, what others give may be below float32.
    """
    if name not in QUANTISED:
        return (1 + rng.normal(size=shape)).astype(numpy_dtype(name))
    low, high = CODE_RANGE[name]
    codes = rng.choice([low, high], shape) if draw(st.booleans()) else rng.integers(low, high + 1, shape)
    of_scales = shape[:-1] if name == "int8" else (*shape[:-1], num_blocks(shape[-1]))
    scale = draw(st.sampled_from(factors)) * rng.uniform(0.2, 1, of_scales) / high
    kind = draw(st.sampled_from(["plain", "wide", "signs", *(["zeros"] if may_be_0 else [])]))
    if kind == "wide":
        scale *= 10.0 ** rng.uniform(-1, 1, of_scales)
    if kind == "signs":
        scale *= rng.choice([-1.0, 1.0], of_scales)
    if kind == "zeros":
        scale[rng.random(of_scales) < 0.3] = 0
    zero = np.zeros(shape[:-1], np.int64)
    if name == "int8":
        zero = rng.choice([low, high, 0], of_scales) if draw(st.booleans()) else rng.integers(low, high + 1, of_scales)
    if not may_be_0:
        codes[..., 0] = np.where(codes[..., 0] == zero, np.where(zero == high, low, high), codes[..., 0])
    if name != "int8":
        return QuantisedRows(codes.astype(np.int8), scale.astype(np.float16))
    return QuantisedRows(codes.astype(np.int8), scale.astype(np.float32), zero.astype(np.int8))


def exact_rows(rows: Rows) -> np.ndarray:
    """Return what rows stand for, float64."""
    if isinstance(rows, np.ndarray):
        return rows.astype(np.float64)
    return oracle.dequantize(rows.codes, rows.scale, rows.zero_point)


def dead_keys(query: np.ndarray, keys: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Return which keys no row attends, bool ``[batch, KV heads, tokens]``."""
    problem = Problem(query, keys, **{name: given for name, given in options.items() if name != "sinks"})
    attended = np.array([[problem.attended(batch, head).any(axis=0) for head in range(problem.num_heads)]
                         for batch in range(problem.batch_size)])
    group_size = problem.num_heads // problem.num_kv_heads
    groups = attended.reshape(problem.batch_size, problem.num_kv_heads, group_size, problem.num_keys)
    dead: np.ndarray = ~groups.any(axis=2)
    return dead


def poisoned_rows(rows: Rows, is_dead: np.ndarray, poison: float) -> Rows:
    """Return rows with ``poison`` for the scale, or for the elements, of those that are dead."""
    if isinstance(rows, np.ndarray):
        filled = rows.copy()
        filled[is_dead] = poison
        return filled
    scale = rows.scale.copy()
    scale[is_dead] = poison
    return QuantisedRows(rows.codes, scale, rows.zero_point)

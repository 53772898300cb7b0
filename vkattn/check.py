"""``vkattn check``: run every kernel variant on one device and compare it with the float64 oracle.

A variant passes if each row of each case is within its tolerance (`vkattn.oracle.worst_share`: 1 is the bound) and a
second run of the same case gives the same bits. A variant that the device cannot run, or that no problem gets on it, is
named with the reason and does not count as a failure; one that some problem gets and no case here does, counts as one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import oracle
from .cache.kv_cache import KVCache
from .check_cases import dtype_mixtures, num_steps, quantised_shapes, shapes
from .check_results import Result, as_text, failed
from .dispatch import MATRIX_ALGORITHMS, PRIORITY, is_for
from .dtypes import AXIS, numpy_dtype
from .errors import DeviceError, VkattnError
from .formats import QUANTISED, QuantisedRows
from .graph.hazards import segments
from .graph.node import Binding, Dispatch
from .kernels.manifest import load_manifest, variant
from .kernels.params import pushed_count
from .ops.attention import attention, compute
from .ops.selftest import settle
from .progress import Progress
from .reach import QUANTISED_PAIRS, chosen, why_not_run
from .runtime.device import Device
from .validate import Call, attention_call

#: Is given a text that says what is checked now.
Show = Callable[[str], object]


def check_attention(device: Device, results: dict[str, Result], show: Show = str) -> None:
    """Run every algorithm on every case and dtype, and credit the variants that it used."""
    rng = np.random.default_rng(2026)
    for label, (batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim), options in shapes(rng):
        for query_dtype, key_dtype in dtype_mixtures():
            case = f"{label}, {query_dtype} x {key_dtype}"
            show(case)
            sizes = ((batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim),
                     (batch, kv_heads, kv_len, value_dim))
            arrays = [(2 * rng.standard_normal(size, np.float32)).astype(numpy_dtype(dtype))
                      for size, dtype in zip(sizes, (query_dtype, key_dtype, key_dtype), strict=True)]
            problem = attention_call(*arrays, **options).problem
            for module in PRIORITY:
                if not is_for(module, device.info, "auto"):
                    continue
                settle(device, problem, module.NAME)
                if module.not_supported_reasons(problem, device.info):
                    continue
                run = _attend(device, arrays, module.NAME, options)
                for used in module.variants(problem, device.info):
                    _note(results[used.name], case, run)


def check_quantised(device: Device, results: dict[str, Result], show: Show = str) -> None:
    """Run every algorithm over quantised keys and values of each format, and of two formats at once."""
    rng = np.random.default_rng(2027)
    for label, (batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim), options in quantised_shapes(rng):
        query = 2 * rng.standard_normal((batch, heads, q_len, head_dim), np.float32)
        keys, values = (2 * rng.standard_normal((batch, kv_heads, kv_len, dim), np.float32)
                        for dim in (head_dim, value_dim))
        for number, pair in enumerate(QUANTISED_PAIRS):
            given = query.astype(np.float16) if number % 2 else query
            case = f"{label}, {given.dtype.name} x {' and '.join(pair)}"
            show(case)
            stored, exact = zip(*(_stored(rows, dtype) for rows, dtype in zip((keys, values), pair, strict=True)),
                                strict=True)
            stand_ins = (keys.astype(given.dtype), values.astype(given.dtype))
            call = attention_call(given, *stand_ins, return_lse=True, **options)
            problem = replace(call.problem, key_dtype=pair[0], value_dtype=pair[1])
            call = replace(call, problem=problem, key=stored[0], value=stored[1])
            for module in PRIORITY:
                settle(device, problem, module.NAME)
                if module.not_supported_reasons(problem, device.info):
                    continue
                run = _attend_stored(device, call, exact, module.NAME, options)
                for used in module.variants(problem, device.info):
                    _note(results[used.name], case, run)


def _stored(rows: np.ndarray, dtype: str) -> tuple[Any, np.ndarray]:
    """Return rows as a kernel is given them, and the numbers that they stand for."""
    if dtype not in QUANTISED:
        return rows.astype(dtype), rows.astype(dtype)
    parts = oracle.quantize(rows, dtype)
    return QuantisedRows(*parts), oracle.dequantize(*parts)


def _attend_stored(device: Device, call: Call, exact: tuple[np.ndarray, ...], algorithm: str,
                   options: dict[str, Any]) -> Callable[[], float]:
    """Return a function that gives the worst share of one case over stored rows; it computes once."""

    def run() -> float:
        out, lse = compute(call, device, algorithm)
        again, _ = compute(call, device, algorithm)
        if not np.array_equal(out, again):
            return np.inf
        return oracle.worst_share(out, call.query, *exact, lse=lse, **options)

    return functools.cache(run)


def _attend(device: Device, arrays: list[np.ndarray], algorithm: str, options: dict[str, Any]) -> Callable[[], float]:
    """Return a function that gives the worst share of one case; it computes once."""

    def run() -> float:
        out, lse = attention(*arrays, return_lse=True, algorithm=algorithm, device=device, **options)
        again = attention(*arrays, algorithm=algorithm, device=device, **options)
        if not np.array_equal(out.astype(np.float32), again.astype(np.float32)):
            return np.inf
        return oracle.worst_share(out, *arrays, lse=lse, coopmat=algorithm in MATRIX_ALGORITHMS, **options)

    return functools.cache(run)


def _note(result: Result, label: str, run: Callable[[], float]) -> None:
    try:
        result.add(label, run())
    except VkattnError as error:
        result.problem = result.problem or f"{label}: {type(error).__name__}: {error}"


def check_words(device: Device, results: dict[str, Result]) -> None:
    """Check fill and copy: exactly their words, at odd offsets and lengths."""
    near, far = device.buffer(3000, "storage", "near"), device.buffer(3000, "host", "far")
    for count, offset, groups in ((1, 0, 1), (2049, 3, 2), (700, 2300, 7)):
        steps = [
            Dispatch(variant("fill"), (Binding(near),), {"offset": 0, "count": 3000, "value": 7}, groups),
            Dispatch(variant("fill"), (Binding(near),), {"offset": offset, "count": count, "value": 0xABCDEF01},
                     groups),
            Dispatch(variant("copy"), (Binding(far), Binding(near), Binding(far)), pushed_count(2999, src_offset=1),
                     groups),
        ]
        expected = np.full(3000, 7, np.uint32)
        expected[offset : offset + count] = 0xABCDEF01
        expected = np.append(expected[1:], 99)
        far.words[...] = 99
        recording = device.recording(segments(steps))
        recording.run()
        share = 0.0 if np.array_equal(far.words, expected) else np.inf
        recording.close()
        for name in ("fill", "copy"):
            results[name].add(f"{count} words at {offset}", share)
    near.destroy()
    far.destroy()


def check_caches(device: Device, results: dict[str, Result]) -> None:
    """Check kv_append and kv_read: two appends with gaps between batch entries, read back bit for bit."""
    rng = np.random.default_rng(7)
    for rows_dtype, cache_dtype in dtype_mixtures():
        kind = numpy_dtype(cache_dtype)
        cache = KVCache(2, 3, capacity=40, head_dim=20, value_dim=9, num_layers=2, dtype=cache_dtype, device=device)
        expected = [np.zeros((2, 33, 3, dim), kind) for dim in (20, 9)]
        for start, tokens in ((np.array([0, 0]), 30), (np.array([30, 11]), 3)):
            rows = [rng.standard_normal((2, tokens, 3, dim)).astype(numpy_dtype(rows_dtype)) for dim in (20, 9)]
            cache.update(rows[0], rows[1], start, layer=1)
            for batch in range(2):
                for target, given in zip(expected, rows, strict=True):
                    target[batch, start[batch] : start[batch] + tokens] = given[batch].astype(kind)
                    target[batch, start[batch] + tokens :] = 0
        same = all(np.array_equal(got.astype(np.float32), want.astype(np.float32))
                   for got, want in zip(cache.read(1), expected, strict=True))
        cache.close()
        for name in (f"kv_append_{AXIS[rows_dtype]}_{AXIS[cache_dtype]}", "kv_read"):
            results[name].add(f"{rows_dtype} rows, {cache_dtype} cache", 0.0 if same else np.inf)


def check_quantised_caches(device: Device, results: dict[str, Result]) -> None:
    """Check kv_append_quantised: codes within one of the oracle's, scales within an ulp (division may be inexact)."""
    rng = np.random.default_rng(8)
    for key_dtype, value_dtype in (("int8", "q4_0"), ("q8_0", "int8"), ("q4_0", "q8_0")):
        cache = KVCache(2, 3, 40, 50, value_dim=9, dtype=key_dtype, value_dtype=value_dtype, device=device)
        rows = [(10.0 ** rng.uniform(-3, 3, (2, 33, 3, 1)) * rng.standard_normal((2, 33, 3, dim))).astype(np.float32)
                for dim in (50, 9)]
        for start, stop in ((0, 30), (30, 33)):
            cache.update(rows[0][:, start:stop], rows[1][:, start:stop], start)
        raw = cache.raw()
        cache.close()
        worst = 0.0
        for name, array, dtype in (("key", rows[0], key_dtype), ("value", rows[1], value_dtype)):
            codes, scale, zero_point = oracle.quantize(array, dtype)
            expected = {name: codes, f"{name}_scale": scale, f"{name}_zero_point": zero_point}
            for part, wanted in expected.items():
                if wanted is not None:
                    unit = np.spacing(np.abs(wanted)).astype(np.float64) if part.endswith("scale") else 1.0
                    off = np.abs(np.asarray(raw[part]).astype(np.float64) - wanted.astype(np.float64)) / unit
                    worst = max(worst, float(off.max()))
        for name in ("kv_append_quantised", "kv_read"):
            results[name].add(f"float32 rows, {key_dtype} and {value_dtype} cache", worst)


def check_device(device: Device, show: Show = str) -> dict[str, Result]:
    """Check every variant of the manifest on ``device``; the key is the variant's name. ``show`` gets each step."""
    results = {name: Result() for name in load_manifest()}
    show("fill and copy")
    check_words(device, results)
    show("KV caches")
    check_caches(device, results)
    show("quantised KV caches")
    check_quantised_caches(device, results)
    check_attention(device, results, show)
    check_quantised(device, results, show)
    used = chosen(device.info)
    for name, result in results.items():
        if not result.cases and not result.problem:
            bf16 = "bf16" in name and ("bfloat16", "bfloat16") not in dtype_mixtures()
            result.not_run = why_not_run(load_manifest()[name], device.info, used) or (
                "not checked: needs the package ml_dtypes. Hint: pip install ml_dtypes" if bf16 else "")
            result.problem = "" if result.not_run else "MISSED: some problem gets it on this device, but no case here"
    return results


def main(args: argparse.Namespace) -> int:
    """Print a line for each variant; return 1 if one failed, 2 if there is no device to check."""
    try:
        device = Device(getattr(args, "device", None))
    except DeviceError as error:
        print(f"vkattn check: {error}", file=sys.stderr)
        return 2
    with device:
        if not getattr(args, "json", False):
            print(f'checking {len(load_manifest())} kernel variants on "{device.info.name}" against the float64 oracle',
                  flush=True)
        progress, done = Progress(num_steps()), itertools.count()
        try:
            results = check_device(device, lambda step: progress.show(next(done), step))
        finally:
            progress.close()
        bad = [name for name, result in results.items() if failed(result)]
        if getattr(args, "json", False):
            print(json.dumps({"device": device.info.name, "failed": bad,
                              "variants": {name: result.__dict__ for name, result in results.items()}}, indent=1))
            return 1 if bad else 0
        print(as_text(results))
    return 1 if bad else 0

"""Whatever an argument is given, a call computes or raises an error of vkattn, and all goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vkattn
from vkattn import Dim, GraphBuilder, KVCache
from vkattn.errors import VkattnError
from vkattn.runtime.device import Device

pytestmark = pytest.mark.once

ROWS = np.ones((1, 3, 2, 8), np.float32)
CODES, SCALES, ZEROS = np.ones((1, 3, 2, 8), np.int8), np.ones((1, 3, 2), np.float32), np.zeros((1, 3, 2), np.int8)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, "x", b"x", float("nan"), float("inf"), [], [1], [1, 2], [[1], [1, 2]], [1, "a"],
    (1, 2, 3), {}, {1}, object(), 10**30, -(10**30), 1j, slice(1), len, np.float16(2), np.bool_(True),
    np.datetime64("2020-01-01"), np.array(3), np.array([1.5]), np.array("a"), np.array([None]), np.zeros(0),
    np.zeros((0, 2)), np.arange(2), np.array([2**63], np.uint64), ROWS, ROWS[0], ROWS[..., None])

OPTIONS = ("mask", "causal", "scale", "softcap", "window", "sinks", "alibi_slopes", "layout", "return_lse", "algorithm")
ARRAYS = {"query": ROWS, "key": ROWS, "value": ROWS}
QUANTISED = dict.fromkeys(ARRAYS, CODES) | {f"{name}_{what}": array for name in ARRAYS
                                            for what, array in (("scale", SCALES), ("zero_point", ZEROS))}
STORED = {name: array for name, array in QUANTISED.items() if not name.startswith("query")}
SIZES = {"batch": 1, "num_kv_heads": 1, "capacity": 4, "head_dim": 4}


def node(kind: str, device: Device, store: KVCache, /, **given: Any) -> None:
    """Declare a node; the tensors, the cache and the position are right where None is given."""
    builder = GraphBuilder(device)
    rows: dict[str, Any] = {name: builder.input(name, ROWS.shape, "float32") for name in ARRAYS}
    if kind == "sdpa_with_kv_cache":
        rows |= {"cache": builder.kv_cache("cache", cache=store), "position": builder.position("at")}
    getattr(builder, kind)(**rows | {name: value for name, value in given.items() if name not in rows or (
        value is not None)})


def calls(device: Device, cache: KVCache, graph: Any) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return, by name, a function, and the arguments of which one at a time is replaced."""
    options = dict.fromkeys(OPTIONS) | {"window": (None, None), "return_lse": False, "algorithm": "auto"}
    kv_options = options | {"layout": "bshd", "causal": "bottom_right"}
    options |= {"layout": "bhsd"}
    return {
        "attention": (vkattn.attention, ARRAYS | options | {"q_offset": None, "kv_len": None, "device": device}),
        "scaled_dot_product_attention": (vkattn.scaled_dot_product_attention, ARRAYS | {
            "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
            "device": device}),
        "sdpa_with_kv_cache": (vkattn.sdpa_with_kv_cache, ARRAYS | kv_options | {"cache": cache, "input_pos": 0}),
        "quantized_attention": (vkattn.quantized_attention, QUANTISED | options | {
            "layout": "bshd", "start_pos": None, "device": device}),
        "quantize": (vkattn.oracle.quantize, {"rows": ROWS, "dtype": "int8"}),
        "merge_states": (vkattn.merge_states, {"out_a": ROWS, "lse_a": ROWS[..., 0], "out_b": ROWS,
                                               "lse_b": ROWS[..., 0], "layout": "bhsd"}),
        "KVCache": (KVCache, SIZES | {"value_dim": None, "num_layers": 1, "dtype": "int8", "value_dtype": None,
                                      "device": device}),
        "load": (KVCache.load, STORED | {"dtype": "int8", "value_dtype": None, "capacity": None, "device": device}),
        "update": (cache.update, {"key": ROWS, "value": ROWS, "input_pos": 0, "layer": 0}),
        "truncate": (cache.truncate, {"length": 8}),
        "reorder": (cache.reorder, {"batch_index": [0]}),
        "read": (cache.read, {"layer": 0}),
        "Device": (Device, {"select": device.info.index, "boundary": None, "score_budget_bytes": 1 << 20}),
        "Dim": (Dim, {"name": "n", "max": 1}),
        "attention node": (lambda **given: node("attention", device, cache, **given), dict.fromkeys(
            (*ARRAYS, "q_offset", "kv_len", "name")) | options),
        "cache node": (lambda **given: node("sdpa_with_kv_cache", device, cache, **given), dict.fromkeys(
            (*ARRAYS, "cache", "position", "name")) | kv_options | {"layer": 0}),
        "input": (lambda **given: GraphBuilder(device).input(**given), {
            "name": "n", "shape": (2, 3), "dtype": "float32"}),
        "constant": (lambda **given: GraphBuilder(device).constant(**given), {"name": "n", "array": ROWS}),
        "run": (lambda rows, inputs, **given: graph.run({"rows": rows} if inputs is None else inputs, **given), {
            "rows": ROWS, "inputs": None, "at": 0, "kv_len": 2}),
    }


@pytest.mark.filterwarnings("ignore")
def test_odd_arguments_are_computed_or_refused(device: Device) -> None:
    with Device(device.info.index) as own:
        cache = KVCache(1, 2, 8, 8, dtype="float32", device=own)
        builder = GraphBuilder(own)
        rows = builder.input("rows", (1, Dim("n", max=3), 2, 8), "float32")
        builder.output("out", builder.sdpa_with_kv_cache(rows, rows, rows, builder.kv_cache("cache", cache=cache),
                                                         builder.position("at")))
        builder.output("more", builder.attention(rows, rows, rows, layout="bshd", kv_len=builder.position("kv_len")))
        graph = builder.build()
        for name, (function, arguments) in calls(own, cache, graph).items():
            function(**arguments)
            for argument in arguments:
                for value in ODD:
                    try:
                        function(**arguments | {argument: value})
                    except VkattnError:
                        pass
                    except Exception as error:
                        pytest.fail(f"{name}: {argument}={value!r:.60} raises {type(error).__name__}: {error}")
        graph.run({"rows": ROWS}, at=0, kv_len=2)

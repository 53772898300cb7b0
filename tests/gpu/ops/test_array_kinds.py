"""What is no plain array: masked arrays are refused wherever an array is taken; other subclasses count as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.tolerance import assert_matches_oracle
from vkattn import GraphBuilder, KVCache, oracle
from vkattn.errors import DTypeError, VkattnError
from vkattn.runtime.device import Device

REFUSAL = r"`\w+` is a numpy\.ma\.MaskedArray, whose mask would be lost"

ROWS = np.ones((1, 2, 3, 8), np.float32)  # for a cache: 1 sequence, 2 tokens, 3 heads
PER_HEAD = np.ones(3, np.float32)
CODES, SCALES, ZEROS = np.ones((1, 2, 3, 8), np.int8), np.ones((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.int8)
QUANTISED = dict.fromkeys(("query", "key", "value"), CODES) | {
    f"{name}_{what}": array for name in ("query", "key", "value")
    for what, array in (("scale", SCALES), ("zero_point", ZEROS))}
STORED = {name: array for name, array in QUANTISED.items() if not name.startswith("query")}


def hide(array: Any) -> Any:
    """Return a masked array whose first element is hidden."""
    hidden = np.zeros(np.shape(array), bool)
    hidden.flat[0] = True
    return np.ma.array(array, mask=hidden)


@pytest.fixture
def cache(device: Device) -> Iterator[KVCache]:
    made = KVCache(1, 3, 4, 8, dtype="float32", device=device)
    yield made
    made.close()


def three(function: Callable[..., object], *more: Any, **options: Any) -> list[Callable[[], object]]:
    """Return calls with rows as query, key and value, one of them masked."""
    return [lambda at=at: function(*(hide(ROWS) if at == index else ROWS for index in range(3)), *more, **options)
            for at in range(3)]


def named(function: Callable[..., object], arguments: dict[str, Any], *more: Any, **options: Any
          ) -> list[Callable[[], object]]:
    """Return calls with one of the named arguments masked."""
    return [lambda name=name: function(*more, **options, **arguments | {name: hide(arguments[name])})
            for name in arguments]


def test_masked_arrays_are_refused(device: Device, cache: KVCache) -> None:
    mask, scores = np.ones((1, 1, 2, 2), bool), np.zeros((1, 3, 2, 2))
    per_row = {"mask": mask, "sinks": PER_HEAD, "alibi_slopes": PER_HEAD}
    lse = np.ones((1, 2, 3), np.float32)
    calls = [
        *three(vkattn.attention, device=device),
        *named(vkattn.attention, per_row, ROWS, ROWS, ROWS, layout="bshd", device=device),
        *three(vkattn.scaled_dot_product_attention, device=device),
        lambda: vkattn.scaled_dot_product_attention(ROWS, ROWS, ROWS, hide(np.ones((3, 3), bool)), device=device),
        *three(vkattn.sdpa_with_kv_cache, cache, 0),
        *named(vkattn.sdpa_with_kv_cache, per_row, ROWS, ROWS, ROWS, cache, 0),
        *named(vkattn.quantized_attention, QUANTISED, device=device),
        *named(vkattn.merge_states, {"out_a": ROWS, "lse_a": lse, "out_b": ROWS, "lse_b": lse}),
        *named(cache.update, {"key": ROWS, "value": ROWS, "input_pos": np.array([0])}),
        *named(cache.truncate, {"length": np.array([0])}),
        *named(cache.reorder, {"batch_index": np.array([0])}),
        *named(KVCache.load, STORED, dtype="int8", device=device),
        lambda: GraphBuilder(device).constant("rows", hide(ROWS)),
        *three(oracle.attention),
        *named(oracle.attention, per_row, ROWS, ROWS, ROWS, layout="bshd"),
        *three(oracle.scaled_dot_product_attention),
        *named(oracle.softmax, {"scores": scores}),
        *named(oracle.quantize, {"rows": ROWS}, dtype="int8"),
        *named(oracle.sdpa_with_kv_cache, {"key_cache": ROWS, "value_cache": ROWS}, ROWS, ROWS, ROWS, input_pos=0),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(DTypeError, match=REFUSAL):
            call()
            pytest.fail(f"call {number} was not refused")
    assert cache.lengths.tolist() == [[0]]


@pytest.mark.parametrize("name", ["q_offset", "kv_len"])
def test_masked_positions_are_refused(device: Device, name: str) -> None:
    with pytest.raises(VkattnError, match=f"`{name}` is masked_array"):
        vkattn.attention(ROWS, ROWS, ROWS, device=device, **{name: hide([1])})


def test_masked_inputs_and_positions_of_a_graph_are_refused(device: Device, cache: KVCache) -> None:
    builder = GraphBuilder(device)
    rows = builder.input("rows", ROWS.shape, "float32")
    builder.output("out", builder.sdpa_with_kv_cache(rows, rows, rows, builder.kv_cache("cache", cache=cache),
                                                     builder.position("at")))
    graph = builder.build()
    with pytest.raises(DTypeError, match=REFUSAL):
        graph.run({"rows": hide(ROWS)}, at=0)
    with pytest.raises(DTypeError, match=REFUSAL):
        graph.run({"rows": ROWS}, at=hide([0]))
    assert cache.lengths.tolist() == [[0]]
    graph.close()


def test_other_subclasses_are_arrays(device: Device, rng: np.random.Generator) -> None:
    """A matrix stays two-dimensional and multiplies by ``*``; what it holds is taken all the same."""

    class Labelled(np.ndarray):
        def __getitem__(self, at: Any) -> Any:
            raise AssertionError("a subclass was used as if it were a plain array")

    arrays = [rng.standard_normal((1, 2, 5, 8), np.float32) for _ in range(3)]
    mask = rng.random((5, 5)) < 0.7
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(mask)
    out = vkattn.attention(*(array.view(Labelled) for array in arrays), mask=matrix, device=device)
    assert type(out) is np.ndarray
    assert_matches_oracle(out, *arrays, mask=mask)

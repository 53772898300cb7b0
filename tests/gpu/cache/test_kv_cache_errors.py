"""What a `KVCache` refuses, and that nothing has changed then: neither its lengths nor a word on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.caches import Model, assert_holds, new_rows, raw_words
from vkattn import KVCache
from vkattn.caps.model import Heap
from vkattn.errors import CapacityError, ClosedError, DTypeError, OptionError, ShapeError
from vkattn.runtime.device import Device


def rows(tokens: int = 2, *, batch: int = 2, heads: int = 3, dim: int = 4, dtype: Any = np.float32) -> np.ndarray:
    return np.ones((batch, tokens, heads, dim), dtype)


@pytest.fixture(scope="module")
def cache(device: Device) -> KVCache:
    """Two layers of capacity 10, the lengths 6 and 3 in each; no test changes it, which is the point."""
    made = KVCache(2, 3, 10, 4, value_dim=5, num_layers=2, dtype="float16", device=device)
    for layer in range(2):
        made.update(*new_rows(np.random.default_rng(layer), made, 6), 0, layer)
    made.truncate([6, 3])
    return made


K, V = rows(), rows(dim=5)

REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("gap", (K, V, [7, 0]), OptionError,
     "`input_pos` is 7 for batch entry 0, but layer 0 holds 6 tokens there; it must be within 0 .. 6"),
    ("gap in one entry", (K, V, 4), OptionError, "`input_pos` is 4 for batch entry 1, but layer 0 holds 3"),
    ("negative", (K, V, -1), OptionError, "`input_pos` is -1 for batch entry 0"),
    ("negative entry", (K, V, [0, -2]), OptionError, "`input_pos` is -2 for batch entry 1"),
    ("float position", (K, V, 1.0), OptionError, "`input_pos` is 1.0; it must be an integer, or integers of shape"),
    ("bool position", (K, V, True), OptionError, "`input_pos` is True"),
    ("positions of another batch", (K, V, [0, 0, 0]), OptionError, r"integers of shape \(2,\)"),
    ("huge position", (K, V, 2**70), OptionError, "`input_pos` is 1180591620717411303424"),
    ("capacity", (rows(8), rows(8, dim=5), 3), CapacityError,
     "append of 8 tokens at input_pos 3 needs 11 rows; this cache holds capacity 10. Hint"),
    ("capacity of one entry", (rows(5), rows(5, dim=5), [6, 0]), CapacityError, "needs 11 rows"),
    ("longer than any", (rows(11), rows(11, dim=5), 0), CapacityError, "needs 11 rows"),
    ("rank", (K[0], V[0], 0), ShapeError, r"`key` has shape \(2, 3, 4\); this cache takes"),
    ("batch", (rows(batch=1), rows(batch=1, dim=5), 0), ShapeError, r"`key` has shape \(1, 2, 3, 4\)"),
    ("heads", (rows(heads=2), rows(heads=2, dim=5), 0), ShapeError, "num_kv_heads 3"),
    ("head_dim", (rows(dim=5), V, 0), ShapeError, r"`key` has shape \(2, 2, 3, 5\); this cache takes .* dim 4\)"),
    ("value_dim", (K, K, 0), ShapeError, r"`value` has shape \(2, 2, 3, 4\); this cache takes .* dim 5\)"),
    ("no tokens", (rows(0), rows(0, dim=5), 0), ShapeError, "at least one token"),
    ("other tokens", (K, rows(3, dim=5), 0), ShapeError, "`key` has 2 tokens but `value` has 3"),
    ("mixed dtypes", (K, V.astype(np.float16), 0), DTypeError, "`key` is float32 but `value` is float16"),
    ("float64", (K.astype(np.float64), V, 0), DTypeError,
     "`key` is float64; supported: float32, float16, bfloat16. Hint"),
    ("layer", (K, V, 0, 2), OptionError, r"`layer` is 2; this cache has layers 0 .. 1"),
    ("negative layer", (K, V, 0, -1), OptionError, "`layer` is -1"),
    ("layer that is no integer", (K, V, 0, True), OptionError, "`layer` is True"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), [case[1:] for case in REFUSED],
                         ids=[case[0] for case in REFUSED])
def test_a_refused_append_changes_nothing(cache: KVCache, arguments: tuple[Any, ...], kind: type[Exception],
                                          message: str) -> None:
    before, lengths, plans = raw_words(cache), cache.lengths, len(cache.plans)
    with pytest.raises(kind, match=message):
        cache.update(*arguments)
    np.testing.assert_array_equal(cache.lengths, lengths)
    for got, kept in zip(raw_words(cache), before, strict=True):
        np.testing.assert_array_equal(got, kept)
    assert len(cache.plans) == plans


def test_bfloat16_rows_into_a_float16_cache_are_refused(cache: KVCache) -> None:
    import ml_dtypes

    halves = [array.astype(ml_dtypes.bfloat16) for array in (K, V)]
    with pytest.raises(DTypeError, match="`key` is bfloat16; this float16 cache takes float32 or float16 rows"):
        cache.update(*halves, 0)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_the_capacity_can_be_filled_and_not_one_row_more(device: Device, rng: np.random.Generator, start: int) -> None:
    cache = KVCache(1, 2, 5, 3, dtype="float32", device=device)
    model = Model(cache)
    for position, tokens in ((0, start), (start, 5 - start)):
        if tokens:
            new = new_rows(rng, cache, tokens)
            cache.update(*new, position)
            model.update(*new, position)
    assert cache.lengths.item() == 5
    for position, tokens in ((5, 1), (4, 2), (0, 6)):
        before = raw_words(cache)
        with pytest.raises(CapacityError, match=f"append of {tokens} tokens at input_pos {position} needs 6 rows"):
            cache.update(*new_rows(rng, cache, tokens), position)
        for got, kept in zip(raw_words(cache), before, strict=True):
            np.testing.assert_array_equal(got, kept)
    assert_holds(cache, model)


@pytest.mark.parametrize(("call", "message"), [
    (lambda cache: cache.truncate(-1), "`length` is -1; it must be an integer that is not negative"),
    (lambda cache: cache.truncate([1, 2, 3]), r"`length` is \[1, 2, 3\]"),
    (lambda cache: cache.truncate(1.5), "`length` is 1.5"),
    (lambda cache: cache.reorder([0]), r"`batch_index` is \[0\]; it must be 2 integers within 0 .. 1"),
    (lambda cache: cache.reorder([0, 2]), r"`batch_index` is \[0, 2\]"),
    (lambda cache: cache.reorder([-1, 0]), r"`batch_index` is \[-1, 0\]"),
    (lambda cache: cache.reorder([0.0, 1.0]), "`batch_index` is"),
    (lambda cache: cache.reorder(1), "`batch_index` is 1"),
    (lambda cache: cache.read(2), "`layer` is 2"),
    (lambda cache: cache.layer("0"), "`layer` is '0'"),
])
def test_other_mistakes(cache: KVCache, call: Callable[[KVCache], Any], message: str) -> None:
    lengths = cache.lengths
    with pytest.raises(OptionError, match=message):
        call(cache)
    np.testing.assert_array_equal(cache.lengths, lengths)


@pytest.mark.parametrize(("sizes", "kind", "message"), [
    ({"batch": 0}, OptionError, "`batch` is 0; it must be an integer of at least 1"),
    ({"num_kv_heads": 1.5}, OptionError, "`num_kv_heads` is 1.5"),
    ({"capacity": -4}, OptionError, "`capacity` is -4"),
    ({"head_dim": True}, OptionError, "`head_dim` is True"),
    ({"value_dim": 0}, OptionError, "`value_dim` is 0"),
    ({"num_layers": 0}, OptionError, "`num_layers` is 0"),
    ({"dtype": "float64"}, OptionError, "`dtype` is 'float64'; supported: 'float32', 'float16', 'bfloat16'"),
    ({"dtype": np.float16}, OptionError, "`dtype` is <class 'numpy.float16'>"),
    ({"dtype": "int8", "value_dtype": "q5_0"}, OptionError, "`value_dtype` is 'q5_0'; supported: .*'q4_0'"),
    ({"device": "llvmpipe"}, OptionError, "`device` is 'llvmpipe'; it must be a vkattn.Device"),
])
def test_wrong_sizes(device: Device, sizes: dict[str, Any], kind: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"batch": 1, "num_kv_heads": 1, "capacity": 4, "head_dim": 4, "device": device}
    with pytest.raises(kind, match=message):
        KVCache(**(good | sizes))


def test_a_layer_beyond_the_largest_buffer_is_refused_before_anything_is_allocated(device: Device) -> None:
    with Device(device.info.index) as own:
        own.info = replace(own.info, max_storage_buffer_range=4096)
        KVCache(1, 1, 64, 16, dtype="float32", device=own)
        before = own.allocation_count
        with pytest.raises(CapacityError, match=r"one layer of the cache needs 4160 bytes; .* is 4096 bytes. Hint"):
            KVCache(1, 1, 65, 16, dtype="float32", device=own)
        assert own.allocation_count == before


def test_what_does_not_fit_the_heap_is_refused_and_leaves_nothing(device: Device) -> None:
    with Device(device.info.index) as own:
        own.info = replace(own.info, max_storage_buffer_range=1 << 20, heaps=(Heap((3 << 20) + 9, True),))
        before = own.allocated_bytes
        with pytest.raises(CapacityError, match=r"3145728 are in use; the largest heap .* holds 3145737 bytes"):
            KVCache(1, 1, 1024, 256, num_layers=4, dtype="float32", device=own)
        assert own.allocated_bytes == before


USES: list[Callable[[KVCache], Any]] = [
    lambda cache: cache.update(K, V, 0),
    lambda cache: cache.read(),
    lambda cache: cache.truncate(1),
    lambda cache: cache.reset(),
    lambda cache: cache.reorder([1, 0]),
    lambda cache: cache.layer(0).update(K, V, 0),
    lambda cache: cache.layer(0).read(),
]


def test_a_closed_cache_is_refused(device: Device) -> None:
    cache = KVCache(2, 3, 10, 4, value_dim=5, device=device)
    cache.update(K, V, 0)
    cache.close()
    cache.close()
    for use in USES:
        with pytest.raises(ClosedError, match=r"a KVCache was used after close\(\)"):
            use(cache)


def test_a_cache_of_a_closed_device_is_refused(device: Device) -> None:
    with Device(device.info.index) as own:
        cache = KVCache(2, 3, 10, 4, value_dim=5, device=own)
        cache.update(K, V, 0)
    for use in USES:
        with pytest.raises(ClosedError, match=r"the device .* was used after close\(\)"):
            use(cache)
    cache.close()


@pytest.mark.parametrize("room", [1, 2, 3])
def test_too_few_allocations_leave_nothing_behind(device: Device, room: int) -> None:
    """Appending takes three buffers and a recording's, reading two and that: if one is refused, the rest is freed."""
    new = rows(batch=1, heads=1)
    with Device(device.info.index) as own:
        cache = KVCache(1, 1, 4, 4, dtype="float32", device=own)
        cache.update(new, new, 0)
        cache.plans.clear()
        info, before = own.info, own.allocation_count
        own.info = replace(info, max_memory_allocation_count=before + room + 1)
        calls: list[Callable[[], object]] = [lambda: cache.update(new, new, 2), cache.read]
        for call in calls if room < 3 else calls[:1]:
            with pytest.raises(CapacityError, match="would be allocation"):
                call()
            assert own.allocation_count == before
        own.info = info
        cache.update(new, new, 2)
        np.testing.assert_array_equal(cache.read()[0], rows(4, batch=1, heads=1))

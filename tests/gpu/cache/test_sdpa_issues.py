"""What other implementations of cached attention got wrong, as small cases, and what `sdpa_with_kv_cache` refuses.

The cases come from ExecuTorch's issue tracker; the numbers are issues there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.caches import Session, raw_words
from vkattn import KVCache
from vkattn.errors import CapacityError, ClosedError, DTypeError, OptionError, ShapeError
from vkattn.runtime.device import Device


def session(device: Device, rng: np.random.Generator, heads: tuple[int, int], capacity: int, head_dim: int,
            dtype: str = "float32", **more: Any) -> Session:
    return Session(KVCache(1, heads[1], capacity, head_dim, dtype=dtype, device=device), heads[0], rng, **more)


@pytest.mark.parametrize("head_dim", [5, 6, 17])
def test_one_value_row_is_every_heads_output(device: Device, head_dim: int) -> None:
    """#23001: with head_dim % 4 != 0 the second query head got the row shifted."""
    cache = KVCache(1, 1, 4, head_dim, dtype="float32", device=device)
    row = np.arange(1, head_dim + 1, dtype=np.float32)
    out = vkattn.sdpa_with_kv_cache(np.ones((1, 1, 2, head_dim), np.float32), np.ones((1, 1, 1, head_dim), np.float32),
                                    row.reshape(1, 1, 1, -1), cache, 0)
    assert out[0, 0].tolist() == [row.tolist()] * 2


@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_of_151(device: Device, rng: np.random.Generator, sign: int) -> None:
    """#18407: without the row's maximum subtracted, e^151 is infinite and e^-151 sums to nothing."""
    made = session(device, rng, (3, 1), 16, 128)
    for start, tokens in ((0, 4), (4, 3)):
        query, key, value = made.arrays(tokens)
        out = made.step([np.full_like(query, 3.66), np.full_like(key, 3.66 * sign), value], start)
        assert np.isfinite(out).all()


def test_half_dot_products_beyond_the_range_of_half(device: Device, rng: np.random.Generator) -> None:
    """#19114: q . k is 102400 before the scale; equal scores average the values."""
    made = session(device, rng, (4, 2), 8, 64, "float16")
    query, key, value = made.arrays(4, "float16")
    made.step([np.full_like(query, 40), np.full_like(key, 40), value], 0)


def test_decode_across_a_block_of_512_keys(device: Device, rng: np.random.Generator) -> None:
    """#9105, #4322: decoding at 511, 512 and 513."""
    made = session(device, rng, (4, 2), 600, 16)
    _, key, value = made.arrays(511)
    made.cache.update(key, value, 0)
    made.model.update(key, value, 0)
    for start in (511, 512, 513):
        made.step(made.arrays(1), start)


def test_chunked_prefill(device: Device, rng: np.random.Generator) -> None:
    """#9105: 508 tokens, then 127 more in a cache of 2048."""
    made = session(device, rng, (4, 2), 2048, 32)
    made.step(made.arrays(508), 0)
    made.step(made.arrays(127), 508)


@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_a_mask_that_closes_the_first_512_keys(device: Device, rng: np.random.Generator, kind: str) -> None:
    """#10466: a sliding window as a mask, all of whose first blocks are closed."""
    made = session(device, rng, (8, 8), 700, 4)
    _, key, value = made.arrays(575)
    made.cache.update(key, value, 0)
    made.model.update(key, value, 0)
    is_open = (np.arange(700) >= 516) & (np.arange(700) <= 575)
    mask = is_open if kind == "bool" else np.where(is_open, 0, -np.inf).astype(np.float32)
    assert np.isfinite(made.step(made.arrays(1), 575, mask=mask[None], causal=None)).all()


def test_a_mask_at_position_0_decides_alone(device: Device, rng: np.random.Generator) -> None:
    """#10340: with causal=None every new row may see every other, whatever its position."""
    made = session(device, rng, (4, 2), 8, 8)
    arrays = made.arrays(4)
    out = made.step(arrays, 0, mask=np.ones((4, 4), bool), causal=None)
    flipped = made.step([array[:, ::-1] for array in arrays], 0, mask=np.ones((4, 4), bool), causal=None)
    np.testing.assert_allclose(out, flipped[:, ::-1], rtol=1e-5, atol=1e-6)
    mask = np.full((4, 8), -np.inf, np.float32)
    mask[[0, 1, 2, 3], [3, 2, 1, 0]] = 100.642
    out = made.step(arrays, 0, mask=mask, causal=None)
    np.testing.assert_array_equal(out[0], np.repeat(arrays[2][0, ::-1], 2, axis=1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (14, 7)])
def test_a_cache_is_filled_one_by_one_and_written_again(device: Device, rng: np.random.Generator, heads: int,
                                                        kv_heads: int) -> None:
    """#5227: the last row can be written. Then S = 4 at 0 and S = 3 at 2, as upstream's own tests have it."""
    made = session(device, rng, (heads, kv_heads), 5, 4)
    for start in range(5):
        made.step(made.arrays(1), start)
    made.step(made.arrays(4), 0)
    made.step(made.arrays(3), 2)
    with pytest.raises(CapacityError, match="append of 1 tokens at input_pos 5 needs 6 rows"):
        made.step(made.arrays(1), 5)


Q, K, V = (np.ones((2, 3, heads, dim), np.float32) for heads, dim in ((4, 8), (2, 8), (2, 5)))
HALF = np.float16

REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no cache", {"cache": None}, OptionError, "`cache` is a NoneType; it must be a vkattn.KVCache or one of its"),
    ("gap", {"input_pos": 5}, OptionError, "`input_pos` is 5 for batch entry 0, but layer 1 holds 4"),
    ("negative", {"input_pos": [0, -1]}, OptionError, "`input_pos` is -1 for batch entry 1"),
    ("capacity", {"input_pos": 4}, CapacityError, "append of 3 tokens at input_pos 4 needs 7 rows"),
    ("rank", {"query": Q[0]}, ShapeError, r"`query` has shape \(3, 4, 8\); it must have 4 dimensions, b s h d"),
    ("queries", {"query": Q[:, :2]}, ShapeError, "there must be as many new keys as queries"),
    ("values", {"value": V[:, :2]}, ShapeError, "2 heads and 3 tokens|`value` has shape"),
    ("batch", {"query": Q[:1], "key": K[:1], "value": V[:1]}, ShapeError, "this cache takes .batch 2"),
    ("head_dim", {"query": Q[..., :7], "key": K[..., :7]}, ShapeError, "this cache takes .* dim 8"),
    ("value_dim", {"value": V[..., :4]}, ShapeError, r"`value` has shape \(2, 3, 2, 4\); this cache takes .* dim 5"),
    ("kv heads", {"key": K[:, :, :1], "value": V[:, :, :1]}, ShapeError, "num_kv_heads 2"),
    ("group", {"query": Q[:, :, :3]}, ShapeError, "num_heads must be a multiple of num_kv_heads"),
    ("layout", {"layout": "sbhd"}, OptionError, "`layout` is 'sbhd'; supported: 'bhsd', 'bshd'"),
    ("other layout", {"layout": "bhsd"}, ShapeError, "`key` has shape"),
    ("query dtype", {"query": Q.astype(HALF)}, DTypeError, "`query` is float16 but `key` is float32"),
    ("new dtypes", {"key": K.astype(HALF)}, DTypeError, "`key` is float16 but `value` is float32"),
    ("new dtype", {"key": K.astype(HALF), "value": V.astype(HALF)}, DTypeError,
     "`key` is float16; this float32 cache takes float32 rows"),
    ("float64", {"value": V.astype(np.float64)}, DTypeError, "`value` is float64; supported"),
    ("top_left", {"causal": "top_left"}, OptionError, "with a cache it must be 'bottom_right' or None"),
    ("causal True", {"causal": True}, OptionError, "`causal` is True; allowed"),
    ("window", {"window": (-1, None)}, OptionError, "`window` is"),
    ("softcap", {"softcap": 0.0}, OptionError, "`softcap` is 0.0; it must be positive"),
    ("scale", {"scale": np.nan}, OptionError, "`scale` is nan"),
    ("sinks", {"sinks": np.zeros(3)}, ShapeError, r"`sinks` has shape \(3,\); it must be \(4,\)"),
    ("alibi", {"alibi_slopes": np.zeros(2)}, ShapeError, r"`alibi_slopes` has shape \(2,\)"),
    ("short mask", {"mask": np.ones((3, 5), bool)}, ShapeError, "its last size must be at least 6"),
    ("mask rows", {"mask": np.ones((2, 7), bool)}, ShapeError, "`mask` has shape"),
    ("mask dtype", {"mask": np.ones((3, 7), np.int32)}, DTypeError, "`mask` is int32"),
    ("mask of nan", {"mask": np.full((3, 7), np.nan, np.float32)}, OptionError, "`mask` holds NaN"),
]


@pytest.fixture(scope="module")
def cache(device: Device) -> KVCache:
    """Two layers of capacity 6, layer 1 with 4 live tokens; no refused call changes it."""
    made = KVCache(2, 2, 6, 8, value_dim=5, num_layers=2, dtype="float32", device=device)
    made.update(np.ones((2, 4, 2, 8), np.float32), np.ones((2, 4, 2, 5), np.float32), 0, 1)
    return made


@pytest.mark.parametrize(("changes", "kind", "message"), [case[1:] for case in REFUSED],
                         ids=[case[0] for case in REFUSED])
def test_a_refused_call_changes_nothing(cache: KVCache, changes: dict[str, Any], kind: type[Exception],
                                        message: str) -> None:
    before, lengths, plans = raw_words(cache), cache.lengths, len(cache.plans)
    arguments = {"query": Q, "key": K, "value": V, "cache": cache.layer(1), "input_pos": 3} | changes
    with pytest.raises(kind, match=message):
        vkattn.sdpa_with_kv_cache(**arguments)
    np.testing.assert_array_equal(cache.lengths, lengths)
    for got, kept in zip(raw_words(cache), before, strict=True):
        np.testing.assert_array_equal(got, kept)
    assert len(cache.plans) == plans


def test_a_cache_of_several_layers_needs_one_chosen(cache: KVCache) -> None:
    with pytest.raises(OptionError, match=r"`cache` has 2 layers. Hint: pass cache.layer\(i\)"):
        vkattn.sdpa_with_kv_cache(Q, K, V, cache, 0)


def test_a_closed_cache(device: Device) -> None:
    made = KVCache(2, 2, 6, 8, value_dim=5, dtype="float32", device=device)
    layer = made.layer(0)
    made.close()
    for cache in (made, layer):
        with pytest.raises(ClosedError, match=r"a KVCache was used after close\(\)"):
            vkattn.sdpa_with_kv_cache(Q, K, V, cache, 0)

"""`quantized_attention`: upstream's custom_quantized_sdpa, compared with the oracle on the dequantised arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tolerance import assert_matches_oracle
from vkattn import oracle, quantized_attention
from vkattn.errors import DTypeError, OptionError, ShapeError
from vkattn.runtime.device import Device

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def drawn(rng: np.random.Generator, shape: tuple[int, int, int, int], layout: str, size: float = 5.0) -> Rows:
    """Return (codes, scale, zero point, what they stand for) of rows drawn as bshd within +-15."""
    codes, scale, zero_point = oracle.quantize(np.clip(size * rng.standard_normal(shape), -15, 15), "int8")
    assert zero_point is not None
    parts = codes, scale, zero_point, oracle.dequantize(codes, scale, zero_point)
    return tuple(part.swapaxes(1, 2) for part in parts) if layout == "bhsd" else parts  # type: ignore[return-value]


def attend(query: Rows, key: Rows, value: Rows, **options: Any) -> Any:
    return quantized_attention(
        query[0], key[0], value[0], query_scale=query[1], query_zero_point=query[2], key_scale=key[1],
        key_zero_point=key[2], value_scale=value[1], value_zero_point=value[2], **options)


#: (batch, query heads, KV heads, q_len, capacity, head_dim, value_dim, start_pos)
SIZES = [((1, 8, 8, 24, 256, 128, 128, 0), "bshd"), ((2, 4, 4, 4, 8, 4, 4, 3), "bshd"),
         ((2, 4, 4, 4, 8, 4, 4, 3), "bhsd"), ((1, 32, 8, 130, 140, 128, 128, 0), "bhsd"),
         ((1, 32, 16, 1, 200, 128, 128, 130), "bshd"), ((3, 8, 1, 2, 70, 17, 33, 50), "bhsd")]


@pytest.mark.parametrize(("size", "layout"), SIZES, ids=str)
def test_upstreams_shapes(device: Device, rng: np.random.Generator, size: tuple[int, ...], layout: str) -> None:
    """Keys beyond the last position have NaN for scales: they are never read."""
    batch, heads, kv_heads, q_len, capacity, head_dim, value_dim, start = size
    query = drawn(rng, (batch, q_len, heads, head_dim), layout, 1.0)
    key, value = (drawn(rng, (batch, capacity, kv_heads, dim), layout) for dim in (head_dim, value_dim))
    dead = (slice(None), slice(None), slice(start + q_len, None)) if layout == "bhsd" else (
        slice(None), slice(start + q_len, None))
    key[1][dead], value[1][dead] = np.nan, np.inf
    for causal in (None, "bottom_right")[q_len > 100 :]:
        out, lse = attend(query, key, value, start_pos=start, causal=causal, layout=layout, return_lse=True,
                          device=device)
        assert out.dtype == np.float32
        live = start + q_len
        key_live, value_live = (rows[3][:, :, :live] if layout == "bhsd" else rows[3][:, :live]
                                for rows in (key, value))
        options = {"causal": causal, "q_offset": start, "layout": layout}
        assert_matches_oracle(out, query[3].astype(np.float32), key_live, value_live, lse=lse, **options)
        expected = oracle.attention(query[3], key_live, value_live, **options)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["split", "fused", "three_pass"])
def test_a_mask_and_options(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    """With a mask every key is live, whatever the position; scales with a last size of 1, as upstream has them."""
    query, key, value = (drawn(rng, shape, "bshd") for shape in ((2, 3, 6, 20), (2, 65, 2, 20), (2, 65, 2, 7)))
    mask = np.where(rng.random((2, 1, 3, 65)) < 0.3, -np.inf, rng.standard_normal((2, 1, 3, 65))).astype(np.float32)
    options: dict[str, Any] = {"mask": mask, "softcap": 30.0, "sinks": np.linspace(-2, 3, 6), "scale": 0.1}
    with_one = [(codes, scale[..., None], zero[..., None], exact) for codes, scale, zero, exact in (query, key, value)]
    out = attend(*with_one, start_pos=[4, 9], algorithm=algorithm, device=device, **options)
    assert_matches_oracle(out, query[3].astype(np.float32), key[3], value[3], layout="bshd", q_offset=np.array([4, 9]),
                          **options)


def test_the_position_defaults_to_the_end(device: Device, rng: np.random.Generator) -> None:
    query, key, value = (drawn(rng, (1, tokens, 2, 8), "bshd") for tokens in (3, 11, 11))
    out = attend(query, key, value, causal="bottom_right", device=device)
    np.testing.assert_array_equal(out, attend(query, key, value, start_pos=8, causal="bottom_right", device=device))
    assert_matches_oracle(out, query[3].astype(np.float32), key[3], value[3], layout="bshd", causal="bottom_right")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": np.zeros((1, 3, 2, 8), np.float32)}, DTypeError, "`query` is float32; the codes of int8 rows are int8"),
    ({"key_scale": None}, DTypeError, "`key_scale` is None; it must be float32"),
    ({"value_scale": np.ones((1, 2, 11), np.float32)}, ShapeError, r"`value_scale` has shape \(1, 2, 11\)"),
    ({"key_zero_point": np.zeros((1, 11, 2), np.int32)}, DTypeError, "`key_zero_point` is int32; it must be int8"),
    ({"start_pos": 9}, OptionError, "`start_pos` is 9 with 3 queries and 11 keys; it must be within 0 .. 8"),
    ({"start_pos": -1}, OptionError, "`start_pos` is -1"),
    ({"start_pos": 1.0}, OptionError, "`start_pos` is 1.0; it must be an integer"),
    ({"causal": "top_left"}, OptionError, "`causal` is 'top_left'"),
    ({"query_scale": np.full((1, 3, 2), np.nan, np.float32)}, OptionError, "`query_scale` holds NaN or infinity"),
    ({"key_scale": np.full((1, 11, 2), np.inf, np.float32)}, OptionError, "`key_scale` holds NaN or infinity in a row"),
    ({"query_scale": np.full((1, 3, 2), np.inf, np.float32)}, OptionError, "`query_scale` holds NaN or infinity"),
    *(({f"{name}_scale": np.full((1, tokens, 2), -1.34e36, np.float32)}, OptionError,
       f"`{name}_scale` holds -1.34e\\+36 in a row that is live; 255 times a scale must be within float32")
      for name, tokens in (("query", 3), ("key", 11), ("value", 11))),
    ({"layout": "sbhd"}, OptionError, "`layout` is 'sbhd'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_what_is_refused(device: Device, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {}
    for name, tokens in (("query", 3), ("key", 11), ("value", 11)):
        given |= {name: np.zeros((1, tokens, 2, 8), np.int8), f"{name}_scale": np.ones((1, tokens, 2), np.float32),
                  f"{name}_zero_point": np.zeros((1, tokens, 2), np.int8)}
    with pytest.raises(error, match=message):
        quantized_attention(**(given | changes), device=device)


def test_numbers_at_the_ends_of_float32(device: Device) -> None:
    """Codes 255 away from their zero points, times the largest scale that is let in; dead scales are not looked at."""
    given: dict[str, Any] = {}
    for name, tokens in (("query", 1), ("key", 3), ("value", 3)):
        given |= {name: np.full((1, tokens, 1, 1), 127, np.int8),
                  f"{name}_scale": np.full((1, tokens, 1), 1e-3, np.float32),
                  f"{name}_zero_point": np.full((1, tokens, 1), -128, np.int8)}
    given["value_scale"][0, 2] = given["key_scale"][0, 2] = np.inf  # beyond start_pos
    for name in ("query", "key"):
        scales = given[f"{name}_scale"].copy()
        scales[0, :2] = 1.33e36
        out = quantized_attention(**(given | {f"{name}_scale": scales}), start_pos=1, scale=1e-36, device=device)
        np.testing.assert_allclose(out, 0.255, rtol=1e-6)


def test_scales_are_named(device: Device) -> None:
    with pytest.raises(TypeError, match="positional"):
        quantized_attention(*[np.zeros((1, 1, 1, 4), np.int8)] * 3, np.ones((1, 1, 1)), device=device)  # type: ignore[misc,call-arg]

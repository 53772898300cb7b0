"""Quantised rows as words: sizes, the places of codes and scales, and back again."""

from __future__ import annotations

import numpy as np
import pytest

from vkattn import formats, oracle
from vkattn.errors import OptionError


def quantised(rows: np.ndarray, dtype: str) -> formats.QuantisedRows:
    return formats.QuantisedRows(*oracle.quantize(rows, dtype))


@pytest.mark.parametrize(("dtype", "dim", "quads", "scales"), [
    ("int8", 1, 1, 2), ("int8", 16, 1, 2), ("int8", 17, 2, 2), ("int8", 128, 8, 2), ("q8_0", 17, 2, 1),
    ("q8_0", 33, 4, 1), ("q8_0", 65, 6, 2), ("q8_0", 128, 8, 2), ("q4_0", 1, 1, 1), ("q4_0", 64, 2, 1),
    ("q4_0", 128, 4, 2), ("q4_0", 256, 8, 4), ("float16", 17, 3, 0), ("float32", 5, 2, 0),
])
def test_sizes_of_a_row(dtype: str, dim: int, quads: int, scales: int) -> None:
    assert formats.code_quads(dim, dtype) == quads
    assert formats.scale_words(dim, dtype) == scales
    assert formats.stored_words((3, dim), dtype) == 3 * quads * 4 + -(-3 * scales // 4) * 4


@pytest.mark.parametrize("dtype", formats.QUANTISED)
@pytest.mark.parametrize("dim", [1, 17, 32, 33, 96, 128])
def test_there_and_back(rng: np.random.Generator, dtype: str, dim: int) -> None:
    rows = quantised(rng.standard_normal((2, 3, 5, dim)), dtype)
    codes, scales = formats.pack_codes(rows, dtype), formats.pack_scales(rows, dtype)
    assert codes.shape == (2, 3, 5, 4 * formats.code_quads(dim, dtype))
    assert scales.shape == (2, 3, 5, formats.scale_words(dim, dtype))
    np.testing.assert_array_equal(formats.unpack_codes(codes, dim, dtype), rows.codes)
    for got, expected in zip(formats.unpack_scales(scales, dim, dtype), (rows.scale, rows.zero_point), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(formats.dequantised(rows, dtype), oracle.dequantize(
        rows.codes, rows.scale, rows.zero_point).astype(np.float32))
    words = np.full(formats.stored_words((2, 3, 5, dim), dtype), 0xFFFFFFFF, np.uint32)
    formats.pack_stored(words, rows, dtype)
    np.testing.assert_array_equal(words[: codes.size], codes.ravel())
    np.testing.assert_array_equal(words[codes.size : codes.size + scales.size], scales.ravel())


def test_places_of_the_codes() -> None:
    """A code's place in its word is what the shaders unpack."""
    codes = np.arange(-8, 8, dtype=np.int8)
    ones = np.ones(1, np.float16)
    assert formats.pack_codes(formats.QuantisedRows(codes, ones), "q8_0")[0] == 0x7B7A7978  # -8 + 128, -7 + 128, ...
    assert formats.pack_codes(formats.QuantisedRows(codes, ones), "q4_0")[:2].tolist() == [0x73625140, 0xFBEAD9C8]
    rows = formats.QuantisedRows(codes[None, :2], np.ones(1, np.float32), np.array([-3], np.int8))
    assert formats.pack_codes(rows, "int8")[0, 0] == 0x7D7D7978  # padding is the zero point's code
    assert formats.pack_scales(rows, "int8").tolist() == [[0x3F800000, 0xFFFFFFFD]]
    pair = formats.QuantisedRows(np.zeros(70, np.int8), np.array([1, 2, -0.5], np.float16))
    assert formats.pack_scales(pair, "q4_0").tolist() == [0x40003C00, 0x0000B800]


def test_axes_and_units() -> None:
    assert formats.variant_axes("float32", "float16", "float16") == ("f32", "f16")
    assert formats.variant_axes("float16", "int8", "int8") == ("any", "int8")
    assert formats.variant_axes("float32", "float16", "q4_0") == ("any", "mixed")
    assert formats.variant_axes("float32", "float16", "float32") == ("any", "mixed")
    assert [formats.unit_words(*pair) for pair in (("float32",) * 2, ("float16",) * 2, ("int8",) * 2,
                                                   ("float16", "float32"))] == [4, 2, 4, 4]
    assert formats.formats_word("float16", "int8", "q4_0", "bfloat16") == 0x02050301


@pytest.mark.parametrize(("dtype", "value", "said"), [
    ("int8", np.nan, "NaN"), ("q8_0", np.inf, "infinity"), ("q4_0", -6e5, "a magnitude of 600000"),
    ("int8", 3e38, r"a magnitude of 3e\+38"),
])
def test_what_a_format_cannot_hold(dtype: str, value: float, said: str) -> None:
    formats.check_range("rows", np.array([1.0, -5e5], np.float32), dtype)
    with pytest.raises(OptionError, match=f"`rows` holds {said}; rows of an {dtype} cache must be finite and within"):
        formats.check_range("rows", np.array([1.0, value], np.float32), dtype)
    formats.check_range("rows", np.array([1.0, value], np.float32), "float16")

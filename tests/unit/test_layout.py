"""How rows lie in buffers: sizes against plain arithmetic, packing there and back."""

from __future__ import annotations

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
import numpy as np
import pytest

from vkattn import layout
from vkattn.dtypes import FLOAT_DTYPES, numpy_dtype
from vkattn.errors import OptionError

DIMS = [1, 3, 4, 5, 7, 8, 9, 16, 17, 64, 129, 257]


def test_layouts():
    assert [layout.check_layout(name) for name in ("bhsd", "bshd")] == ["bhsd", "bshd"]
    for other in ("BHSD", "sbhd", None, 3, ["bhsd"]):
        with pytest.raises(OptionError, match=r"`layout` is .*supported: 'bhsd', 'bshd'"):
            layout.check_layout(other)


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_split_and_join_follow_the_letters(name):
    sizes = {"b": 2, "h": 3, "s": 5, "d": 7}
    shape = tuple(sizes[letter] for letter in name)
    assert layout.split_shape(shape, name) == (2, 3, 5, 7)
    assert layout.join_shape(2, 3, 5, 7, name) == shape


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_whole_quads_and_no_more(dim, dtype):
    item = numpy_dtype(dtype).itemsize
    quads = layout.row_quads(dim, dtype)
    assert quads * 16 >= dim * item > (quads - 1) * 16
    assert layout.padded_dim(dim, dtype) * item == quads * 16
    assert layout.row_vecs(dim, dtype) * 4 * item == quads * 16
    assert layout.packed_words((2, 3, 5, dim), dtype) == 30 * quads * 4
    assert layout.packed_words((2, 0, 5, dim), dtype) == 0


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("dim", DIMS)
def test_strides_find_every_row(rng, name, dim, dtype):
    batch_size, heads, tokens = 2, 3, 5
    array = rng.normal(size=layout.join_shape(batch_size, heads, tokens, dim, name)).astype(numpy_dtype(dtype))
    words = np.full(layout.packed_words(array.shape, dtype), 0xFFFFFFFF, np.uint32)
    layout.pack_into(words, array, dtype)
    of_batch, of_head, of_token = layout.vec_strides(heads, tokens, dim, dtype, name)
    vecs = words.view(numpy_dtype(dtype)).reshape(-1, 4)
    for b, h, s in np.ndindex(batch_size, heads, tokens):
        start = b * of_batch + h * of_head + s * of_token
        row = vecs[start : start + layout.row_vecs(dim, dtype)].ravel()
        wanted = array[b, h, s] if name == "bhsd" else array[b, s, h]
        assert (row[:dim] == wanted).all()
        assert not row[dim:].any()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_packing_overwrites_everything_and_comes_back(rng, dim, dtype):
    array = rng.normal(size=(2, 3, dim)).astype(numpy_dtype(dtype))
    words = np.full(layout.packed_words(array.shape, dtype), 0xFFFFFFFF, np.uint32)  # NaN in every dtype
    layout.pack_into(words, array, dtype)
    back = layout.unpack(words, array.shape, dtype)
    assert back.dtype == array.dtype
    assert (back == array).all()
    assert back.flags.c_contiguous and back.flags.owndata
    words[:] = 0
    assert (back == array).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.transpose(2, 1, 0),
        lambda a: a[::-1],
        lambda a: a[:, :, ::-1],
        lambda a: a[:, :, ::2],
        lambda a: a[:, ::2],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.asfortranarray(a),
        lambda a: a[:, :0],
    ],
)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_any_strides_pack_the_same(rng, view, dtype):
    array = view(rng.normal(size=(4, 6, 9)).astype(numpy_dtype(dtype)))
    packed = []
    for source in (array, np.array(array, order="C", copy=True)):
        words = np.full(layout.packed_words(source.shape, dtype), 0xFFFFFFFF, np.uint32)
        layout.pack_into(words, source, dtype)
        packed.append(words)
    np.testing.assert_array_equal(*packed)
    assert (layout.unpack(packed[0], array.shape, dtype) == array).all()


def test_special_values_keep_their_bits():
    bits = np.array([0x7FC01234, 0xFF800000, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    words = np.zeros(8, np.uint32)
    layout.pack_into(words, bits.view(np.float32)[None], "float32")
    np.testing.assert_array_equal(words, [*bits, 0, 0, 0])
    np.testing.assert_array_equal(layout.unpack(words, (1, 5), "float32").view(np.uint32)[0], bits)

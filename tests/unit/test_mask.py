"""Positions drawn as matrices, and every value of an option that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from vkattn import mask
from vkattn.errors import OptionError, ShapeError


def drawing(q_len, num_keys, *, causal=None, window=(None, None), q_offset=None, kv_len=None):
    """Return the visible keys of one batch entry as text, a line for each row."""
    lengths = mask.resolve_kv_len(kv_len, 1, num_keys)
    window = mask.resolve_window(window)
    offset = mask.resolve_q_offset(
        q_offset, causal=causal, q_len=q_len, kv_len=lengths, uses_position=window != (None, None)
    )
    seen = mask.visible(q_len, num_keys, q_offset=offset, kv_len=lengths, causal=causal, window=window)
    assert seen.shape == (1, q_len, num_keys)
    assert seen.dtype == np.bool_
    return ["".join("#" if key else "." for key in row) for row in seen[0]]


@pytest.mark.parametrize(
    ("q_len", "num_keys", "options", "expected"),
    [
        (2, 5, {}, ["#####", "#####"]),
        (2, 5, {"causal": "top_left"}, ["#....", "##..."]),
        (2, 5, {"causal": "bottom_right"}, ["####.", "#####"]),
        (5, 2, {"causal": "top_left"}, ["#.", "##", "##", "##", "##"]),
        (5, 2, {"causal": "bottom_right"}, ["..", "..", "..", "#.", "##"]),
        (3, 3, {"causal": "bottom_right"}, ["#..", "##.", "###"]),
        (2, 5, {"causal": "bottom_right", "kv_len": 3}, ["##...", "###.."]),
        (2, 5, {"causal": "top_left", "kv_len": 1}, ["#....", "#...."]),
        (2, 5, {"causal": "bottom_right", "kv_len": 0}, [".....", "....."]),
        (2, 5, {"causal": "bottom_right", "q_offset": 1}, ["##...", "###.."]),
        (2, 5, {"causal": "top_left", "q_offset": -1}, [".....", "#...."]),
        (4, 6, {"window": (2, 1), "q_offset": 0}, ["##....", "###...", "####..", ".####."]),
        (4, 4, {"window": (0, 0)}, ["#...", ".#..", "..#.", "...#"]),
        (4, 4, {"window": (None, 0)}, ["#...", "##..", "###.", "####"]),
        (4, 4, {"window": (1, None)}, ["####", "####", ".###", "..##"]),
        (4, 4, {"window": (3, 0)}, ["#...", "##..", "###.", "####"]),
        (4, 4, {"causal": "top_left", "window": (1, 2)}, ["#...", "##..", ".##.", "..##"]),
        (2, 6, {"causal": "bottom_right", "window": (2, None)}, ["..###.", "...###"]),
        (2, 6, {"causal": "bottom_right", "window": (2, None), "kv_len": 4}, ["###...", ".###.."]),
        (1, 16, {"causal": "top_left", "window": (3, 0), "q_offset": 10}, [".......####....."]),
        (0, 3, {"causal": "bottom_right"}, []),
        (2, 0, {"causal": "bottom_right"}, ["", ""]),
    ],
)
def test_drawings(q_len, num_keys, options, expected):
    assert drawing(q_len, num_keys, **options) == expected


def test_a_window_of_all_keys_to_the_left_is_causal():
    for q_len, num_keys in [(1, 1), (4, 9), (9, 4)]:
        for causal in mask.CAUSAL_ALIGNMENTS:
            pure = drawing(q_len, num_keys, causal=causal)
            assert drawing(q_len, num_keys, causal=causal, window=(num_keys + q_len, None)) == pure


def test_each_batch_entry_has_its_own_place():
    kv_len = mask.resolve_kv_len([3, 5, 0], 3, 5)
    offset = mask.resolve_q_offset(None, causal="bottom_right", q_len=2, kv_len=kv_len, uses_position=False)
    assert offset.tolist() == [1, 3, -2]
    assert mask.positions(2, offset).tolist() == [[1, 2], [3, 4], [-2, -1]]
    seen = mask.visible(2, 5, q_offset=offset, kv_len=kv_len, causal="bottom_right")
    assert seen.sum(axis=-1).tolist() == [[2, 3], [4, 5], [0, 0]]


@pytest.mark.parametrize(
    ("causal", "uses_position", "kv_len", "expected"),
    [
        ("top_left", False, [7, 2], [0, 0]),
        ("top_left", True, [7, 2], [0, 0]),
        ("bottom_right", False, [7, 2], [4, -1]),
        ("bottom_right", True, [7, 2], [4, -1]),
        (None, False, [7, 2], [0, 0]),
        (None, True, [3, 3], [0, 0]),
    ],
)
def test_default_q_offset(causal, uses_position, kv_len, expected):
    offset = mask.default_q_offset(causal, 3, np.array(kv_len, np.int64), uses_position)
    assert offset.tolist() == expected
    assert offset.dtype == np.int64


@pytest.mark.parametrize("kv_len", [[7, 3], [3, 2]])
def test_no_default_q_offset_without_alignment(kv_len):
    with pytest.raises(OptionError, match=r"`q_offset` is needed.*Hint: q_offset=0 .*q_offset=kv_len - q_len"):
        mask.default_q_offset(None, 3, np.array(kv_len, np.int64), True)


def test_explicit_q_offset_wins():
    kv_len = np.array([7, 2], np.int64)
    for causal in (None, *mask.CAUSAL_ALIGNMENTS):
        for given, expected in [(5, [5, 5]), (np.array([-1, 2], np.int8), [-1, 2]), (np.uint32(3), [3, 3])]:
            offset = mask.resolve_q_offset(given, causal=causal, q_len=3, kv_len=kv_len, uses_position=True)
            assert offset.tolist() == expected
            assert offset.dtype == np.int64


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_causal(causal):
    assert mask.resolve_causal(causal) == causal


@pytest.mark.parametrize("causal", [True, 1, "lower_right", "TOP_LEFT", 0, np.True_, ["top_left"]])
def test_other_causal_is_refused_with_both_alignments(causal):
    with pytest.raises(OptionError, match=r"`causal` is .*Hint: causal='top_left'.*causal='bottom_right'"):
        mask.resolve_causal(causal)


def test_causal_false_is_refused():
    with pytest.raises(OptionError, match="Hint: None"):
        mask.resolve_causal(False)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((None, None), (None, None)),
        ([0, 3], (0, 3)),
        ((np.int64(4), None), (4, None)),
        ((2**40, 0), (mask.MAX_WINDOW, 0)),
    ],
)
def test_window(window, expected):
    assert mask.resolve_window(window) == expected


@pytest.mark.parametrize("window", [None, 4, (1,), (1, 2, 3), "12", (-1, 0), (0, -1), (1.0, 0), (True, 0), ("1", 0)])
def test_other_window_is_refused(window):
    with pytest.raises(OptionError, match="`window` is"):
        mask.resolve_window(window)


@pytest.mark.parametrize(("given", "expected"), [(None, [9, 9]), (0, [0, 0]), (9, [9, 9]), ([4, 9], [4, 9])])
def test_kv_len(given, expected):
    assert mask.resolve_kv_len(given, 2, 9).tolist() == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (10, OptionError),
        (-1, OptionError),
        ([4, 10], OptionError),
        (4.0, OptionError),
        (True, OptionError),
        ("4", OptionError),
        ([1, 2, 3], ShapeError),
        ([[1, 2]], ShapeError),
        (2**64 - 1, OptionError),
        (2**80, OptionError),
    ],
)
def test_other_kv_len_is_refused(given, error):
    with pytest.raises(error, match="`kv_len`"):
        mask.resolve_kv_len(given, 2, 9)


@pytest.mark.parametrize("given", [mask.MAX_POSITION + 1, -mask.MAX_POSITION - 1, np.uint64(2**64 - 1), 0.5, None])
def test_other_q_offset_is_refused(given):
    with pytest.raises(OptionError, match="`q_offset`"):
        mask.resolve_q_offset(
            given, causal=None, q_len=3, kv_len=np.array([7, 7], np.int64), uses_position=True
        )  # fmt: skip


def test_empty_batch():
    assert mask.resolve_kv_len([], 0, 9).shape == (0,)
    assert mask.resolve_kv_len(None, 0, 9).shape == (0,)
    kv_len = np.zeros(0, np.int64)
    assert mask.visible(2, 3, q_offset=kv_len, kv_len=kv_len, causal="top_left").shape == (0, 2, 3)

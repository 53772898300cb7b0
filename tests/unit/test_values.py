"""Symbolic sizes: what they are at most, what they are in a run, and the words of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkattn import Dim
from vkattn.errors import OptionError, PlanError
from vkattn.graph.values import CacheValue, Position, Value, capacities, capacity, live, lives, words_of

LENGTH = Dim("q_len", max=7)


def test_capacity_and_live_size() -> None:
    assert capacity(LENGTH) == 7
    assert capacity(3) == 3
    assert live(LENGTH, {"q_len": 2}) == 2
    assert live(3, {}) == 3
    assert capacities((1, LENGTH, 4)) == (1, 7, 4)
    assert lives((1, LENGTH, 4), {"q_len": 5, "other": 9}) == (1, 5, 4)


def test_dims_are_equal_by_name_and_max() -> None:
    assert Dim("q_len", max=7) == LENGTH
    assert Dim("q_len", max=8) != LENGTH
    assert str(LENGTH) == "q_len (at most 7)"


@pytest.mark.parametrize("name", ["", "q len", "1st", "q-len", 3])
def test_the_name_of_a_dim_is_an_identifier(name: Any) -> None:
    with pytest.raises(PlanError, match="its name must be a Python identifier"):
        Dim(name, max=4)


@pytest.mark.parametrize("most", [0, -1, 2.5, "4", True, None])
def test_the_max_of_a_dim_is_a_positive_integer(most: Any) -> None:
    with pytest.raises(PlanError, match=f"Dim 'n' has max {most!r}; it must be an integer of at least 1"):
        Dim("n", max=most)


@pytest.mark.parametrize(("shape", "dtype", "words"), [
    ((2, 3, 4), "float32", 24),
    ((2, 3, 5), "float32", 48),  # a row of 5 takes two quads of 4 words
    ((2, 3, 5), "float16", 24),  # or one of 8 halves
    ((2, 3, 9), "bfloat16", 48),
    ((5,), "float32", 8),
    ((2, 3, 32), "bool", 6),
    ((2, 3, 33), "bool", 12),
    ((1,), "bool", 1),
    ((2, 0, 5), "float32", 0),
])
def test_words_of_a_tensor(shape: tuple[int, ...], dtype: str, words: int) -> None:
    assert words_of(shape, dtype) == words


def test_values_are_compared_by_identity() -> None:
    first, second = (Value(None, "input 'q'", (1, LENGTH, 4), "float16") for _ in range(2))
    assert first != second
    assert len({first, second, first}) == 2
    assert str(first) == "input 'q' (1, q_len, 4) float16"


def test_positions_are_compared_by_name() -> None:
    assert Position(object(), "input_pos") == Position(object(), "input_pos")
    assert Position(None, "input_pos") != Position(None, "layer")


def test_a_position_serves_every_batch_size_if_it_is_one_number() -> None:
    position = Position(None, "input_pos")
    one, three = {"input_pos": np.array([4])}, {"input_pos": np.array([4, 5, 6])}
    assert position.per_batch(one, 1).tolist() == [4]
    assert position.per_batch(one, 3).tolist() == [4, 4, 4]
    assert position.per_batch(three, 3).tolist() == [4, 5, 6]
    with pytest.raises(OptionError, match="position 'input_pos' has 3 entries; it must be an integer, or 2 of them"):
        position.per_batch(three, 2)
    with pytest.raises(OptionError, match=r"has 3 entries; it must be an integer\.$"):
        position.per_batch(three, 1)


def test_views_of_a_cache_name_it() -> None:
    assert str(CacheValue(None, "cache", None)) == "cache 'cache'"
    assert str(CacheValue(None, "cache", None, layer=3)) == "layer 3 of cache 'cache'"

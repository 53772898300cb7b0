"""Temporaries share memory when, and only when, their lives do not meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkattn.errors import CapacityError
from vkattn.graph.memory import ALIGN_WORDS, Need, Spot, arena_words, padded, place

ROOMY = 1 << 30


def test_temporaries_that_follow_each_other_share_the_same_words() -> None:
    spots = place([Need("a", 100, 0, 1), Need("b", 100, 2, 3), Need("c", 90, 4, 4)], ROOMY)
    assert set(spots.values()) == {Spot(0, 0, 128)}
    assert arena_words(spots.values()) == [128]


def test_temporaries_that_meet_in_one_step_lie_apart() -> None:
    spots = place([Need("a", 64, 0, 1), Need("b", 64, 1, 2)], ROOMY)
    assert sorted((spot.start, spot.stop) for spot in spots.values()) == [(0, 64), (64, 128)]


def test_a_long_life_keeps_its_place_among_short_ones() -> None:
    needs = [Need("long", 64, 0, 9), *(Need(step, 64, step, step) for step in range(10))]
    spots = place(needs, ROOMY)
    assert arena_words(spots.values()) == [128]
    assert {spots[step] for step in range(10)}.isdisjoint({spots["long"]})


def test_a_gap_between_living_temporaries_is_used() -> None:
    needs = [Need("left", 192, 0, 9), Need("gone", 128, 0, 3), Need("right", 64, 0, 9), Need("later", 100, 4, 9)]
    spots = place(needs, ROOMY)
    assert (spots["later"].start, spots["later"].stop) == (spots["gone"].start, spots["gone"].stop)


@pytest.mark.parametrize(("words", "space"), [(0, 64), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_spots_are_aligned_and_hold_at_least_their_words(words: int, space: int) -> None:
    assert ALIGN_WORDS == 64  # 256 bytes: the largest minStorageBufferOffsetAlignment that Vulkan allows
    assert padded(words) == space
    assert place([Need("a", words, 0, 0)], ROOMY)["a"] == Spot(0, 0, space)


def test_an_arena_that_is_full_is_followed_by_another() -> None:
    spots = place([Need(name, 100, 0, 5) for name in "abcde"], 256)
    assert arena_words(spots.values()) == [256, 256, 128]
    assert len({(spot.arena, spot.start) for spot in spots.values()}) == 5


def test_a_later_temporary_goes_back_to_the_first_arena() -> None:
    spots = place([Need("a", 128, 0, 1), Need("b", 128, 0, 1), Need("c", 64, 2, 3)], 128)
    assert spots["c"].arena == 0
    assert len(arena_words(spots.values())) == 2


def test_a_temporary_beyond_the_largest_buffer_is_refused_by_name() -> None:
    place([Need("scores", 256, 0, 0)], 256)
    with pytest.raises(CapacityError, match=r"scores needs 1280 bytes; .* is 1024 bytes. Hint: lower a capacity"):
        place([Need("scores", 257, 0, 0)], 256)


def test_28_layers_in_a_chain_need_the_scratch_of_one() -> None:
    def layers(count: int) -> list[Need]:
        needs = []
        for layer in range(count):
            first = 4 * layer
            needs.append(Need((layer, "scores"), 5000, first + 1, first + 3))
            needs.append(Need((layer, "out"), 700, first + 3, first + 5))  # the next layer reads it
        return needs

    one, many = (sum(arena_words(place(layers(count), ROOMY).values())) for count in (1, 28))
    assert one == many == padded(5000) + padded(700)


def test_nothing_needs_no_arena() -> None:
    assert place([], ROOMY) == {}
    assert arena_words([]) == []


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Need], int]:
    """Return temporaries with random sizes and lives, and the words of an arena that holds each of them."""
    limit = draw(st.sampled_from([512, 2048, ROOMY]))
    needs = []
    for key in range(draw(st.integers(0, 30))):
        first = draw(st.integers(0, 20))
        needs.append(Need(key, draw(st.integers(0, min(limit, 700))), first, first + draw(st.integers(0, 10))))
    return needs, limit


@pytest.mark.property
@given(lives())
def test_no_two_temporaries_that_are_alive_together_overlap(case: tuple[list[Need], int]) -> None:
    needs, limit = case
    spots = place(needs, limit)
    sizes = arena_words(spots.values())
    assert spots.keys() == {need.key for need in needs}
    assert sum(sizes) <= sum(padded(need.words) for need in needs)
    assert all(size <= limit for size in sizes)
    for need in needs:
        spot = spots[need.key]
        assert spot.start % ALIGN_WORDS == 0
        assert spot.stop - spot.start >= need.words
        assert 0 <= spot.start < spot.stop <= sizes[spot.arena]
        for other in needs:
            there = spots[other.key]
            if other.key != need.key and need.meets(other) and there.arena == spot.arena:
                assert spot.stop <= there.start or there.stop <= spot.start, (need, other)


@pytest.mark.property
@given(lives())
def test_no_step_needs_more_than_there_is(case: tuple[list[Need], int]) -> None:
    """The plan is at least as large as the temporaries of its busiest step, and not larger if all live at once."""
    needs, _ = case
    total = sum(arena_words(place(needs, ROOMY).values()))
    at_step = [sum(padded(need.words) for need in needs if need.first <= step <= need.last) for step in range(31)]
    assert total >= max(at_step)
    together = [Need(need.key, need.words, 0, 30) for need in needs]
    assert sum(arena_words(place(together, ROOMY).values())) == sum(padded(need.words) for need in needs)

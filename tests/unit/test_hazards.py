"""Segments are cut where, and only where, one dispatch depends on another."""

from __future__ import annotations

import pytest

from tests.fakes_graph import dispatch, shader
from vkattn.errors import PlanError
from vkattn.graph.hazards import conflict, segments, split_at_regions
from vkattn.graph.node import Binding, Dispatch


def test_read_after_write_starts_a_segment() -> None:
    a, b = object(), object()
    writer, reader = dispatch(writes=[a]), dispatch(reads=[a], writes=[b])
    assert conflict(writer, reader) == "read after write"
    assert segments([writer, reader]) == [[writer], [reader]]


def test_write_after_read_starts_a_segment() -> None:
    a, b = object(), object()
    reader, writer = dispatch(reads=[a], writes=[b]), dispatch(writes=[a])
    assert conflict(reader, writer) == "write after read"
    assert segments([reader, writer]) == [[reader], [writer]]


def test_write_after_write_starts_a_segment() -> None:
    a = object()
    first, second = dispatch(writes=[a]), dispatch(writes=[a])
    assert conflict(first, second) == "write after write"
    assert segments([first, second]) == [[first], [second]]


def test_readers_of_one_buffer_run_together() -> None:
    a = object()
    readers = [dispatch(reads=[a], writes=[object()]) for _ in range(5)]
    assert segments(readers) == [readers]


def test_update_in_place_conflicts_with_readers_on_both_sides() -> None:
    a = object()
    before, update, after = dispatch(reads=[a]), dispatch(updates=[a]), dispatch(reads=[a])
    assert [len(segment) for segment in segments([before, update, after])] == [1, 1, 1]


def test_a_conflict_with_any_of_the_segment_counts_not_only_with_the_last() -> None:
    a = object()
    writer, free, reader = dispatch(writes=[a]), dispatch(writes=[object()]), dispatch(reads=[a])
    assert segments([writer, free, reader]) == [[writer, free], [reader]]


def test_order_is_kept_and_nothing_is_lost() -> None:
    chain = [object() for _ in range(6)]
    steps = [dispatch(reads=[chain[i]], writes=[chain[i + 1]]) for i in range(5)]
    assert [d for segment in segments(steps) for d in segment] == steps
    assert len(segments(steps)) == 5


def test_parts_of_one_buffer_conflict_if_they_share_a_word() -> None:
    buffer = object()
    kernel = shader(["write"])
    first, second, across, whole = (
        Dispatch(kernel, (Binding(buffer, region),)) for region in ((0, 64), (64, 128), (63, 65), None))
    assert conflict(first, second) is None
    assert conflict(first, across) == "write after write"
    assert conflict(across, second) == "write after write"
    assert conflict(second, whole) == "write after write"
    assert conflict(first, Dispatch(kernel, (Binding(object(), (0, 64)),))) is None
    assert segments([first, second, across]) == [[first, second], [across]]


def test_a_segment_is_split_where_only_regions_keep_dispatches_apart() -> None:
    """As of layers of one cache: append to the next while attention reads this one."""
    cache, out = object(), object()
    read, write = shader(["read", "write"]), shader(["write"])
    attends = Dispatch(read, (Binding(cache, (0, 64)), Binding(out)))
    appends = Dispatch(write, (Binding(cache, (64, 128)),))
    elsewhere = Dispatch(write, (Binding(object(), (64, 128)),))
    assert segments([attends, elsewhere, appends]) == [[attends, elsewhere, appends]]
    assert split_at_regions([attends, elsewhere, appends]) == [[attends, elsewhere], [appends]]
    assert split_at_regions([]) == []


def test_a_real_conflict_in_a_segment_is_left_for_the_validation_layer_to_find() -> None:
    cache = object()
    reads = Dispatch(shader(["read"]), (Binding(cache, (0, 64)),))
    writes = Dispatch(shader(["write"]), (Binding(cache),))
    assert split_at_regions([reads, writes]) == [[reads, writes]]


def test_one_dispatch_may_bind_a_buffer_twice() -> None:
    a = object()
    own = Dispatch(shader(["read", "write"]), (Binding(a), Binding(a)))
    assert segments([own]) == [[own]]


def test_a_new_submission_starts_a_segment() -> None:
    first, second = dispatch(writes=[object()], submission=0), dispatch(writes=[object()], submission=1)
    assert segments([first, second]) == [[first], [second]]


def test_wrong_number_of_buffers_names_them() -> None:
    with pytest.raises(PlanError, match=r"takes 2 buffers \(binding0, binding1\); got 1"):
        Dispatch(shader(["read", "write"]), (Binding(object()),))


def test_wrong_push_constants_are_named() -> None:
    with pytest.raises(PlanError, match=r"takes the push constants \['offset'\]; got \['offzet'\]"):
        Dispatch(shader(["read"], push=("offset",)), (Binding(object()),), {"offzet": 1})

"""Timings of a graph: a sequence of spans, their sums, the text, the JSON, and medians over runs."""

from __future__ import annotations

import json

import pytest

from vkattn.errors import OptionError
from vkattn.ops.timings import Span, Timings

APPEND = Span("layer_0", "kv_append_f16_f16", 2_050.0)
WEIGHTS = Span("layer_0", "attn_weights_f16_f16", 12_000.0)
AGAIN = Span("layer_10", "kv_append_f16_f16", 1_000.0)


def test_it_is_a_sequence_of_spans_in_order() -> None:
    timings = Timings(iter([APPEND, WEIGHTS]))
    assert len(timings) == 2
    assert list(timings) == [APPEND, WEIGHTS]
    assert timings[-1] is WEIGHTS
    assert list(timings[:1]) == [APPEND]
    node, variant, nanoseconds = timings[0]
    assert (node, variant, nanoseconds) == ("layer_0", "kv_append_f16_f16", 2_050.0)
    assert timings[1].nanoseconds == 12_000.0


def test_sums() -> None:
    timings = Timings([APPEND, WEIGHTS, AGAIN])
    assert timings.total_ns == 15_050.0
    assert list(timings.by_variant().items()) == [("kv_append_f16_f16", 3_050.0), ("attn_weights_f16_f16", 12_000.0)]
    assert list(timings.by_node().items()) == [("layer_0", 14_050.0), ("layer_10", 1_000.0)]


def test_text_is_a_table_with_the_sums_of_variants_that_come_twice() -> None:
    assert str(Timings([APPEND, WEIGHTS, AGAIN])).splitlines() == [
        "node      variant               microseconds",
        "layer_0   kv_append_f16_f16             2.05",
        "layer_0   attn_weights_f16_f16         12.00",
        "layer_10  kv_append_f16_f16             1.00",
        "all       kv_append_f16_f16             3.05",
        "all       attn_weights_f16_f16         12.00",
        "total of 3 dispatches                  15.05",
    ]
    assert "all" not in str(Timings([APPEND, WEIGHTS]))
    assert str(Timings([Span("n", "v", 10.0)])).splitlines()[1:] == [
        "n     v" + " " * 22 + "0.01",
        "total of 1 dispatch" + " " * 10 + "0.01",
    ]


def test_nothing_timed_is_still_a_table_and_zero() -> None:
    empty = Timings([])
    assert (len(empty), empty.total_ns, empty.by_variant()) == (0, 0.0, {})
    assert str(empty).splitlines()[-1].split() == ["total", "of", "0", "dispatches", "0.00"]


def test_json_form_survives_json() -> None:
    timings = Timings([APPEND, WEIGHTS, AGAIN])
    found = json.loads(json.dumps(timings.as_dict()))
    assert found == {
        "total_ns": 15_050.0,
        "by_variant_ns": {"kv_append_f16_f16": 3_050.0, "attn_weights_f16_f16": 12_000.0},
        "by_node_ns": {"layer_0": 14_050.0, "layer_10": 1_000.0},
        "dispatches": [
            {"node": "layer_0", "variant": "kv_append_f16_f16", "nanoseconds": 2_050.0},
            {"node": "layer_0", "variant": "attn_weights_f16_f16", "nanoseconds": 12_000.0},
            {"node": "layer_10", "variant": "kv_append_f16_f16", "nanoseconds": 1_000.0},
        ],
    }
    assert Timings(Span(**span) for span in found["dispatches"]).as_dict() == timings.as_dict()


def test_median_is_of_each_dispatch() -> None:
    runs = [Timings([APPEND._replace(nanoseconds=a), WEIGHTS._replace(nanoseconds=b)])
            for a, b in ((1.0, 50.0), (9.0, 10.0), (2.0, 30.0))]
    middle = Timings.median_of(runs)
    assert list(middle) == [APPEND._replace(nanoseconds=2.0), WEIGHTS._replace(nanoseconds=30.0)]
    assert middle.total_ns == 32.0


@pytest.mark.parametrize("runs", [[], [[APPEND], [WEIGHTS]], [[APPEND], [APPEND, WEIGHTS]]], ids=str)
def test_median_of_different_recordings_is_refused(runs: list[list[Span]]) -> None:
    with pytest.raises(OptionError, match="timings of one recording"):
        Timings.median_of([Timings(run) for run in runs])

"""The arithmetic of `vkattn bench`: rooflines, spreads, warming up, inputs, tables, comparing, plots."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vkattn.bench import results
from vkattn.bench.clock import Spread, warm_up
from vkattn.bench.inputs import POOL_ELEMENTS, Pool
from vkattn.bench.plot import panels, plot
from vkattn.bench.problems import BenchProblem
from vkattn.bench.results import Row, compare, document, microseconds, read, row, table
from vkattn.bench.roofline import Roofline
from vkattn.errors import OptionError

DECODE = BenchProblem("decode", "small", 6, 2, 64, 1000)
PREFILL = BenchProblem("prefill", "small", 6, 2, 64, 1000)
ROOFLINE = Roofline(copy=10.0, fma=50.0, matrix=1000.0)


class Clock:
    """A clock that only runs take time on: ``paces`` seconds each, the last one for ever."""

    def __init__(self, *paces: float) -> None:
        self.seconds, self.paces, self.runs = 0.0, list(paces), 0

    def now(self) -> float:
        return self.seconds

    def run(self) -> None:
        self.seconds += self.paces[min(self.runs, len(self.paces) - 1)]
        self.runs += 1


# --- rooflines ---


def test_decode_is_bound_by_bytes_and_prefill_by_operations() -> None:
    assert ROOFLINE.limit_ns(DECODE) == pytest.approx((2 * 2 * 1000 * 64 * 2 + 2 * 6 * 64 * 2) / 10)
    operations = 4 * 6 * 64 * 1000 * 1001 / 2
    assert ROOFLINE.limit_ns(PREFILL) == pytest.approx(operations / 50)
    assert ROOFLINE.limit_ns(PREFILL, uses_matrix_units=True) == pytest.approx(operations / 1000)


def test_without_a_matrix_rate_only_bytes_bound_a_matrix_kernel() -> None:
    unknown = Roofline(copy=100.0, fma=50.0)
    assert unknown.limit_ns(PREFILL, uses_matrix_units=True) == pytest.approx(PREFILL.num_bytes / 100)


# --- the clock ---


def test_a_spread() -> None:
    assert Spread.of([4, 1, 3, 2, 5]) == Spread(median=3, low=2, high=4, best=1, count=5)
    assert Spread.of([7.0]).as_dict() == {"median": 7, "low": 7, "high": 7, "best": 7, "count": 1}
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_a_steady_device_is_warmed_up_for_the_time_given() -> None:
    clock = Clock(0.01)
    assert warm_up(clock.run, 0.7, clock.now) == pytest.approx(0.01)
    assert 0.7 <= clock.seconds < 0.7 + 0.12


def test_a_device_that_still_speeds_up_is_given_longer() -> None:
    rising = [0.1 * 0.97**run for run in range(40)]
    clock = Clock(*rising)
    pace = warm_up(clock.run, 0.7, clock.now)
    assert clock.seconds > 1.4
    assert pace < 0.06


def test_a_device_that_never_settles_ends_the_warm_up() -> None:
    clock = Clock(*([0.05] * 3 + [0.2] * 2) * 100)
    warm_up(clock.run, 0.7, clock.now)
    assert clock.seconds < 3 * 0.7 + 0.4


def test_a_run_that_is_longer_than_the_warm_up_is_made_at_least_once() -> None:
    clock = Clock(5.0)
    assert warm_up(clock.run, 0.1, clock.now) == 5.0


# --- inputs ---


def test_arrays_are_normal_numbers_and_come_again() -> None:
    pool = Pool(3)
    array = pool.array((100, 1000), "float32", 7)
    assert abs(array.mean()) < 0.02 and abs(array.std() - 1) < 0.02
    np.testing.assert_array_equal(array, Pool(3).array((100, 1000), "float32", 7))
    np.testing.assert_array_equal(pool.array((100, 1000), "float16", 7), array.astype(np.float16))
    others = [pool.array((1000,), "float32", number)[0] for number in range(200)]
    assert len(set(others)) == 200


def test_an_array_may_be_larger_than_the_pool() -> None:
    array = Pool(3).array((POOL_ELEMENTS + 10,), "float32", 1)
    np.testing.assert_array_equal(array[POOL_ELEMENTS:], array[:10])
    assert np.isfinite(array).all()


# --- results ---


def found(problem: BenchProblem, runner: str, *nanoseconds: float) -> Row:
    return row(problem, runner, ROOFLINE, device_ns=Spread.of(nanoseconds))


def test_the_share_of_the_limit() -> None:
    limit = ROOFLINE.limit_ns(DECODE)
    assert found(DECODE, "vkattn auto", 2 * limit).share_of_limit == pytest.approx(0.5)
    assert row(DECODE, "numpy", ROOFLINE, call_ns=Spread.of([limit])).share_of_limit is None
    assert row(DECODE, "vkattn split", ROOFLINE, reason="no").share_of_limit is None


def test_the_limit_of_a_peer_is_that_of_its_own_arithmetic() -> None:
    rows = [found(PREFILL, "vkattn fused", 4e6),
            row(PREFILL, "torch cuda flash", ROOFLINE, device_ns=Spread.of([2e6]), uses_matrix_units=True),
            row(PREFILL, "torch cuda math", ROOFLINE, device_ns=Spread.of([3e6]), uses_matrix_units=None)]
    assert [one.limit_ns for one in rows] == [ROOFLINE.limit_ns(PREFILL), ROOFLINE.limit_ns(PREFILL, True), None]
    title, fused, flash, math = table(rows).splitlines()
    assert title.endswith("limit 15375 us")  # 4 * 6 heads * 64 elements * 500500 pairs, 50 operations a nanosecond
    assert fused.endswith("384.4% of the limit")
    assert flash.endswith("38.4% of its limit, 768.8 us")
    assert math.endswith("device 3000 (3000 .. 3000)")


@pytest.mark.parametrize("nanoseconds, shown", [
    (None, "-"), (138_240.0, "138.2"), (16_390.0, "16.4"), (950.0, "0.95"), (15_880_400.0, "15880")])
def test_microseconds(nanoseconds: float | None, shown: str) -> None:
    assert microseconds(nanoseconds) == shown


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    rows = [found(DECODE, "vkattn auto", 5000.0, 6000.0), row(DECODE, "vkattn fused", ROOFLINE, reason="it cannot")]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document({"device": "a device"}, rows)))
    header, again = read(path)
    assert again == rows
    assert header == {"format": results.FORMAT, "device": "a device"}


@pytest.mark.parametrize("text", [None, "", "[]", '{"format": 1}', '{"format": 1, "rows": [{"a": 1}]}',
                                  '{"format": 99, "rows": []}',
                                  '{"format": 1, "rows": [{"problem": {}, "runner": "a"}]}'])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match=r"run\.json"):
        read(path)


def test_the_table_has_times_and_reasons() -> None:
    limit = ROOFLINE.limit_ns(DECODE)
    text = table([found(DECODE, "vkattn auto", 4 * limit), row(DECODE, "torch", ROOFLINE, reason="not today"),
                  found(PREFILL, "vkattn auto", 1e6)])
    lines = text.splitlines()
    assert len(lines) == 5
    assert "25.0% of the limit" in lines[1] and "not today" in lines[2] and lines[3].startswith(PREFILL.name)


def test_comparing_two_runs() -> None:
    before = [found(DECODE, "vkattn auto", 100.0, 101.0, 102.0), found(PREFILL, "vkattn auto", 500.0),
              found(PREFILL, "gone", 1.0), found(DECODE, "noisy", 80.0, 100.0, 120.0),
              row(DECODE, "numpy", ROOFLINE, call_ns=Spread.of([5.0]))]
    after = [found(DECODE, "vkattn auto", 50.0, 50.5, 51.0), found(PREFILL, "vkattn auto", 1000.0),
             found(PREFILL, "new", 1.0), found(DECODE, "noisy", 85.0, 105.0, 125.0), found(DECODE, "numpy", 5.0)]
    lines = compare(before, after).splitlines()[1:]
    assert len(lines) == 3
    assert lines[0].endswith("0.50  faster") and lines[1].endswith("2.00  slower") and lines[2].endswith("1.05")


# --- plots ---


def rows_of_two_lengths() -> list[Row]:
    problems = [BenchProblem("decode", "small", 6, 2, 64, length) for length in (2048, 512)]
    return [found(problem, runner, 1e3 * problem.length) for problem in problems for runner in ("a", "b")] + [
        found(PREFILL, "a", 7.0), row(problems[0], "c", ROOFLINE, reason="no")]


def test_a_panel_for_problems_that_differ_in_length_alone() -> None:
    drawn = panels(rows_of_two_lengths())
    assert list(drawn) == ["decode 6/2 D64 B1 float16"]
    lines = drawn["decode 6/2 D64 B1 float16"]
    assert lines["a"] == lines["b"] == [(512, 512.0), (2048, 2048.0)]
    assert [length for length, _ in lines["limit"]] == [512, 2048]
    assert set(lines) == {"a", "b", "limit"}


def test_a_plot_is_drawn_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(OptionError, match="matplotlib"):
            plot(rows_of_two_lengths(), "title", path)
        return
    plot(rows_of_two_lengths(), "title", path)
    assert "</svg>" in path.read_text()
    with pytest.raises(OptionError, match="nothing to plot"):
        plot([found(PREFILL, "a", 7.0)], "title", path)

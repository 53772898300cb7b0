"""`vkattn bench` on the device: a grid of problems, of which nothing is timed that is wrong; peers, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from vkattn import cli
from vkattn.bench import case, clock, grid, peers, roofline
from vkattn.bench.case import Case
from vkattn.bench.grid import PEERS, Grid
from vkattn.bench.inputs import Pool
from vkattn.bench.problems import BenchProblem
from vkattn.bench.results import Row
from vkattn.bench.roofline import Roofline, measure_roofline
from vkattn.dispatch import ALGORITHMS
from vkattn.graph.hazards import conflict
from vkattn.graph.node import Dispatch
from vkattn.runtime.device import Device

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "WARM_UP_SECONDS", dict.fromkeys(clock.WARM_UP_SECONDS, 0.001))
    monkeypatch.setattr(grid, "measure_roofline", lambda device: Roofline(10.0, 10.0))
    monkeypatch.setattr(case, "RECORDING_SECONDS", 0.001)


PROBLEMS = [
    BenchProblem("decode", "test", 6, 2, 40, 71, batch_size=2, algorithms=("all",)),
    BenchProblem("decode", "test", 3, 3, 16, 33, dtype="float32"),
    BenchProblem("prefill", "test", 4, 2, 24, 37),
    BenchProblem("prefill", "test", 2, 2, 64, 20, batch_size=2, dtype="float32", causal=False),
]


@pytest.fixture(scope="module")
def rows(device: Device) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "WARM_UP_SECONDS", dict.fromkeys(clock.WARM_UP_SECONDS, 0.001))
        patch.setattr(grid, "measure_roofline", lambda device: Roofline(10.0, 10.0))
        patch.setattr(case, "RECORDING_SECONDS", 0.001)
        patch.setattr(case, "MOST_SETS", dict.fromkeys(case.MOST_SETS, 2))
        return Grid(device, PROBLEMS, peers=("numpy",), budget_seconds=1e9, seconds=0.01).run()


def test_every_algorithm_has_times_or_a_reason(rows: list[Row]) -> None:
    found = {row.key: row for row in rows}
    assert len(found) == len(rows)
    for problem in PROBLEMS:
        own = [row for row in rows if row.problem["name"] == problem.name and row.runner.startswith("vkattn")]
        assert [bool(row.details.get("auto")) for row in own if not row.reason].count(True) == 1
        if problem.algorithms == ("all",):
            assert {row.runner for row in own} == {f"vkattn {name}" for name in ALGORITHMS}
            assert own[0].details.get("auto")
        for row in own:
            if row.reason:
                assert "NoKernelError" in row.reason
                continue
            assert row.device_ns is not None and row.device_ns["best"] <= row.device_ns["median"]
            assert row.worst_share is not None and 0 < row.worst_share <= 1
            assert row.limit_ns is not None and row.limit_ns > 0
        assert found[problem.name, "numpy"].call_ns is not None
    assert not found[PROBLEMS[0].name, "vkattn three_pass"].reason


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_what_is_timed_computes_each_set_again(device: Device, problem: BenchProblem) -> None:
    """The recording that is timed writes the outputs of all sets anew, into memory of its own on a real GPU."""
    made = Case(device, problem, "auto", Pool(1))
    assert made.sets > 1
    assert made.chosen == ("split" if problem.q_len * problem.group_size <= 64 else "fused")
    assert made.worst_share() <= 1
    executions = made._executions()
    assert len(executions) == made.sets
    assert all(dispatch.variant.kernel.startswith("attn_") for execution in executions for dispatch in execution)
    outputs = [binding.buffer for execution in executions for dispatch in execution
               for binding, declared in zip(dispatch.bindings, dispatch.variant.bindings, strict=True)
               if declared.name.startswith("out")]
    assert outputs and all(buffer.kind == "storage" for buffer in outputs)
    assert made.device_times(0.01).median > 0
    streamed = made.streamed_times(0.01)
    assert (streamed is None) == (made.sets < 4 or len(executions[0]) > 1)
    assert streamed is None or streamed.median > 0
    assert made.worst_share() <= 1
    made.close()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_dispatches_back_to_back_have_nothing_to_wait_for(
    device: Device, monkeypatch: pytest.MonkeyPatch, problem: BenchProblem) -> None:
    """What runs at the same time writes nothing that another of them reads or writes: no output, parts or counters."""
    monkeypatch.setattr(case, "SPREAD_BYTES", dict.fromkeys(case.SPREAD_BYTES, 1 << 30))
    monkeypatch.setattr(case, "MOST_SETS", dict.fromkeys(case.MOST_SETS, case.LEAST_STREAMED))
    monkeypatch.setattr(Case, "_count", property(lambda made: 2 * made.sets + 1))
    recorded: list[list[list[Dispatch]]] = []
    monkeypatch.setattr(Case, "_recording", lambda made, together: recorded.append(together))
    monkeypatch.setattr(Case, "_timed", lambda *arguments, **options: None)
    made = Case(device, problem, "split" if problem.kind == "decode" else "fused", Pool(1))
    made.streamed_times(0.01)
    assert [len(segment) for segment in recorded[0]] == [made.sets, made.sets, 1]
    for segment in recorded[0]:
        assert not [(one, two) for index, one in enumerate(segment) for two in segment[:index] if conflict(two, one)]
    made.close()


def test_a_wrong_kernel_is_not_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of the last head of the last set, slightly off."""
    real = Case.run

    def off(made: Case) -> dict[int, np.ndarray]:
        outputs = real(made)
        outputs[made.sets - 1][-1, -1, -1, 5] *= 1.05
        return outputs

    monkeypatch.setattr(Case, "run", off)
    wrong = Grid(device, PROBLEMS[1:2], peers=(), seconds=0.01)
    (row,) = wrong.run()
    assert row.reason.startswith("WRONG") and "times its bound" in row.reason
    assert row.device_ns is None and row.call_ns is None and row.limit_ns is None
    assert not wrong.is_right


def test_a_wrong_peer_is_not_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "sampled_error", lambda out, inputs: 0.5)
    found = [row for row in Grid(device, PROBLEMS[1:2], peers=("numpy",), seconds=0.01).run() if row.runner == "numpy"]
    assert found[0].reason.startswith("wrong") and found[0].call_ns is None


def test_time_that_is_up_and_what_the_library_refuses_are_reasons(device: Device) -> None:
    late = Grid(device, PROBLEMS, peers=(), budget_seconds=0.0).run()
    assert [row.reason for row in late] == ["the 0 seconds of this run were over"] * len(PROBLEMS)
    huge = BenchProblem("decode", "test", 8, 8, 128, 1 << 22, batch_size=64)
    (row,) = Grid(device, [huge], peers=(), seconds=0.01).run()
    assert row.reason.startswith("CapacityError") and row.limit_ns is None


def test_the_roofline_kernels_do_their_work(device: Device) -> None:
    """The copy copies, odd sizes too; the sums are what the formula gives."""
    from vkattn.graph.node import Binding, Dispatch
    from vkattn.kernels.manifest import variant

    near, far, out = (device.buffer(count, "host", "test") for count in (4 * 1500, 4 * 1500, 128))
    words = np.random.default_rng(1).integers(0, 2**32, 4 * 1500, dtype=np.uint32)
    near.words[...], far.words[...] = words, 7
    half, three = (int(np.float32(number).view(np.uint32)) for number in (0.5, 3.0))
    recording = device.recording([[
        Dispatch(variant("roofline_copy"), (Binding(near), Binding(far)), {"quads": 1301}, 2),
        Dispatch(variant("roofline_fma"), (Binding(out),), {"rounds": 3, "a": half, "b": three}, 1)]])
    recording.run()
    np.testing.assert_array_equal(far.words, np.concatenate([words[: 4 * 1301], np.full(4 * 199, 7, np.uint32)]))
    starts = np.arange(128)[:, None] + np.arange(8)
    expected = 4 * (starts / 8 + 3 * (1 + 1 / 2 + 1 / 4)).sum(axis=1)
    np.testing.assert_allclose(out.words.view(np.float32), expected, rtol=1e-6)
    recording.close()
    for buffer in (near, far, out):
        buffer.destroy()
    found = measure_roofline(device)
    assert found.copy > 0 and found.fma > 0 and found.matrix is None


def test_the_command_writes_what_compare_reads(
    device: Device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vkattn.bench.command.read_grid", lambda: {"quick": PROBLEMS[:1]})
    path = str(tmp_path / "found.json")
    common = ["bench", "--device", device.info.name, "--quick", "--peers", "none", "--algorithms", "split"]
    assert cli.main([*common, "--out", path]) == 0
    printed = capsys.readouterr()
    assert "vkattn split" in printed.out and "of the limit" in printed.out and printed.err == ""
    assert json.loads((tmp_path / "found.json").read_text())["device"] == device.info.name
    assert cli.main(["bench", "--compare", path, path]) == 0
    assert "1.00" in capsys.readouterr().out
    assert cli.main([*common, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["runner"] == "vkattn split"


def test_every_peer_says_something(device: Device) -> None:
    """Whether it is installed or not: times, a reason, or no row; never an exception."""
    rows = Grid(device, PROBLEMS[2:3], algorithms=("three_pass",), peers=tuple(PEERS), seconds=0.01).run()
    assert all(row.reason or row.time_ns for row in rows)


def test_the_clock_is_raised_on_gpus_only(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By dense work, which leaves nothing behind; a software device plays the GPU."""
    calls: list[float] = []
    monkeypatch.setattr(roofline, "warm_up", lambda run, seconds: (run(), calls.append(seconds)))
    monkeypatch.setattr(roofline, "FMA_WORK", dict.fromkeys(roofline.FMA_WORK, (1, 1)))
    with Device(device.info.index) as own:
        assert own.boundary_tensor  # made once, when the first recording needs it
        before = own.allocation_count
        for device_type, raised in (("cpu", []), ("discrete", [roofline.DENSE_SECONDS])):
            own.info = dataclasses.replace(own.info, device_type=device_type)
            roofline.raise_clock(own)
            assert calls == raised
        assert own.allocation_count == before

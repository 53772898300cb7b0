"""The validation runs' judgement, from made-up logs: what is parsed, what is allowed, and that silence is no pass."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from validationlayer.allowed import Allowed, load
from validationlayer.messages import BEFORE, PLANTED, Log, Message, parse
from validationlayer.pipe import collected
from validationlayer.runs import RUNS
from validationlayer.verdict import judge, report

ROOT = Path(__file__).resolve().parents[2]
FEATURE = "SYNCHRONIZATION"
HAZARD = "SYNC-HAZARD-READ-AFTER-WRITE"
TEST = "tests/gpu/test_x.py::test_y[1 x 2]"
ENTRY = Allowed("SOME-id", "of kp's", ("full",), "because", "kp")


def status(enables: str = "VK_SYNCHRONIZATION_EXT") -> str:
    return ("UNASSIGNED-khronos-validation-createinstance-status-message(INFO / SPEC): msgNum: -67 - Validation "
            "Information: [ x ] Object 0: handle = 0x5; | MessageID = 0xd | Khronos Validation Layer Active:\n"
            "    Settings File: Found at a/vk_layer_settings.txt specified by environment variable.\n"
            f"    Current Enables: {enables}.\n    Current Disables: None.\n\n"
            "    Objects: 1\n        [0] 0x5, type: 1\n")


def message(name: str, text: str = "vkCmdDispatch: Hazard for VkBuffer 0x1f[]", severity: str = "ERROR") -> str:
    return (f"{name}({severity} / SPEC): msgNum: -455 - Validation Error: [ {name} ] Object 0: handle = 0x1f, "
            f"type = VK_OBJECT_TYPE_BUFFER; | MessageID = 0xe4 | {text}\n    Objects: 1\n        [0] 0x1f, type: 9\n")


def log_of(*pieces: str) -> Log:
    return parse("".join(pieces).splitlines(keepends=True))


def watched(*pieces: str) -> Log:
    """A log of a layer that was there, reported the planted hazard, and then wrote ``pieces`` in a test."""
    return log_of(f"@@ {PLANTED}\n", status(), message(HAZARD), message(HAZARD), f"@@ {BEFORE}\n", status(),
                  f"@@ {TEST}\n", status(), *pieces, "@@ the end\n")


def failures(log: Log, run: str = "full") -> list[str]:
    return judge(log, run, FEATURE, HAZARD, [ENTRY]).failures


def test_messages_are_parsed_with_their_places() -> None:
    log = watched(message("A-b"), message("C", "two\nlines", "WARN"), f"@@ {TEST}2\n", message("A-b"))
    planted, rest = log.messages[:2], log.messages[2:]
    assert [m.id for m in planted] == [HAZARD] * 2
    assert [(m.id, m.severity, m.place) for m in rest] == [
        ("A-b", "ERROR", TEST), ("C", "WARN", TEST), ("A-b", "ERROR", f"{TEST}2")]
    assert "two\nlines\n    Objects: 1\n" in rest[1].text
    assert log.active == {PLANTED: 1, BEFORE: 1, TEST: 1}
    assert log.features == {"VK_SYNCHRONIZATION_EXT"}
    assert not log.strays


def test_handles_and_numbers_do_not_make_texts_different() -> None:
    first, second = (Message("A", "ERROR", message("A", f"buffer 0x{n:x}f[] at {n}"), TEST) for n in (1, 22))
    other = Message("A", "ERROR", message("A", "image 0x1f[] at 1"), TEST)
    assert first.pattern == second.pattern == "buffer # at #"
    assert other.pattern != first.pattern


def test_a_clean_log_passes() -> None:
    assert not failures(watched())
    assert not failures(watched(message("SOME-id", "a fault of kp's")))


@pytest.mark.parametrize(("name", "text", "run"), [
    ("OTHER-id", "a fault of kp's", "full"),
    ("SOME-id", "a fault of ours", "full"),
    ("SOME-id", "a fault of kp's", "coherent"),
    (HAZARD, "in a test", "full"),
    ("", "a message without an id", "full"),
])
def test_a_message_that_is_not_allowed_fails(name: str, text: str, run: str) -> None:
    log = watched(message("SOME-id", "a fault of kp's") if run == "full" else "", message(name, text))
    verdict = judge(log, run, FEATURE, HAZARD, [ENTRY])
    assert verdict.failures == ["1 messages are not in validation_allowed.toml"]
    lines = "\n".join(report(log, verdict))
    assert f"NOT ALLOWED 1 x {name or '(no id)'}" in lines
    assert text in lines
    assert f"{TEST} (1)" in lines
    assert run != "full" or "allowed     1 x SOME-id\n          because" in lines


def test_a_planted_message_of_another_kind_fails() -> None:
    log = log_of(f"@@ {PLANTED}\n", status(), message(HAZARD), message("OTHER"), f"@@ {TEST}\n", status())
    assert failures(log) == ["1 messages are not in validation_allowed.toml"]


@pytest.mark.parametrize(("log", "expected"), [
    (log_of(), ["the layer was not active", "the planted fault was not reported"]),
    (log_of(f"@@ {PLANTED}\n@@ {TEST}\n"), ["the layer was not active", "the planted fault was not reported"]),
    (log_of(f"@@ {PLANTED}\n", status(), f"@@ {TEST}\n", status()), ["the planted fault was not reported"]),
    (log_of(f"@@ {PLANTED}\n", status(), message(HAZARD), f"@@ {TEST}\n"), ["for the planted fault only"]),
    (log_of(f"@@ {PLANTED}\n", status("None"), message(HAZARD), f"@@ {TEST}\n", status("None")),
     [f"without {FEATURE}; it had None"]),
])
def test_a_layer_that_did_not_watch_fails(log: Log, expected: list[str]) -> None:
    found = failures(log)
    assert len(found) == len(expected)
    assert all(part in failure for part, failure in zip(expected, found, strict=True))


def test_a_line_that_is_not_understood_fails() -> None:
    log = log_of("ERROR: the loader could not open something\n", f"@@ {PLANTED}\n", status(), message(HAZARD),
                 f"@@ {TEST}\n", status())
    assert failures(log) == ["not understood: ERROR: the loader could not open something"]
    assert failures(watched("garbled msgNum: 7\n")) == ["not understood: garbled msgNum: 7"]


def test_many_texts_of_one_id_are_not_all_shown() -> None:
    log = watched(*(message("A", f"text {'x' * n}") for n in range(9)))
    lines = report(log, judge(log, "full", FEATURE, HAZARD, []))
    assert "    and 5 other texts" in lines


def test_the_allow_list_has_a_reason_and_a_cause_for_each_entry(tmp_path: Path) -> None:
    entries = load()
    assert all(len(entry.reason) > 40 and len(entry.cause) > 20 for entry in entries)
    assert {run for entry in entries for run in entry.runs} <= {run.name for run in RUNS}
    assert not [entry for entry in entries if entry.id.startswith("SYNC-") and entry.runs != ("coherent",)]
    file = tmp_path / "list.toml"
    file.write_text('[[allowed]]\nid = "A"\ntext = "b"\nruns = ["full"]\nreason = ""\ncause = "kp"\n')
    with pytest.raises(ValueError, match=r"list.toml, entry 1: each of .*reason.* it has cause, id, runs, text"):
        load(file)


def test_what_the_runs_name_exists() -> None:
    """A test that was renamed must not silently fall out of a selection, or into one."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    sources = "".join(f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in files)
    for run in RUNS:
        for name in (*run.leave_out, *run.short_leave_out):
            assert (ROOT / name).is_dir() or name.strip("[]").partition("[")[0] in sources, name
        for test in (*run.tests, *run.short):
            if "::" in test:
                path, _, name = test.partition("::")
                assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test
        assert run.planted_id not in {entry.id for entry in load() if run.name in entry.runs} or run.name == "coherent"
        assert "enable_message_limit = false" in run.settings(Path("pipe"))


def test_the_pipe_takes_what_several_writers_write(tmp_path: Path) -> None:
    """Writers that open it anew, as the layer does in each process, take nothing away from those before."""
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    with collected(pipe, log):
        for number in range(3):
            with pipe.open("w") as stream:
                stream.write(f"line {number}\n" * 2000)
        thread = threading.Thread(target=lambda: pipe.write_text("last\n"))
        thread.start()
        thread.join()
    assert log.read_text().split("\n") == [
        *(f"line {number}" for number in range(3) for _ in range(2000)), "last", "", "@@ the end", ""]
    assert not os.path.lexists(pipe)

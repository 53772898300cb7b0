"""Self-tests of kernels on matrix units: when they run, and how long what they find is kept."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.matrix_devices import PROBLEM, device, nvidia, passed
from vkattn.dispatch import choose
from vkattn.kernels import coopmat2, verdicts
from vkattn.kernels.manifest import Variant, load_manifest
from vkattn.ops import selftest

pytestmark = pytest.mark.usefixtures("no_verdicts")


def test_verdicts_are_kept_by_driver_and_spirv(no_verdicts: Path) -> None:
    kernel = load_manifest()["attn_coopmat_f16_d128_l32_quad"]
    verdicts.note(kernel, device(), "")
    verdicts.forget()
    assert verdicts.verdict(kernel, device()) == ""
    assert verdicts.verdict(kernel, device(driver_version=2)) is None
    assert verdicts.verdict(kernel, device(name="Another GPU")) is None
    assert verdicts.verdict(dataclasses.replace(kernel, sha256="0" * 64), device()) is None
    assert list(json.loads(no_verdicts.read_text()).values()) == [""]


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', "{not json"])
def test_a_damaged_file_of_verdicts_is_no_verdict(no_verdicts: Path, text: str) -> None:
    no_verdicts.parent.mkdir(parents=True)
    no_verdicts.write_text(text)
    kernel = load_manifest()["attn_coopmat_f16_d128_l32_quad"]
    assert verdicts.verdict(kernel, device()) is None
    verdicts.note(kernel, device(), "wrong")
    verdicts.forget()
    assert verdicts.verdict(kernel, device()) == "wrong"


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VKATTN_CACHE", str(tmp_path / "file"))
    kernel = load_manifest()["attn_coopmat_f16_d128_l32_quad"]
    verdicts.note(kernel, device(), "")
    assert verdicts.verdict(kernel, device()) == ""


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_has_no_verdicts_on_disk() -> None:
    assert choose(PROBLEM, nvidia()).NAME == "fused"
    passed(nvidia(), "attn_coopmat2_f16_d128_l32")
    assert choose(PROBLEM, nvidia()).NAME == "coopmat2"


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have self-tests pass without a device, except those of "quad"; return the names of those that ran."""
    names: list[str] = []

    def judge(device: Any, kernel: Variant) -> str:
        names.append(kernel.name)
        return "wrong" if "quad" in kernel.name else ""

    monkeypatch.setattr(selftest, "judge", judge)
    return names


def test_self_tests_run_when_a_choice_depends_on_them(judged: list[str]) -> None:
    on: Any = SimpleNamespace(info=device(), lock=threading.RLock())
    decode = dataclasses.replace(PROBLEM, max_q_len=1)
    selftest.settle(on, decode, "auto")  # split computes it
    selftest.settle(on, PROBLEM, "fused")
    assert judged == []
    selftest.settle(on, PROBLEM, "auto")
    assert judged == ["attn_coopmat_f16_d128_l32_quad", "attn_coopmat_f16_d128_l32_shared"]
    selftest.settle(on, PROBLEM, "auto")
    selftest.settle(on, PROBLEM, "coopmat")
    assert len(judged) == 2
    assert choose(PROBLEM, on.info).NAME == "coopmat"


def test_the_better_family_is_tested_first_and_alone(judged: list[str]) -> None:
    on: Any = SimpleNamespace(info=nvidia(), lock=threading.RLock())
    selftest.settle(on, PROBLEM, "auto")
    assert judged == ["attn_coopmat2_f16_d128_l32"]


def test_a_test_that_takes_the_process_down_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    on: Any = SimpleNamespace(info=nvidia(), lock=threading.RLock())
    seen = []

    def judge(device: Any, kernel: Variant) -> str:
        seen.append(verdicts.path().read_text())  # all that a crash here would leave
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "judge", judge)
    with pytest.raises(KeyboardInterrupt):
        selftest.settle(on, PROBLEM, "coopmat2")
    assert coopmat2.untested(PROBLEM, on.info) is not None  # who broke it off may have it tried again
    verdicts.forget()
    assert coopmat2.untested(PROBLEM, on.info) is not None
    verdicts.path().write_text(seen[0])
    assert coopmat2.not_supported_reasons(PROBLEM, on.info) == [f"attn_coopmat2_f16_d128_l32: {verdicts.UNFINISHED}"]


def test_a_test_that_could_not_run_is_tried_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    on: Any = SimpleNamespace(info=nvidia(), lock=threading.RLock())
    monkeypatch.setattr(selftest, "judge", lambda device, kernel: f"{selftest.COULD_NOT_RUN} (CapacityError: full)")
    selftest.settle(on, PROBLEM, "coopmat2")
    (reason,) = coopmat2.not_supported_reasons(PROBLEM, on.info)
    assert "CapacityError: full" in reason
    verdicts.forget()
    assert coopmat2.untested(PROBLEM, on.info) is not None

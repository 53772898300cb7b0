"""Tuning numbers as data: the defaults, a user's file, and that kernels follow them."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.fakes import fake_device_info
from vkattn.bench.tune import KNOBS, Knob, best_of
from vkattn.caps import tuning
from vkattn.caps.model import DeviceInfo
from vkattn.caps.tuning import Tuning, default_tuning, read_tables, tuning_for, user_path, write_table
from vkattn.dispatch import PRIORITY, choose
from vkattn.errors import OptionError
from vkattn.kernels import fused, split, split_cut
from vkattn.kernels.grid import num_groups
from vkattn.ops.spec import short_problem
from vkattn.problem import Problem

TYPES = ("cpu", "integrated", "virtual", "discrete", "other")
PROBLEM = Problem(1, 24, 8, 1, 4096, 128, 128, "float16", "float16", "float16")
GPU = fake_device_info(max_storage_buffers_per_stage=16, max_shared_memory_bytes=48 << 10,
                       subgroup_operations=frozenset({"basic", "vote", "shuffle", "arithmetic", "ballot"}))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where VKATTN_TUNING says that the user's file is; there is none yet."""
    monkeypatch.setenv("VKATTN_TUNING", str(tmp_path / "own.toml"))
    return tmp_path / "own.toml"


def test_every_type_of_device_has_defaults_for_every_number() -> None:
    for device_type in TYPES:
        assert set(asdict(default_tuning(device_type))) == {field.name for field in fields(Tuning)}
        assert fake_device_info(device_type=device_type).tuned == default_tuning(device_type)


def test_where_the_users_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VKATTN_TUNING", "")
    assert user_path() is None
    monkeypatch.setenv("VKATTN_TUNING", "some/file.toml")
    assert user_path() == Path("some/file.toml")
    monkeypatch.delenv("VKATTN_TUNING")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_path() == tmp_path / "vkattn" / "tuning.toml"
    assert tuning_for("discrete", "A GPU") == default_tuning("discrete"), "there is no such file"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path() == tmp_path / ".config" / "vkattn" / "tuning.toml"


def test_a_file_that_was_named_must_be_there(path: Path) -> None:
    with pytest.raises(OptionError, match=r"own\.toml cannot be read.*Hint: VKATTN_TUNING="):
        tuning_for("discrete", "A GPU")


def test_a_users_file_changes_what_it_names(path: Path) -> None:
    path.write_text('["A GPU"]\nsplit_groups = 528\nsplit_root_divisor = 3\n\n["Another"]\nsplit_groups = 1\n')
    expected = replace(default_tuning("discrete"), split_groups=528, split_root_divisor=3.0)
    assert tuning_for("discrete", "A GPU") == expected
    assert tuning_for("discrete", "A third") == default_tuning("discrete")


@pytest.mark.parametrize("text, message", [
    ('["A GPU"]\nsplit_group = 3', r"device 'A GPU' has the keys split_group; known: grid_groups"),
    ('["A GPU"]\nsplit_groups = 0', r"`split_groups` is 0; it must be an integer within 1 .. 65536"),
    ('["A GPU"]\nsplit_groups = 3.5', "must be an integer"),
    ('["A GPU"]\nsplit_groups = true', "must be an integer"),
    ('["A GPU"]\nsplit_groups = "many"', "must be an integer"),
    ('["A GPU"]\nsplit_threads = 192', "must be one of 128, 256"),
    ('["A GPU"]\nsplit_max_rows = 257', r"within 1 .. 256"),
    ('["A GPU"]\nsplit_root_divisor = nan', "must be a number"),
    ('["A GPU"]\nsplit_subgroups = 1', "must be true or false"),
    ("split_groups = 3", "must be a table"),
    ("[", "cannot be read"),
])
def test_mistakes_are_told(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as raised:
        tuning_for("discrete", "A GPU")
    assert "own.toml" in str(raised.value)


def test_what_is_written_is_read(path: Path) -> None:
    own = replace(default_tuning("discrete"), split_root_divisor=2.5, split_subgroups=False)
    write_table(path, 'A "GPU" [x]', own, "discrete")
    write_table(path, "llvmpipe", replace(default_tuning("cpu"), grid_groups=7), "cpu")
    assert read_tables(path) == {'A "GPU" [x]': {"split_root_divisor": 2.5, "split_subgroups": False},
                                 "llvmpipe": {"grid_groups": 7}}
    assert tuning_for("discrete", 'A "GPU" [x]') == own


def test_the_ranges_are_those_of_numbers_that_there_are() -> None:
    assert {*tuning.RANGES, *tuning.CHOICES} < set(tuning.NAMES)
    for device_type in TYPES:
        for name, (least, most) in tuning.RANGES.items():
            assert least <= getattr(default_tuning(device_type), name) <= most


def test_kernels_follow_the_numbers() -> None:
    def tuned(**changes: Any) -> DeviceInfo:
        return replace(GPU, tuning=replace(GPU.tuned, **changes))

    assert num_groups(tuned(grid_groups=77)) == 77
    assert split_cut.num_splits(8, 1 << 20, tuned(split_groups=80, split_root_divisor=1.0)) == 128
    assert split_cut.num_splits(8, 4096, tuned(split_groups=80, split_root_divisor=1.0)) == 10
    assert split_cut.num_splits(8, 4096, tuned(split_groups=8000, split_root_divisor=2.0)) == 32
    assert "subgroup" in split.variants(PROBLEM, GPU)[0].name
    assert "subgroup" not in split.variants(PROBLEM, tuned(split_subgroups=False))[0].name
    assert fused.variants(PROBLEM, GPU)[0].kernel == "attn_fused"
    assert fused.variants(PROBLEM, tuned(fused_subgroups=True))[0].kernel == "attn_fused_subgroup"
    few = replace(PROBLEM, max_q_len=4)
    assert choose(few, GPU).NAME == "split"
    assert choose(few, tuned(split_max_rows=9)).NAME == "fused"
    assert choose(few, tuned(split_max_rows=9), "split").NAME == "split"
    assert short_problem(replace(PROBLEM, max_q_len=500), 9).max_q_len == 3


@pytest.mark.parametrize(("changes", "rows", "expected"), [
    ({}, 256, "split"),  # 2000 rows in all, of 6000
    ({}, 257, "fused"),  # more than the kernels take
    ({"batch_size": 8}, 93, "split"),
    ({"batch_size": 8}, 94, "fused"),
    ({"batch_size": 800}, 8, "split"),  # keys are read once anyway
    ({"batch_size": 800}, 9, "fused"),
])
def test_split_is_preferred_while_rows_are_few(changes: dict[str, int], rows: int, expected: str) -> None:
    """The numbers of discrete GPUs; with matrix units, see test_matrix_kernels."""
    problem = replace(PROBLEM, num_heads=8, max_q_len=rows, **changes)
    assert expected == choose(problem, GPU).NAME


def test_the_only_one_that_can_is_taken_however_many_rows() -> None:
    problem = replace(PROBLEM, max_q_len=20)
    few = replace(GPU, tuning=replace(GPU.tuned, split_max_rows=9), max_shared_memory_bytes=16 << 10)
    others = [module for module in PRIORITY if module.NAME != "split"]
    with mock.patch.multiple(others[-1], not_supported_reasons=lambda *_: ["no"]), \
            mock.patch.multiple(fused, not_supported_reasons=lambda *_: ["no"]):
        assert choose(problem, few).NAME == "split"


# --- vkattn tune ---


def test_tuning_takes_what_is_clearly_faster() -> None:
    """A device on which 528 workgroups and the divisor 2 would be best, and everything else changes nothing much."""
    asked: list[tuple[str, Tuning]] = []

    def measure(knob: Knob, current: Tuning, again: bool) -> float:
        if not again:
            asked.append((knob.name, current))
        steps = abs(math.log(current.split_groups / 528)) + abs(math.log(current.split_root_divisor / 2))
        return 100 * (1 + steps) * (0.99 if not current.split_subgroups else 1) * (2 if current.fused_subgroups else 1)

    start = replace(default_tuning("discrete"), split_root_divisor=4.0)
    found = best_of(start, measure)
    assert found == replace(start, split_groups=528, split_root_divisor=2.0)
    assert {name for name, _ in asked} == {knob.name for knob in KNOBS}
    assert len(asked) == len(set(asked))


def test_what_was_faster_once_only_is_not_taken() -> None:
    start = default_tuning("discrete")
    assert best_of(start, lambda knob, current, again: 100.0 if again or current == start else 50.0) == start


def test_every_knob_is_a_number_that_there_is() -> None:
    assert {knob.name for knob in KNOBS} <= set(tuning.NAMES)
    for device_type in TYPES:
        for knob in KNOBS:
            for candidate in knob.candidates(getattr(default_tuning(device_type), knob.name)):
                tuning.checked({knob.name: candidate}, "a candidate")


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_has_the_defaults() -> None:
    assert user_path() is None
    assert tuning_for("cpu", "llvmpipe") == default_tuning("cpu")

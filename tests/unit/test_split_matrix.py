"""The kernel of `split` on matrix units: which problems and devices it is for, and what its self-test decides."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import fake_device_info
from vkattn.caps.model import DeviceInfo, MatrixShape
from vkattn.formats import QUANTISED
from vkattn.kernels import matrix, split, split_matrix, verdicts
from vkattn.kernels.manifest import Variant, load_manifest
from vkattn.ops import selftest
from vkattn.problem import Problem

pytestmark = pytest.mark.usefixtures("no_verdicts")

SHADERS = Path(__file__).resolve().parents[2] / "shaders"
PROBLEM = Problem(1, 24, 8, 1, 4096, 128, 128, "float16", "int8", "int8")
KERNEL = "attn_split_quant_coopmat_int8_d128_l32"
EXTENSIONS = frozenset({"VK_KHR_cooperative_matrix", "VK_KHR_shader_float16_int8", "VK_KHR_vulkan_memory_model"})
UNITS = MatrixShape(16, 8, 16, "float16", "float32")


def device(**changes: Any) -> DeviceInfo:
    """Return a device with the matrix units that the kernel needs."""
    return fake_device_info(**({
        "extensions": EXTENSIONS, "matrix_shapes": (UNITS,), "max_shared_memory_bytes": 49152,
        "max_workgroup_invocations": 1024, "max_workgroup_size": (1024, 1024, 64),
        "max_storage_buffers_per_stage": 16, "subgroup_operations": frozenset({"basic", "vote", "shuffle"}),
    } | changes))


def chosen(problem: Problem, info: DeviceInfo) -> str:
    return split.shape(problem, info).kernel.name


def test_it_is_used_only_after_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "attn_split_quant_subgroup_int8_l8"
    assert chosen(PROBLEM, device()) == other
    undecided = split.untested(PROBLEM, device())
    assert undecided is not None and undecided.name == KERNEL
    verdicts.note(undecided, device(), "failed its self-test on this device (decode: an error of 7 of the bound)")
    assert chosen(PROBLEM, device()) == other and split.untested(PROBLEM, device()) is None
    verdicts.note(undecided, device(), "")
    assert chosen(PROBLEM, device()) == KERNEL and split.untested(PROBLEM, device()) is None
    assert split.shape(PROBLEM, device()).rows == split.BASE_ROWS
    monkeypatch.setenv("VKATTN_TIERS", "base,subgroup")
    assert chosen(PROBLEM, device()) == other and split.untested(PROBLEM, device()) is None


@pytest.mark.parametrize("changes", [
    {"head_dim": 129}, {"value_dim": 256}, {"key_dtype": "float16", "value_dtype": "float16"},
    {"key_dtype": "q4_0"}, {"key_dtype": "int8", "value_dtype": "float16"}], ids=str)
def test_problems_for_other_kernels(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(PROBLEM, **changes)
    assert split.untested(problem, device()) is None
    assert not chosen(problem, device()).startswith(split_matrix.KERNEL)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"extensions": frozenset()}, "needs VK_KHR_cooperative_matrix, which the device does not report"),
    ({"matrix_shapes": (MatrixShape(16, 16, 16, "float16", "float32"),)},
     "needs matrices of 16 x 8 x 16 float16 summed in float32, which the device does not report"),
    ({"subgroup_size": 64}, "needs subgroups of 32 invocations, the device has 64"),
    ({"subgroup_operations": frozenset({"basic", "vote"})}, "needs subgroup shuffle operations"),
])
def test_devices_for_other_kernels(changes: dict[str, Any], reason: str) -> None:
    info = device(**changes)
    assert split.untested(PROBLEM, info) is None
    assert not chosen(PROBLEM, info).startswith(split_matrix.KERNEL)
    assert any(reason in found for found in matrix.static_reasons(load_manifest()[KERNEL], info))


def test_a_self_test_runs_when_the_choice_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def judge(device: Any, kernel: Variant) -> str:
        names.append(kernel.name)
        return ""

    monkeypatch.setattr(selftest, "judge", judge)
    on: Any = SimpleNamespace(info=device(), lock=threading.RLock())
    selftest.settle(on, PROBLEM, "three_pass")
    selftest.settle(on, dataclasses.replace(PROBLEM, key_dtype="float16", value_dtype="float16"), "auto")
    assert names == []
    selftest.settle(on, PROBLEM, "auto")
    selftest.settle(on, PROBLEM, "split")
    assert names == [KERNEL] and chosen(PROBLEM, on.info) == KERNEL


def test_every_variant_is_reachable() -> None:
    reached = set()
    for name in QUANTISED:
        for head_dim, value_dim in ((1, 64), (64, 1), (65, 1), (1, 128)):
            problem = dataclasses.replace(PROBLEM, key_dtype=name, value_dtype=name, head_dim=head_dim,
                                          value_dim=value_dim)
            kernel = split_matrix.fitting(problem, device(), frozenset({"coopmat"}))
            assert kernel is not None and matrix.WIDTHS[kernel.axes["width"]] >= max(head_dim, value_dim)
            reached.add(kernel.name)
    assert reached == {name for name, kernel in load_manifest().items() if kernel.kernel == split_matrix.KERNEL}


def test_python_and_the_shader_agree() -> None:
    text = (SHADERS / f"{split_matrix.KERNEL}.comp").read_text()
    for name, width in re.findall(r"defined\(WIDTH_(D\d+)\)\n#define WIDTH (\d+)\n", text):
        assert matrix.WIDTHS[name.lower()] == int(width)
    assert f"#define ROWS {split.BASE_ROWS}\n" in text


@pytest.mark.parametrize(("memory", "threads", "expected"), [(49152, 512, 16), (16384, 128, 66)])
def test_its_workgroups_fill_the_device(memory: int, threads: int, expected: int) -> None:
    """With as few parts as that takes; and with smaller ones where a device has no memory for those."""
    info = device(max_shared_memory_bytes=memory)
    verdicts.note(load_manifest()[KERNEL], info, "")
    scratch = split.scratch_words(dataclasses.replace(PROBLEM, max_kv_len=1 << 20), info, 1 << 24)
    assert split.shape(PROBLEM, info).spec == (threads, 1, *split.constant_sizes(PROBLEM, info))
    assert split.cut(PROBLEM, 1, 131072, scratch, info).words["num_splits"] == expected


@pytest.mark.parametrize(("dims", "is_full"), [((128, 128), 1), ((128, 112), 0), ((112, 128), 0), ((64, 64), 1),
                                               ((63, 63), 0)])
def test_rows_as_wide_as_the_variant_have_their_places_as_constants(dims: tuple[int, int], is_full: int) -> None:
    problem, info = dataclasses.replace(PROBLEM, head_dim=dims[0], value_dim=dims[1]), device()
    kernel = split_matrix.candidate(problem, info)
    assert kernel is not None and split.matrix_shape(kernel, problem, info).spec[:2] == (512, is_full)

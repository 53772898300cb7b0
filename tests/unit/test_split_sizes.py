"""The split family's declarations: tied to the shaders, every variant reachable, splits within their buffers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.fakes import fake_device_info
from vkattn.formats import QUANTISED
from vkattn.kernels import split, split_cut, split_matrix
from vkattn.kernels.grid import row_tiles
from vkattn.kernels.manifest import load_manifest
from vkattn.problem import Problem

SHADERS = Path(__file__).resolve().parents[2] / "shaders"
ROOM = {"max_storage_buffers_per_stage": 16, "max_shared_memory_bytes": 48 << 10}
GPU = {"device_type": "discrete", "subgroup_operations": frozenset({"basic", "vote", "shuffle"}), **ROOM}
PROBLEM = Problem(1, 24, 8, 1, 4096, 128, 128, "float16", "float16", "float16")


def test_constants_are_those_of_the_shaders() -> None:
    base = (SHADERS / "attn_split.comp").read_text()
    assert f"#define ROWS {split.BASE_ROWS}\n" in base
    assert f"const uint MAX_VECS = {split.MAX_DIM // 4}u;" in base
    for name in ("attn_split_subgroup", "attn_split_quant_subgroup"):
        subgroup = (SHADERS / f"{name}.comp").read_text()
        assert f"local_size_x = {split.FEWEST_THREADS}," in subgroup
        assert f"const uint THREADS = {split.FEWEST_THREADS}u;" in subgroup
    assert f"#define IN_FLIGHT {split_cut.IN_FLIGHT}\n" in (SHADERS / "attn_split_subgroup.comp").read_text()
    lanes = (SHADERS / "attn_split_lanes.comp").read_text()
    assert f"local_size_x = {split.LANES})" in lanes
    assert f"#define LANES {split.LANES}\n" in lanes
    assert f"#define CHUNKS {split.LANES_DIM // (4 * split.LANES)} " in lanes
    assert f"#define ROWS {split.BASE_ROWS}\n" in lanes
    assert f"#define UNIT_VECS {split.UNIT // 4}\n" in subgroup
    assert f"#define ROWS {split.BASE_ROWS}\n" in subgroup


def test_every_variant_is_chosen_somewhere() -> None:
    chosen = set()
    for subgroup_size in (1, 4, 8, 16, 32, 64, "cpu"):
        info = fake_device_info(**GPU | ({"device_type": "cpu", "subgroup_size": 8} if subgroup_size == "cpu" else
                                         {"subgroup_size": subgroup_size}))
        if subgroup_size == 1:
            info = dataclasses.replace(info, subgroup_operations=frozenset())
        for query, key in (("float32", "float32"), ("float32", "float16"), ("float32", "bfloat16"),
                           ("float16", "float16"), ("bfloat16", "bfloat16"),
                           *(("float32", name) for name in QUANTISED), ("float32", "mixed")):
            for head_dim in (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256):
                for q_len in (1, 8):
                    problem = dataclasses.replace(PROBLEM, head_dim=head_dim, value_dim=head_dim, max_q_len=q_len,
                                                  query_dtype=query, key_dtype=key, value_dtype=key)
                    if key == "mixed":
                        problem = dataclasses.replace(problem, key_dtype="q4_0", value_dtype="float16")
                    assert not split.not_supported_reasons(problem, info)
                    chosen.add(split.variants(problem, info)[0].name)
    assert chosen == {name for name, kernel in load_manifest().items() if kernel.kernel.startswith("attn_split")
                      and kernel.kernel != split_matrix.KERNEL}  # tests/unit/test_split_matrix.py


def test_a_subgroup_is_never_smaller_than_the_lanes_of_the_variant() -> None:
    for subgroup_size in (4, 8, 16, 32, 64):
        info = fake_device_info(subgroup_size=subgroup_size, **GPU)
        for head_dim in (8, 64, 128, 256):
            name = split.variants(dataclasses.replace(PROBLEM, head_dim=head_dim), info)[0].name
            lanes = re.search(r"_l(\d+)_", name)
            assert lanes is None or int(lanes[1]) <= subgroup_size
            quantised = dataclasses.replace(PROBLEM, head_dim=head_dim, key_dtype="int8", value_dtype="int8")
            name = split.variants(quantised, info)[0].name
            lanes = re.search(r"_l(\d+)$", name)
            assert lanes is not None or name == "attn_split_any_int8"
            assert lanes is None or head_dim / split.UNIT <= int(lanes[1]) <= subgroup_size


def test_cpus_with_subgroups_of_eight_take_lanes() -> None:
    """Unless the rows are longer than it holds, or its loops would be longer than llvmpipe allows."""
    cpu = fake_device_info(**GPU | {"device_type": "cpu", "subgroup_size": 8, "name": "llvmpipe (LLVM 15)"})
    chosen = split.shape(dataclasses.replace(PROBLEM, head_dim=40, value_dim=33), cpu)
    assert (chosen.kernel.name, chosen.spec) == ("attn_split_lanes_f16_f16", (3, 2, 2))
    assert split.scratch_words(PROBLEM, cpu, 1 << 24)["parts"] >= 8 * split_cut.part_words(PROBLEM, split.BASE_ROWS)
    for key, value, axis in (("int8", "int8", "int8"), ("q4_0", "q4_0", "q4_0"), ("q8_0", "float16", "mixed")):
        quantised = dataclasses.replace(PROBLEM, key_dtype=key, value_dtype=value)
        assert split.variants(quantised, cpu)[0].name == f"attn_split_lanes_any_{axis}"
    for changes in ({"head_dim": 129}, {"value_dim": 160}, {"batch_size": 500}):
        assert split.variants(dataclasses.replace(PROBLEM, **changes), cpu)[0].name == "attn_split_f16_f16"
        assert not split.not_supported_reasons(dataclasses.replace(PROBLEM, **changes | {"batch_size": 1}), cpu)
    small = dataclasses.replace(cpu, subgroup_size=4)
    assert split.variants(PROBLEM, small)[0].name == "attn_split_f16_f16"


def test_tiers_limit_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    info = fake_device_info(subgroup_size=32, **GPU)
    assert "subgroup" in split.variants(PROBLEM, info)[0].name
    monkeypatch.setenv("VKATTN_TIERS", "base")
    assert split.variants(PROBLEM, info)[0].name == "attn_split_f16_f16"


@pytest.mark.parametrize("device_type", ["cpu", "integrated", "discrete"])
@pytest.mark.parametrize("subgroup_size", [1, 32])  # 1: without shuffles, nor whole rounds
def test_splits_always_fit_their_buffer(device_type: str, subgroup_size: int) -> None:
    info = fake_device_info(**GPU | {"device_type": device_type}, subgroup_size=subgroup_size)
    problem = dataclasses.replace(PROBLEM, max_q_len=21, max_kv_len=131072)
    scratch = split.scratch_words(problem, info, 1 << 24)
    rows = split.shape(problem, info).rows
    for q_len in range(1, 22):
        for kv_len in (0, 1, 63, 64, 65, 500, 4096, 8193, 131071, 131072):
            words = split.cut(problem, q_len, kv_len, scratch, info).words
            splits, keys = words["num_splits"], words["keys_per_split"]
            assert 1 <= splits <= split_cut.MAX_SPLITS
            assert splits * keys >= kv_len
            assert keys <= split_cut.MAX_KEYS_PER_SPLIT
            if splits > 1:
                items = row_tiles(problem, q_len, rows)
                assert items * splits * split_cut.part_words(problem, rows) <= scratch["parts"]


def test_workgroups_are_as_large_as_the_device_allows() -> None:
    info = fake_device_info(subgroup_size=32, max_workgroup_invocations=1024, max_workgroup_size=(1024, 1024, 64),
                            **GPU)
    assert split.shape(PROBLEM, info).spec == (256, 3, 1, 8, 3, 1, 32, 32, 32)
    for limit in ({"max_workgroup_invocations": 128}, {"max_workgroup_size": (128, 128, 64)},
                  {"max_shared_memory_bytes": 12 << 10}, {"device_type": "integrated"}):
        assert split.shape(PROBLEM, dataclasses.replace(info, **limit)).spec[:2] == (128, 3)
    assert split.shape(dataclasses.replace(PROBLEM, max_q_len=8), info).spec[:2] == (256, 8)


def test_longer_caches_are_split_further() -> None:
    info = fake_device_info(**GPU)
    scratch = split.scratch_words(dataclasses.replace(PROBLEM, max_kv_len=1 << 20), info, 1 << 24)
    counts = [split.cut(PROBLEM, 1, n, scratch, info).words["num_splits"] for n in (16, 1024, 4096, 32768, 131072)]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[2] < counts[-1]


@pytest.mark.parametrize(("max_kv_len", "splits", "most", "expected"), [
    (512, 6, 33, 64),  # 86 would take two rounds, the second with 22 keys
    (2048, 12, 33, 128),
    (32768, 33, 33, 1024),  # of 960 there would be 35
    (131072, 33, 33, 4032),
    (40, 5, 33, 64),  # one part: a round is never cut
    (1000, 3, 3, 384),
    (8193, 1, 1, 8256),
])
def test_splits_are_whole_rounds(max_kv_len: int, splits: int, most: int, expected: int) -> None:
    assert split_cut.keys_per_split(max_kv_len, splits, most, 64) == expected
    assert -(-max_kv_len // expected) <= most
    assert split_cut.keys_per_split(max_kv_len, splits, most, 1) == -(-max_kv_len // splits)


def test_rounds_are_counted_for_the_form_whose_loop_has_them() -> None:
    info = fake_device_info(subgroup_size=32, max_workgroup_invocations=256, max_workgroup_size=(256, 256, 64), **GPU)
    assert split_cut.round_keys(split.shape(PROBLEM, info)) == 256 // 16 * 4
    assert split_cut.round_keys(split.shape(dataclasses.replace(PROBLEM, head_dim=32, value_dim=9), info)) == 256
    assert split_cut.round_keys(split.shape(PROBLEM, dataclasses.replace(info, subgroup_size=1))) == 1


def test_sizes_are_constants_on_gpus_only() -> None:
    odd, gpu = dataclasses.replace(PROBLEM, head_dim=33, value_dim=70), fake_device_info(**GPU)
    assert split.constant_sizes(odd, gpu) == (1, 8, 3, 1, 9, 18, 18)
    assert split.constant_sizes(dataclasses.replace(odd, value_dim=65, max_q_len=2), gpu) == (1, 8, 3, 0, 9, 17, 18)
    assert split.constant_sizes(odd, fake_device_info(**GPU | {"device_type": "cpu"})) == (0,) * 7


@pytest.mark.parametrize("device_type", ["cpu", "integrated", "discrete"])
@pytest.mark.parametrize("subgroup_size", [1, 32])
def test_a_pass_has_a_workgroup_for_each_split_of_each_item(device_type: str, subgroup_size: int) -> None:
    info = fake_device_info(**GPU | {"device_type": device_type}, subgroup_size=subgroup_size)
    problem = dataclasses.replace(PROBLEM, max_q_len=5, max_kv_len=3000)
    scratch, rows = split.scratch_words(problem, info, 1 << 24), split.shape(problem, info).rows
    (one,) = split.passes(problem, info)
    most = max(row_tiles(problem, q_len, rows)
               * split.cut(problem, q_len, keys, scratch, info).words["num_splits"]
               for q_len in range(1, 6) for keys in range(0, 3001, 7))
    assert one.most_groups is not None
    assert most <= one.most_groups <= 2 * most
    assert one.groups(info) == min(one.most_groups, info.tuned.grid_groups)


def test_too_many_rows_and_too_wide_are_reasons() -> None:
    info = fake_device_info(**ROOM)
    reasons = split.not_supported_reasons(dataclasses.replace(PROBLEM, max_q_len=86, head_dim=257), info)
    assert any("258 query rows" in reason for reason in reasons)
    assert any("head_dim 257; at most 256" in reason for reason in reasons)

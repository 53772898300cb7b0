"""Which fused variant is chosen, that every variant is, and that Python and GLSL agree on the tiles."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from tests.fakes import fake_device_info
from vkattn.caps.model import DeviceInfo
from vkattn.formats import QUANTISED
from vkattn.kernels import fused
from vkattn.kernels.manifest import load_manifest
from vkattn.kernels.passes import Cut, even_cut
from vkattn.problem import Problem

SHADERS = Path(__file__).resolve().parents[2] / "shaders"
PROBLEM = Problem(1, 16, 16, 4096, 4096, 64, 64, "float32", "float32", "float32")
SUBGROUP = frozenset({"basic", "vote", "arithmetic", "shuffle"})


def device(**changes: object) -> DeviceInfo:
    able = {"max_shared_memory_bytes": 32768, "subgroup_operations": SUBGROUP, "max_workgroup_invocations": 256,
            "max_workgroup_size": (256, 256, 64)}
    return fake_device_info(**(able | changes))


def number(pattern: str, file: str) -> int:
    """Return the number that ``pattern`` finds in a shader."""
    found = re.search(pattern, (SHADERS / file).read_text())
    assert found, f"{file} has no {pattern}"
    return int(found[1])


def test_tiles_are_those_of_the_shaders() -> None:
    source = (SHADERS / "attn_fused.comp").read_text()
    tall, other = re.findall(r"#define BLOCK_ROWS (\d+)u", source)
    assert {"tall": int(tall), "large": int(other), "small": int(other)} == fused.BLOCK_ROWS
    assert source.index("defined(TILE_TALL)") < source.index(f"#define BLOCK_ROWS {tall}u") < source.index("#else")
    assert number(r"#define BLOCK_ROWS (\d+)u", "attn_fused_subgroup.comp") == fused.SUBGROUP_BLOCK_ROWS
    assert number(r"LANES = (\d+)u", "attn_fused_subgroup.comp") == fused.SUBGROUP_LANES
    assert 4 * number(r"BLOCK_VECS = (\d+)u", "attn_fused_subgroup.comp") == fused.SUBGROUP_BLOCK_WIDTH
    lanes = number(r"OUT_X = (\d+)u", "attn_fused.comp")
    vecs = [int(found) for found in re.findall(r"OUT_VECS = (\d)u", source)]
    assert {f"w{4 * lanes * count}": 4 * lanes * count for count in vecs} == fused.BLOCK_WIDTH


@pytest.mark.parametrize(("info", "value_dim", "expected"), [
    (device(device_type="discrete"), 64, "attn_fused_f32_f32_w64_large"),
    (device(device_type="discrete"), 65, "attn_fused_f32_f32_w128_large"),
    (device(device_type="discrete", max_shared_memory_bytes=49152), 64, "attn_fused_f32_f32_w64_tall"),
    (device(device_type="discrete", max_shared_memory_bytes=49152, max_workgroup_invocations=128), 64,
     "attn_fused_f32_f32_w64_large"),
    (device(device_type="integrated", max_shared_memory_bytes=16384), 65, "attn_fused_f32_f32_w64_small"),
    (device(device_type="integrated", max_workgroup_invocations=128), 65, "attn_fused_f32_f32_w128_large"),
    (device(device_type="cpu", subgroup_size=8), 65, "attn_fused_subgroup_f32_f32"),
    (device(device_type="cpu", subgroup_size=4), 64, "attn_fused_f32_f32_w64_small"),
    (device(device_type="cpu", subgroup_operations=frozenset()), 64, "attn_fused_f32_f32_w64_small"),
])
def test_the_variant_follows_the_device(info: DeviceInfo, value_dim: int, expected: str) -> None:
    problem = dataclasses.replace(PROBLEM, value_dim=value_dim)
    (chosen,) = fused.variants(problem, info)
    assert chosen.name == expected
    assert fused.not_supported_reasons(problem, info) == []


def test_tall_tiles_are_for_as_many_of_them_as_fill_a_device() -> None:
    info = device(device_type="discrete", max_shared_memory_bytes=49152)
    tiles = [axes["tile"] for axes in (fused.variants(dataclasses.replace(PROBLEM, max_q_len=rows), info)[0].axes
                                       for rows in (15 * 128, 15 * 128 + 1))]
    assert tiles == ["large", "tall"]


def test_only_long_rows_have_compensated_sums() -> None:
    for info, expected in ((device(device_type="discrete"), [(0,), (1,)]), (device(device_type="cpu"), [(), ()])):
        specs = [fused.passes(dataclasses.replace(PROBLEM, max_kv_len=keys), info)[0].spec
                 for keys in (fused.PLAIN_KEYS, fused.PLAIN_KEYS + 1)]
        assert specs == expected


def test_more_keys_than_loops_allow_go_to_the_kernel_with_fewer_loops() -> None:
    llvmpipe = device(name="llvmpipe (LLVM 15)", device_type="cpu", subgroup_size=8)
    names = [fused.variants(dataclasses.replace(PROBLEM, max_kv_len=keys), llvmpipe)[0].name
             for keys in (512, 8000)]
    assert names == ["attn_fused_subgroup_f32_f32", "attn_fused_f32_f32_w64_small"]
    assert fused.not_supported_reasons(dataclasses.replace(PROBLEM, max_kv_len=100000), llvmpipe)


def test_a_device_without_room_is_told_so() -> None:
    (reason,) = fused.not_supported_reasons(PROBLEM, device(max_shared_memory_bytes=8192))
    assert "bytes of shared memory, the device has 8192" in reason


def test_every_variant_is_reachable() -> None:
    devices = [device(device_type="discrete"), device(device_type="discrete", max_shared_memory_bytes=49152),
               device(device_type="discrete", max_shared_memory_bytes=16384),
               device(device_type="cpu", subgroup_size=8)]
    mixtures = [("float32", "float32", "float32"), ("float32", "float16", "float16"), ("float32",) + ("bfloat16",) * 2,
                ("float16",) * 3, ("bfloat16",) * 3, *(("float16", name, name) for name in QUANTISED),
                ("float32", "int8", "float16")]
    reached = {fused.variants(Problem(1, 1, 1, 128 * 256, 9, 8, value_dim, *dtypes), info)[0].name
               for info in devices for dtypes in mixtures for value_dim in (64, 65)}
    assert reached == {name for name in load_manifest() if name.startswith("attn_fused")}


def test_small_variants_fit_what_vulkan_promises() -> None:
    small = [kernel for kernel in load_manifest().values() if kernel.axes.get("tile") == "small"]
    assert len(small) == 5 + 4
    for kernel in small:
        assert kernel.shared_bytes <= 16384 and math.prod(kernel.local_size) <= 128 and not kernel.capabilities


@pytest.mark.parametrize(("tiles", "most", "per_chunk", "chunks"), [
    (1536, 558, 512, 3), (5, 3, 3, 2), (4, 4, 4, 1), (7, 1, 1, 7), (0, 1, 1, 0)])
def test_chunks_are_about_as_large(tiles: int, most: int, per_chunk: int, chunks: int) -> None:
    assert even_cut(tiles, most) == Cut({"tiles_per_chunk": per_chunk}, chunks)

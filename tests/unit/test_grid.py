"""Work is cut so that no invocation goes round more often than llvmpipe lets it, and nothing else is limited."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes import fake_device_info
from vkattn.kernels import fused, split, three_pass
from vkattn.kernels.grid import LLVMPIPE_ITERATIONS, items_that_fit, iteration_limit, num_groups
from vkattn.problem import Problem

LLVMPIPE = fake_device_info(name="llvmpipe (LLVM 15.0.6, 256 bits)", device_type="cpu", subgroup_size=8,
                            max_shared_memory_bytes=32 << 10, max_storage_buffers_per_stage=32,
                            subgroup_operations=frozenset({"basic", "vote", "shuffle", "ballot", "arithmetic"}))
OTHER = dataclasses.replace(LLVMPIPE, name="SwiftShader Device (Subzero)")
PROBLEM = Problem(1, 24, 8, 8192, 8192, 128, 128, "float16", "float16", "float16")


def test_only_llvmpipe_has_a_limit() -> None:
    assert iteration_limit(LLVMPIPE) == LLVMPIPE_ITERATIONS < 65535
    assert iteration_limit(OTHER) is None
    assert items_that_fit(10**9, OTHER) is None


def test_items_that_fit() -> None:
    assert items_that_fit(LLVMPIPE_ITERATIONS, LLVMPIPE) == num_groups(LLVMPIPE) == LLVMPIPE.tuned.grid_groups
    assert items_that_fit(LLVMPIPE_ITERATIONS + 1, LLVMPIPE) == 0


def test_a_fused_chunk_stays_within_the_limit() -> None:
    problem = dataclasses.replace(PROBLEM, max_kv_len=1024)
    cut = fused.cut(problem, 8192, 1024, {}, LLVMPIPE)
    per_item = fused.item_iterations(problem, 1024, fused.variants(problem, LLVMPIPE)[0])
    items = cut.words["tiles_per_chunk"] * 2  # two chunks of 64 elements at most
    assert -(-items // num_groups(LLVMPIPE)) * per_item <= LLVMPIPE_ITERATIONS
    assert cut.num_chunks > 1


@pytest.mark.parametrize("kv_len", [63, 4096, 50000])
def test_a_three_pass_chunk_stays_within_the_limit(kv_len: int) -> None:
    problem = dataclasses.replace(PROBLEM, max_kv_len=kv_len)
    tiles = three_pass.tiles_that_fit(problem, kv_len, LLVMPIPE)
    assert tiles is not None
    rounds = -(-tiles * 2 // num_groups(LLVMPIPE))
    assert rounds * three_pass.output_iterations(kv_len) <= LLVMPIPE_ITERATIONS or tiles == 1


def test_what_one_item_cannot_do_is_a_reason_there_and_only_there() -> None:
    long = dataclasses.replace(PROBLEM, max_kv_len=100000)
    for module in (fused, three_pass):
        assert any("65535" in reason for reason in module.not_supported_reasons(long, LLVMPIPE))
        assert not any("65535" in reason for reason in module.not_supported_reasons(long, OTHER))


def test_splits_of_many_items_are_refused() -> None:
    many = dataclasses.replace(PROBLEM, batch_size=70000, num_heads=1, num_kv_heads=1, max_q_len=1, max_kv_len=2)
    assert any("65535" in reason for reason in split.not_supported_reasons(many, LLVMPIPE))
    assert not split.not_supported_reasons(many, OTHER)
    few = dataclasses.replace(PROBLEM, max_q_len=1, max_kv_len=131072)
    assert not split.not_supported_reasons(few, LLVMPIPE)

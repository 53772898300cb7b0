"""The grid of `vkattn bench`: what it holds, and the bytes and operations of a problem."""

from __future__ import annotations

import dataclasses

import pytest

from vkattn.bench.case import num_sets
from vkattn.bench.problems import BLOCK_BYTES, BenchProblem, choose, expand, read_grid
from vkattn.errors import OptionError

MODELS = {"small": [6, 2, 64], "other": [4, 4, 32]}


def test_the_grid_holds_what_was_asked_for() -> None:
    full = {problem.name for problem in read_grid()["full"]}
    for heads in ("24/8 D128", "32/8 D64", "16/8 D128", "32/32 D64", "32/32 D128", "9/3 D64"):
        for batch in (1, 8):
            for dtype in ("float16", "int8", "q4_0"):
                assert {f"decode {heads} S{length} B{batch} {dtype}" for length in (512, 4096, 131072)} <= full
        assert {f"prefill {heads} S{length} B1 float16 causal" for length in (512, 8192)} <= full


def test_the_targets_are_those_of_the_project() -> None:
    assert [problem.name for problem in read_grid()["targets"]] == [
        "decode 24/8 D128 S4096 B1 float16", "decode 24/8 D128 S32768 B1 float16",
        "decode 24/8 D128 S131072 B1 float16", "prefill 24/8 D128 S2048 B1 float16 causal",
        "prefill 24/8 D128 S8192 B1 float16 causal", "decode 24/8 D128 S8192 B8 float16",
        "decode 24/8 D128 S131072 B1 int8", "decode 24/8 D128 S131072 B1 q4_0",
        "prefill 32/32 D64 S4096 B4 float32 full"]


def test_no_set_holds_a_problem_twice() -> None:
    for problems in read_grid().values():
        assert len({problem.name for problem in problems}) == len(problems)


def test_choose_keeps_the_order_and_leaves_out_repetitions() -> None:
    sets = read_grid()
    chosen = choose(["scaling", "targets", "scaling"], sets)
    assert chosen[: len(sets["scaling"])] == sets["scaling"]
    assert len(chosen) == len({problem.name for problem in [*sets["scaling"], *sets["targets"]]})
    with pytest.raises(OptionError, match="no set nothing; there are: targets"):
        choose(["quick", "nothing"], sets)


def test_an_entry_is_every_combination() -> None:
    problems = expand({"kind": "decode", "models": ["small", "other"], "lengths": [8, 16], "batches": [1, 3],
                       "dtypes": ["float16", "q4_0"]}, MODELS)
    assert len(problems) == 16
    assert problems[0] == BenchProblem("decode", "small", 6, 2, 64, 8)
    assert problems[-1] == BenchProblem("decode", "other", 4, 4, 32, 16, 3, "q4_0")


@pytest.mark.parametrize("change, message", [
    ({"lenghts": [1]}, "lenghts"), ({"models": ["large"]}, "large"), ({"kind": "train"}, "train"),
    ({"dtypes": ["int4"]}, "int4"), ({"lengths": [0]}, "positive")])
def test_mistakes_in_the_grid(change: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        expand({"kind": "decode", "models": ["small"], "lengths": [8]} | change, MODELS)


def test_bytes_and_operations_of_decode() -> None:
    """Worked by hand: 2 x 2 KV heads x 10 tokens x 64 halves of keys and values, 6 x 64 halves of query and output."""
    problem = BenchProblem("decode", "small", 6, 2, 64, 10)
    assert problem.cache_bytes == 2 * 2 * 10 * 64 * 2
    assert problem.num_bytes == problem.cache_bytes + 2 * 6 * 64 * 2
    assert problem.num_operations == 2 * 2 * 6 * 64 * 10
    many = dataclasses.replace(problem, batch_size=5)
    assert (many.num_bytes, many.num_operations) == (5 * problem.num_bytes, 5 * problem.num_operations)


@pytest.mark.parametrize("dtype, per_block", [("int8", 32), ("q8_0", 34), ("q4_0", 18)])
def test_quantised_caches(dtype: str, per_block: int) -> None:
    problem = BenchProblem("decode", "small", 6, 2, 64, 10, dtype=dtype)
    assert problem.is_quantised and problem.query_dtype == "float32"
    assert problem.cache_bytes == 2 * 2 * 10 * 2 * per_block
    assert BLOCK_BYTES[dtype] == per_block


def test_causal_prefill_counts_the_pairs_that_are_seen() -> None:
    causal = BenchProblem("prefill", "small", 6, 2, 64, 4)
    full = dataclasses.replace(causal, causal=False)
    assert causal.num_operations == 4 * 6 * 64 * (1 + 2 + 3 + 4)
    assert full.num_operations == 4 * 6 * 64 * 16
    assert causal.num_bytes == 2 * 64 * 4 * (2 * 2 + 2 * 6)
    assert causal.name != full.name


def test_small_problems_get_more_input_sets() -> None:
    small, large = (BenchProblem("decode", "small", 24, 8, 128, length) for length in (512, 131072))
    assert num_sets(small, "discrete") == 60
    assert num_sets(large, "discrete") == 1
    assert 1 < num_sets(small, "cpu") <= 4

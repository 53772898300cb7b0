"""The plans behind `vkattn.attention`: chunks, replay in any order, few of them, and nothing of an earlier call."""

from __future__ import annotations

import numpy as np
import pytest

import vkattn
from tests.attention_cases import arrays, check
from tests.tolerance import assert_matches_oracle
from vkattn.lru import MAX_PLANS
from vkattn.ops.plan import MIN_WORDS, bucket, live_words
from vkattn.runtime.device import Device
from vkattn.validate import attention_call


def test_stale_scratch_has_no_effect(device: Device, rng: np.random.Generator) -> None:
    """A larger call full of NaN leaves its scores in the scratch that the next, smaller call gets."""
    inputs = arrays(rng, 1, (4, 2), 33, 65, 16)
    with Device(device.info.index) as own:
        clean = vkattn.attention(*inputs, causal="bottom_right", device=own)
        dirty = [np.full_like(array, np.nan) for array in arrays(rng, 1, (4, 2), 36, 70, 16)]
        vkattn.attention(*dirty, device=own)
        assert len(own.plans) == 1
        np.testing.assert_array_equal(vkattn.attention(*inputs, causal="bottom_right", device=own), clean)


def test_small_score_budget_gives_the_same_bits_in_chunks(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 2, (6, 2), 300, 200, 24)
    whole = check(device, inputs, causal="bottom_right", algorithm="three_pass")
    with Device(device.info.index, score_budget_bytes=70000) as own:
        chunked = check(own, inputs, causal="bottom_right", algorithm="three_pass")
        (plan,) = own.plans.values()
        assert plan.key.chunks >= 64
        assert plan.recording.num_pipelines == 3 + (0 if own.info.is_unified else 5)
        assert plan.scratch["scores"].size_bytes <= 70000
        assert plan.recording.num_dispatches == 3 * plan.key.chunks + (0 if own.info.is_unified else 5)
    np.testing.assert_array_equal(chunked, whole)


@pytest.mark.slow
def test_a_matrix_far_beyond_the_budget(device: Device, rng: np.random.Generator) -> None:
    """16 heads, L = S = 4096, D 64: 1 GiB of scores in a buffer of 64 MiB. Rows are sampled for the oracle."""
    heads, length, budget = 16, 4096, 64 << 20
    if "SwiftShader" in device.info.name:  # ten times slower
        heads, length, budget = 2, 1300, 4 << 20
    inputs = arrays(rng, 1, (heads, heads), length, length, 64, size=1.0)
    with Device(device.info.index, score_budget_bytes=budget) as own:
        out, lse = vkattn.attention(*inputs, causal="top_left", return_lse=True, algorithm="three_pass", device=own)
        (plan,) = own.plans.values()
        assert plan.scratch["scores"].size_bytes <= budget
        assert plan.recording.num_pipelines == 3 + (0 if own.info.is_unified else 5)
        assert plan.key.chunks >= (4 if "SwiftShader" in device.info.name else 8)
    rows = np.unique(np.concatenate([[0, 31, 32, 33, length - 1], rng.integers(0, length, 40)]))
    for row in rows.tolist():
        one = [inputs[0][:, :, row : row + 1], inputs[1], inputs[2]]
        assert_matches_oracle(out[:, :, row : row + 1], *one, lse=lse[:, :, row : row + 1], causal="top_left",
                              q_offset=row)


def test_replay_long_short_long(device: Device, rng: np.random.Generator) -> None:
    long_inputs, short = arrays(rng, 1, (4, 2), 20, 100, 16), arrays(rng, 1, (4, 2), 2, 5, 16)
    with Device(device.info.index) as own:
        first = check(own, long_inputs, causal="bottom_right")
        check(own, short, causal="bottom_right")
        np.testing.assert_array_equal(check(own, long_inputs, causal="bottom_right"), first)
        assert len(own.plans) == 1


def test_the_same_call_gives_the_same_bits(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 2, (8, 2), 70, 260, 40)
    first = vkattn.attention(*inputs, device=device)
    for _ in range(25):
        np.testing.assert_array_equal(vkattn.attention(*inputs, device=device), first)


def test_many_lengths_keep_few_plans(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 1, (2, 1), 1, 300, 16)
    with Device(device.info.index) as own:
        for length in range(1, 301):
            check(own, [query, key[:, :, :length], value[:, :, :length]], causal="bottom_right")
        assert len(own.plans) <= 2


def test_plans_are_bounded_in_number_and_bytes(device: Device, rng: np.random.Generator) -> None:
    with Device(device.info.index) as own:
        plans = own.plans
        for length in [2 ** (i // 4) * 1000 + i for i in range(24)]:
            x = rng.standard_normal((1, 1, 1 + length % 3, 4)).astype(np.float32)
            key = rng.standard_normal((1, 1, length, 4)).astype(np.float32)
            vkattn.attention(x, key, key, device=own, return_lse=bool(length % 2),
                             mask=None if length % 5 else np.ones((1, length), bool))
            assert len(plans) <= MAX_PLANS
        assert own.allocated_bytes >= plans.nbytes
        plans.max_bytes = 1  # each new plan now drives out all others
        vkattn.attention(x[:, :, :1], np.zeros((1, 1, 300000, 4), np.float32), np.zeros((1, 1, 300000, 4), np.float32),
                         device=own)
        assert len(plans) == 1
        plans.clear()
        assert own.allocation_count <= 2, "only the boundary tensor and its staging may stay"


def test_unused_capacity_is_neither_written_nor_read(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 1, (2, 1), 3, 40, 17)
    with Device(device.info.index) as own:
        clean = vkattn.attention(*inputs, device=own)
        (plan,) = own.plans.values()
        words = live_words(attention_call(*inputs))
        for name in ("query", "key", "value", "out"):
            plan._host[name].words[words[name] :] = 0x7FC00001  # NaN
        np.testing.assert_array_equal(vkattn.attention(*inputs, device=own), clean)
        for name in ("query", "key", "value", "out"):
            assert (plan._host[name].words[words[name] :] == 0x7FC00001).all(), name


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, MIN_WORDS, MIN_WORDS + 1, 3 * MIN_WORDS)] == [
        MIN_WORDS, MIN_WORDS, MIN_WORDS, 2 * MIN_WORDS, 4 * MIN_WORDS]

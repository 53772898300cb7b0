"""`vkattn.attention` against the oracle: the grid of shapes, extreme scores, poison, chunks, replay in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.tolerance import assert_matches_oracle
from vkattn.dispatch import ALGORITHMS, MATRIX_ALGORITHMS
from vkattn.lru import MAX_PLANS
from vkattn.ops.plan import MIN_WORDS, bucket, live_words
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

#: Those on matrix units take half precision only: tests/gpu/kernels/test_attn_coopmat.py.
ANY_DTYPE = [name for name in ALGORITHMS if name not in MATRIX_ALGORITHMS]
HEADS = [(9, 3), (14, 2), (8, 1)]
Q_LENS = (1, 3, 33, 513)
KV_LENS = (1, 31, 65, 1000)


def arrays(rng: np.random.Generator, batch: int, heads: tuple[int, int], q_len: int, kv_len: int, head_dim: int,
           value_dim: int | None = None, dtype: Any = np.float32, size: float = 2.0) -> list[np.ndarray]:
    """Return query, key and value, signed, with scores up to tens."""
    shapes = ((batch, heads[0], q_len, head_dim), (batch, heads[1], kv_len, head_dim),
              (batch, heads[1], kv_len, value_dim or head_dim))
    return [(size * rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


def check(device: Device, inputs: list[np.ndarray], **options: Any) -> np.ndarray:
    """Compute with lse, compare both with the oracle, return the output."""
    out, lse = vkattn.attention(*inputs, return_lse=True, device=device, **options)
    options.pop("algorithm", None)
    assert_matches_oracle(out, *inputs, lse=lse, **options)
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")
@pytest.mark.parametrize("head_dim", [1, 7, 17, 80, 129, 256])
def test_grid_of_shapes(roomy_device: Device, rng: np.random.Generator, head_dim: int, heads: tuple[int, int],
                        dtype: Any) -> None:
    for q_len in Q_LENS:
        for kv_len in KV_LENS:
            if "SwiftShader" in roomy_device.info.name and heads != (9, 3) and q_len * kv_len > 10000:
                continue  # the largest sizes there with one head ratio only: ten times slower than lavapipe
            causal = (None, "top_left", "bottom_right")[(q_len + kv_len) % 3]
            check(roomy_device, arrays(rng, 1, heads, q_len, kv_len, head_dim, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 10), (64, 128), (5, 1), (1, 65), (130, 3)])
def test_value_dim_may_differ(device: Device, rng: np.random.Generator, head_dim: int, value_dim: int,
                              dtype: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    check(device, arrays(rng, 2, (4, 2), 6, 37, head_dim, value_dim, kind, size=1.0))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_float32_query_goes_with_any_keys(device: Device, rng: np.random.Generator, kind: str) -> None:
    import ml_dtypes

    query, key, value = arrays(rng, 1, (6, 2), 5, 70, 33)
    half = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16
    check(device, [query, key.astype(half), value.astype(half)], causal="bottom_right")


def test_group_heads_are_consecutive(device: Device) -> None:
    query = np.ones((1, 4, 1, 8), np.float32)
    key = np.ones((1, 2, 3, 8), np.float32)
    value = np.broadcast_to(np.arange(2, dtype=np.float32)[None, :, None, None], (1, 2, 3, 8))
    assert vkattn.attention(query, key, value, device=device)[0, :, 0, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("heads"), [(40, 8), (24, 4), (28, 4), (64, 4), (20, 1), (70, 70)])
def test_any_group_size(device: Device, rng: np.random.Generator, heads: tuple[int, int]) -> None:
    check(device, arrays(rng, 1, heads, 3, 40, 12), causal="bottom_right")


@pytest.mark.parametrize("score", [150.0, -200.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scores_far_from_zero(device: Device, rng: np.random.Generator, score: float, dtype: Any) -> None:
    query, key, value = arrays(rng, 1, (2, 1), 4, 70, 128, dtype=dtype, size=0.1)
    size = np.sqrt(abs(score) * np.sqrt(128) / 128)
    query[...] = size + query
    key[...] = np.sign(score) * size + key
    check(device, [query, key, value])


def test_half_dot_products_beyond_the_range_of_half(device: Device, rng: np.random.Generator) -> None:
    query = np.full((1, 1, 3, 64), 40, np.float16)  # a dot product of 102400
    value = rng.standard_normal((1, 1, 50, 64)).astype(np.float16)
    out = check(device, [query, np.full((1, 1, 50, 64), 40, np.float16), value])
    np.testing.assert_allclose(out[0, 0, 0].astype(np.float64), value[0, 0].astype(np.float64).mean(axis=0), atol=1e-3)


def test_half_results_are_rounded_to_nearest_even_and_overflow_to_infinity(device: Device) -> None:
    exact = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 6e-8, 3e-8, 2.98e-8, -1e-5, 0, -0.0, 1e9,
                      2**-14 - 2**-26], np.float32)
    query, key = np.ones((1, 1, 1, 4), np.float16), np.ones((1, 1, 1, 4), np.float16)
    parts = exact.astype(np.float64)
    with np.errstate(over="ignore"):
        high = parts.astype(np.float16)
    one = vkattn.attention(query, key, np.where(np.isfinite(high), high, 0)[None, None, None], device=device)
    np.testing.assert_array_equal(one[0, 0, 0], np.where(np.isfinite(high), high, 0))
    # Two keys of equal weight: the mean of two halves, which half cannot hold exactly.
    pair = np.array([[1, 2**-24, 3 * 2**-24, 2048, 2050, -65504, 2**-14], [1 + 2**-10, 0, 0, 2049, 2052, -65504, 0]],
                    np.float16)
    key = np.ones((1, 1, 2, 4), np.float16)
    out = vkattn.attention(query, key, pair[None, None], device=device)
    mean = pair.astype(np.float64).mean(axis=0)
    np.testing.assert_array_equal(out[0, 0, 0], mean.astype(np.float16))


def test_equal_weights_over_many_keys_sum_to_one(device: Device) -> None:
    keys = 70000
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.ones((1, 1, keys, 4), np.float32)
    out, lse = vkattn.attention(query, key, np.ones((1, 1, keys, 1), np.float32), device=device, return_lse=True)
    np.testing.assert_allclose(out, 1, rtol=2e-6)
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6)


def test_nothing_to_attend_gives_zero(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 2, (4, 2), 5, 3, 16)
    out = check(device, [query, key, value], causal="bottom_right")  # rows 0 and 1 are before the first key
    assert (out[:, :, :2] == 0).all()
    out = check(device, [query, key, value], kv_len=[0, 2])
    assert (out[0] == 0).all()
    out, lse = vkattn.attention(query, key[:, :, :0], value[:, :, :0], return_lse=True, device=device)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    assert out.dtype == lse.dtype == np.float32
    sinks = np.array([1, -2, 0.5, 3], np.float32)
    out, lse = vkattn.attention(query, key, value, kv_len=0, sinks=sinks, return_lse=True, device=device)
    assert (out == 0).all()
    assert (lse == sinks[None, :, None]).all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_empty_outputs(device: Device, shape: tuple[int, ...]) -> None:
    query = np.zeros(shape, np.float16)
    key = np.zeros((shape[0], max(shape[1], 1), 5, 8), np.float16)
    out, lse = vkattn.attention(query, key, key, return_lse=True, device=device)
    assert out.shape == shape
    assert lse.shape == shape[:3]
    assert out.dtype == np.float16


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_must_not_be_read_has_no_effect(device: Device, rng: np.random.Generator, poison: float,
                                             dtype: Any) -> None:
    query, key, value = arrays(rng, 2, (6, 2), 40, 150, 20, 24, dtype)
    kv_len = np.array([70, 129])
    mask = rng.random((2, 1, 40, 150)) < 0.7
    mask[:, :, :, 40:48] = False  # masked in the middle, for all rows
    mask[1, :, 7] = False  # a row with nothing
    options = {"mask": mask, "kv_len": kv_len, "causal": "bottom_right"}
    clean = check(device, [query, key, value], **options)
    bad_key, bad_value = key.copy(), value.copy()
    for batch, live in enumerate(kv_len):
        for array in (bad_key, bad_value):
            array[batch, :, live:] = poison
            array[batch, :, 40:48] = poison
    np.testing.assert_array_equal(check(device, [query, bad_key, bad_value], **options), clean)
    additive = np.where(mask, 0, -np.inf).astype(np.float32)
    np.testing.assert_array_equal(check(device, [query, bad_key, bad_value], **(options | {"mask": additive})), clean)


def test_poison_that_only_the_causal_mask_hides(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 1, (2, 2), 100, 100, 8)
    clean = check(device, [query, key, value], causal="top_left")
    key[:, :, 50:], value[:, :, 50:] = np.nan, np.nan
    out = vkattn.attention(query, key, value, causal="top_left", device=device)
    np.testing.assert_array_equal(out[:, :, :50], clean[:, :, :50])
    assert np.isnan(out[:, :, 50:]).all()


def test_infinite_values_that_are_attended_stay_infinite(device: Device) -> None:
    query, key = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 100, 4), np.float32)
    value = np.zeros((1, 1, 100, 4), np.float32)
    value[0, 0, 3, 1], value[0, 0, 60, 2] = np.inf, -np.inf
    out = vkattn.attention(query, key, value, device=device)
    assert out[0, 0, 0].tolist() == [0, np.inf, -np.inf, 0]


def test_stale_scratch_has_no_effect(device: Device, rng: np.random.Generator) -> None:
    """A large call full of NaN leaves its scores in the scratch that the next, smaller call gets."""
    inputs = arrays(rng, 1, (4, 2), 33, 65, 16)
    with Device(device.info.index) as own:
        clean = vkattn.attention(*inputs, causal="bottom_right", device=own)
        dirty = [np.full_like(array, np.nan) for array in arrays(rng, 1, (4, 2), 64, 128, 16)]
        vkattn.attention(*dirty, device=own)
        assert len(own.plans) == 1
        np.testing.assert_array_equal(vkattn.attention(*inputs, causal="bottom_right", device=own), clean)


MASKS = ["bool", "float32", "float16"]
MASK_SHAPES = [(), (1,), (70,), (5, 1), (5, 70), (4, 1, 70), (2, 1, 5, 70), (2, 4, 1, 1), (1, 4, 5, 70), (2, 4, 5, 70)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_broadcast(device: Device, rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> None:
    inputs = arrays(rng, 2, (4, 2), 5, 70, 9, dtype=np.float16 if kind == "float16" else np.float32)
    if kind == "bool":
        mask: np.ndarray = np.asarray(rng.random(shape) < 0.6)
    else:
        mask = np.asarray(np.where(rng.random(shape) < 0.3, -np.inf, 3 * rng.standard_normal(shape))).astype(kind)
    check(device, inputs, mask=mask)
    check(device, inputs, mask=mask, causal="bottom_right", kv_len=[70, 33])


def test_a_mask_may_close_whole_tiles_and_rows(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 1, (2, 1), 70, 300, 16)
    mask = np.ones((70, 300), bool)
    mask[:, 64:200] = False
    mask[20:40] = False
    mask[:, 0:3] = False
    out = check(device, inputs, mask=mask)
    assert (out[:, :, 20:40] == 0).all()
    check(device, inputs, mask=mask[..., ::-1])
    check(device, inputs, mask=np.zeros((1, 1), bool))


def test_the_lowest_finite_mask_is_not_minus_infinity(device: Device, rng: np.random.Generator) -> None:
    """Rows masked with finfo.min everywhere attend all keys alike, as the formula says."""
    query, key, value = arrays(rng, 1, (1, 1), 3, 9, 8, size=0.1)
    mask = np.full((3, 9), np.finfo(np.float32).min, np.float32)
    mask[0, 4] = 0
    out = vkattn.attention(query, key, value, mask=mask, device=device)
    np.testing.assert_allclose(out[0, 0, 0], value[0, 0, 4], rtol=1e-6)
    np.testing.assert_allclose(out[0, 0, 1], value[0, 0].mean(axis=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("window", [(0, 0), (3, None), (None, 2), (5, 7), (0, None), (10**9, 10**9), (64, 1)])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_windows(device: Device, rng: np.random.Generator, window: Any, causal: str | None) -> None:
    check(device, arrays(rng, 2, (4, 2), 45, 140, 8), window=window, causal=causal, q_offset=[50, 0])
    check(device, arrays(rng, 1, (2, 2), 33, 33, 8), window=window, causal=causal)


def test_offsets_and_lengths_per_batch(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 4, (4, 2), 7, 90, 8)
    check(device, inputs, causal="bottom_right", kv_len=[90, 7, 3, 0])
    check(device, inputs, causal="top_left", q_offset=[-3, 0, 80, 500], kv_len=[90, 1, 64, 65])
    check(device, inputs, causal="top_left", q_offset=-(2**29))


@pytest.mark.parametrize("options", [
    {"softcap": 5.0}, {"softcap": 0.01, "scale": 3.0}, {"scale": -0.7}, {"scale": 0.0},
    {"sinks": np.array([0.5, -3, 20, 1], np.float32)},
    {"alibi_slopes": np.array([0.5, 0.25, -0.1, 0], np.float32), "q_offset": 11},
    {"softcap": 8.0, "sinks": np.array([1, 2, -1, 0.0]), "alibi_slopes": np.array([0.5, 0.1, 1, 2]),
     "window": (30, 4), "causal": "bottom_right", "kv_len": [66, 12]},
], ids=lambda options: "-".join(options))
def test_score_options(device: Device, rng: np.random.Generator, options: dict[str, Any]) -> None:
    check(device, arrays(rng, 2, (4, 2), 12, 66, 24), **options)


def test_softcap_comes_before_the_mask(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 1, (1, 1), 2, 8, 8)
    value[0, 0, 5] = 1e6
    mask = np.zeros(8, np.float32)
    mask[5] = -np.inf
    assert np.abs(check(device, [query, key, value], softcap=0.5, mask=mask)).max() < 100


def test_bshd_equals_bhsd(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 2, (6, 3), 10, 50, 20, 12, np.float16)
    swapped = [array.transpose(0, 2, 1, 3) for array in inputs]
    out = check(device, swapped, layout="bshd", causal="bottom_right")
    same = vkattn.attention(*inputs, causal="bottom_right", device=device)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), same)
    contiguous = [np.ascontiguousarray(array) for array in swapped]
    np.testing.assert_array_equal(check(device, contiguous, layout="bshd", causal="bottom_right"), out)


def test_strided_inputs(device: Device, rng: np.random.Generator) -> None:
    query, key, value = arrays(rng, 3, (2, 2), 64, 64, 24)
    views = [query[:, ::-1], key[:, :, ::2], value.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)[:, :, 1::2]]
    check(device, views)
    for view in views:
        view.setflags(write=False)
    check(device, views)


def test_outputs_are_fresh(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 1, (2, 1), 4, 9, 8)
    first, first_lse = vkattn.attention(*inputs, return_lse=True, device=device)
    kept, kept_lse = first.copy(), first_lse.copy()
    vkattn.attention(*(2 * array for array in inputs), return_lse=True, device=device)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(first_lse, kept_lse)
    assert first.flags.owndata
    assert first.flags.writeable


def test_small_score_budget_gives_the_same_bits_in_chunks(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 2, (6, 2), 300, 200, 24)
    whole = check(device, inputs, causal="bottom_right", algorithm="three_pass")
    with Device(device.info.index, score_budget_bytes=70000) as own:
        chunked = check(own, inputs, causal="bottom_right", algorithm="three_pass")
        (plan,) = own.plans.values()
        assert plan.key.chunks >= 64
        assert plan.recording.num_pipelines == 3 + (0 if own.info.is_unified else 4)
        assert plan.scratch["scores"].size_bytes <= 70000
        assert plan.recording.num_dispatches == 3 * plan.key.chunks + (0 if own.info.is_unified else 4)
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
        assert plan.recording.num_pipelines == 3 + (0 if own.info.is_unified else 4)
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


@pytest.mark.parametrize("algorithm", ANY_DTYPE)
def test_every_algorithm_by_name(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    for batch, heads, q_len, kv_len, head_dim, value_dim in (
            (1, (2, 1), 3, 4, 8, 8), (2, (6, 2), 5, 700, 33, 65), (1, (8, 1), 8, 257, 128, 128),
            (2, (16, 1), 1, 100, 256, 17), (1, (3, 3), 64, 64, 20, 9)):
        inputs = arrays(rng, batch, heads, q_len, kv_len, head_dim, value_dim)
        mask = rng.random((q_len, kv_len)) < 0.7
        options = {"causal": "bottom_right", "mask": mask, "kv_len": kv_len - 1, "sinks": np.arange(heads[0]) * 0.5}
        check(device, inputs, algorithm=algorithm, **options)
        check(device, inputs, algorithm=algorithm)


def test_an_unknown_algorithm_is_refused_with_the_choices(device: Device, rng: np.random.Generator) -> None:
    with pytest.raises(vkattn.errors.OptionError, match=r"`algorithm` is 'flash'; supported: 'auto', 'split', "):
        vkattn.attention(*arrays(rng, 1, (2, 1), 3, 4, 8), algorithm="flash", device=device)


def test_an_algorithm_that_cannot_is_refused_with_its_reasons(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 1, (2, 1), 33, 4, 300)
    with pytest.raises(vkattn.errors.NoKernelError, match=r"(?s)split: q_len 33 x group_size 2 is 66 .*head_dim 300"):
        vkattn.attention(*inputs, algorithm="split", device=device)
    check(device, inputs)


@pytest.mark.once
def test_many_heads_and_batches(device: Device, rng: np.random.Generator) -> None:
    """More (batch, head) pairs than a dimension of a dispatch has workgroups."""
    check(device, arrays(rng, 70000, (1, 1), 1, 2, 4))


@pytest.mark.parametrize("algorithm", [*ANY_DTYPE, "auto"])
def test_many_items_by_each_algorithm(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    """Llvmpipe ends an invocation's loops after 65535 rounds in all, without an error: work is cut before that."""
    inputs = arrays(rng, 4000 if "SwiftShader" in device.info.name else 20000, (1, 1), 1, 3, 4)
    if algorithm == "split" and "llvmpipe" in device.info.name:
        with pytest.raises(vkattn.errors.NoKernelError, match="65535 loop iterations"):
            vkattn.attention(*inputs, algorithm="split", device=device)
    else:
        check(device, inputs, algorithm=algorithm)


@pytest.mark.parametrize("kv_len", [30000, 100000])
def test_many_keys_for_many_rows_are_right_or_refused(device: Device, rng: np.random.Generator, kv_len: int) -> None:
    inputs = arrays(rng, 1, (1, 1), 65, kv_len, 4)
    if kv_len == 100000 and "llvmpipe" in device.info.name:
        with pytest.raises(vkattn.errors.NoKernelError, match=r"kv_len 100000 takes .* llvmpipe ends loops"):
            vkattn.attention(*inputs, device=device)
    else:
        check(device, inputs)
    check(device, [inputs[0][:, :, :2], *inputs[1:]])  # few rows: the keys are split

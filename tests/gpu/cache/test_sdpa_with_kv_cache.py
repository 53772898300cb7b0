"""`vkattn.sdpa_with_kv_cache` against the oracle: every option, positions per batch, layers, groups of buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.caches import Session, assert_holds, small_buffers
from vkattn import KVCache
from vkattn.errors import CapacityError, NoKernelError, OptionError
from vkattn.kernels import fused
from vkattn.lru import MAX_PLANS
from vkattn.runtime.device import Device

#: Query rows that one plan for up to 32 of them gives to two kernels: with groups of 3 query heads, the split kernels
#: serve up to 21 rows.
LONG, SHORT = 23, 17


def session(device: Device, rng: np.random.Generator, *, heads: tuple[int, int] = (6, 2), batch: int = 2,
            capacity: int = 40, head_dim: int = 16, **more: Any) -> Session:
    """Return a session over a new cache, float32 unless told otherwise."""
    cache = KVCache(batch, heads[1], capacity, head_dim, **({"dtype": "float32", "device": device} | more))
    return Session(cache, heads[0], rng)


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "bshd"), ("float16", "bhsd"), ("bfloat16", "bshd")])
def test_prefill_and_decode(device: Device, rng: np.random.Generator, dtype: str, layout: str) -> None:
    made = session(device, rng, value_dim=24, dtype=dtype, capacity=23)
    start = 0
    for tokens in (5, 1, 1, 7, 1, 8):  # the last one fills the cache
        made.step(made.arrays(tokens, dtype), start, layout=layout)
        start += tokens
    assert_holds(made.cache, made.model)


@pytest.mark.parametrize(("dtype", "query_dtype", "new_dtype"), [
    ("float16", "float32", "float32"), ("float16", "", "float32"), ("bfloat16", "float32", "")])
def test_float32_beside_a_half_cache(device: Device, rng: np.random.Generator, dtype: str, query_dtype: str,
                                     new_dtype: str) -> None:
    made = session(device, rng, dtype=dtype, head_dim=9, value_dim=5)
    for start, tokens in ((0, 4), (4, 3)):
        made.step(made.arrays(tokens, query_dtype or dtype, new_dtype or dtype), start)
    assert_holds(made.cache, made.model)


@pytest.mark.parametrize(("head_dim", "value_dim", "dtype"), [
    (1, 1, "float32"), (5, 17, "float16"), (129, 3, "float16"), (80, 96, "float32")])
def test_odd_sizes(device: Device, rng: np.random.Generator, head_dim: int, value_dim: int, dtype: str) -> None:
    made = session(device, rng, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    for start, tokens in ((0, LONG), (LONG, SHORT), (3, LONG)):
        made.step(made.arrays(tokens, dtype), start)


def test_each_batch_entry_has_its_own_position(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng, batch=3)
    for start, tokens in ((0, 9), ([9, 4, 0], 12), ([3, 16, 2], 1), ([4, 0, 1], 1), ([5, 1, 2], 10)):
        made.step(made.arrays(tokens), start)
    assert_holds(made.cache, made.model)


#: A size of 0 stands for as many rows as there are queries.
MASKS: list[tuple[str, tuple[int, ...]]] = [
    ("bool", (40,)), ("bool", (2, 1, 0, 40)), ("bool", (6, 1, 1)), ("float32", (0, 1)), ("float32", (6, 0, 40)),
    ("float16", (0, 40)),
]


@pytest.mark.parametrize(("kind", "shape"), MASKS, ids=str)
def test_masks(device: Device, rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> None:
    """Columns beyond the longest live length are not read: NaN there has no effect."""
    causal = None if len(shape) % 2 else "bottom_right"
    dtype = "float16" if kind == "float16" else "float32"
    made = session(device, rng, dtype=dtype)
    for start, tokens in ((0, LONG), (LONG, SHORT), ([15, 3], LONG)):
        sizes = tuple(size or tokens for size in shape)
        longest = int(np.max(start)) + tokens
        if kind == "bool":
            mask = np.asarray(rng.random(sizes) < 0.6)
        else:
            mask = np.asarray(np.where(rng.random(sizes) < 0.3, -np.inf, 2 * rng.standard_normal(sizes))).astype(kind)
            if shape and shape[-1] == 40:
                mask[..., longest:] = np.nan
        made.step(made.arrays(tokens, dtype), start, mask=mask, causal=causal)
        if shape and shape[-1] == 40:
            made.step(made.arrays(tokens, dtype), start, mask=mask[..., :longest], causal=causal)


def test_a_mask_of_one_row_serves_decode(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng)
    for start in range(12):
        made.step(made.arrays(1), start, mask=rng.random((1, start + 1)) < 0.7, causal=None)


OPTIONS: dict[str, dict[str, Any]] = {
    "no causal": {"causal": None},
    "window": {"window": (3, None), "scale": -0.5},
    "window both ways": {"window": (2, 2), "causal": None, "softcap": 2.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 1.0, 0.0, 2.0], "causal": None,
              "sinks": [0.5, -1.0, 3.0, 0.0, 1.0, -20.0]},
    "all": {"window": (9, None), "softcap": 7.0, "sinks": np.arange(6.0), "alibi_slopes": np.full(6, 0.1),
            "scale": 0.2, "mask": np.arange(40) % 5 != 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(device: Device, rng: np.random.Generator, options: dict[str, Any]) -> None:
    made = session(device, rng)
    for start, tokens in ((0, LONG), (LONG, SHORT), ([17, 6], LONG), ([20, 9], SHORT)):
        made.step(made.arrays(tokens), start, **options)


def test_layers_share_one_plan(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng, num_layers=4, dtype="float16")
    for start, tokens in ((0, 3), (3, 4), (7, 4)):
        for layer in (2, 0, 3, 1):
            made.step(made.arrays(tokens, "float16"), start, layer)
    assert len(made.cache.plans) == 1
    assert_holds(made.cache, made.model)


def test_layers_in_several_groups_of_buffers(device: Device, rng: np.random.Generator) -> None:
    with small_buffers(device, 25000) as own:
        made = session(own, rng, num_layers=3)  # a layer's keys take 10240 bytes
        assert len(made.cache.storage.groups) == 2
        for start, tokens in ((0, 3), (3, 4)):
            for layer in (2, 0, 1):
                made.step(made.arrays(tokens), start, layer)
        assert_holds(made.cache, made.model)


def test_a_layer_object_is_a_cache_too(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng, num_layers=2)
    query, key, value = made.arrays(4)
    made.cache.layer(1).update(key, value, 0)
    out = vkattn.sdpa_with_kv_cache(query, key, value, made.cache.layer(1), 0)
    made.model.update(key, value, 0, 1)
    made.compare(out, None, query, 0, 1)
    assert made.cache.lengths.tolist() == [[0, 0], [4, 4]]


def test_appends_reorders_and_truncations_in_between(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng, num_layers=2)
    for layer in range(2):
        made.step(made.arrays(6), 0, layer)
    made.cache.reorder([1, 1])
    made.model.reorder([1, 1])
    made.step(made.arrays(5), 6, 1)
    made.cache.truncate([5, 7])
    made.model.lengths = np.minimum(made.model.lengths, [5, 7])
    _, key, value = made.arrays(1)
    made.cache.update(key, value, [5, 6], 0)
    made.model.update(key, value, [5, 6], 0)
    made.step(made.arrays(7), [6, 7], 0)
    assert_holds(made.cache, made.model)


def test_the_same_bits_with_clean_and_poisoned_memory(device: Device, rng: np.random.Generator) -> None:
    """NaN in the dead rows of the cache and in the plan's scratch has no effect: long -> short -> long."""
    made = session(device, rng, dtype="float16")
    steps = [(made.arrays(tokens, "float16"), start) for start, tokens in ((0, 30), (30, 1), (3, 17), (7, 32), (0, 1))]
    made.assert_memory_has_no_effect(steps)


def test_300_lengths_keep_few_plans(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng, batch=1, heads=(2, 1), capacity=300)
    for start in range(300):
        made.step(made.arrays(1), start)
    assert len(made.cache.plans) == 1


def test_the_plans_of_a_cache_are_bounded(device: Device, rng: np.random.Generator) -> None:
    with Device(device.info.index) as own:
        made = session(own, rng, batch=1, heads=(2, 1), dtype="float16")
        plans = made.cache.plans
        assert plans.max_plans == MAX_PLANS == 16
        assert 0 < plans.max_bytes <= own.info.device_local_bytes
        plans.max_plans = 2
        for tokens, options in ((1, {}), (2, {}), (1, {"softcap": 3.0}), (1, {})):
            made.step(made.arrays(tokens, "float16"), 0, **options)
            assert len(plans) <= 2
        plans.max_bytes = 1  # each new plan now drives out all others
        made.step(made.arrays(3, "float16"), 0)
        assert len(plans) == 1
        made.cache.update(*made.arrays(3, "float16")[1:], 0)
        assert len(plans) == 1
        made.cache.close()
        assert own.allocation_count <= 2  # the device's own boundary tensor and its staging


def test_a_dropped_cache_gives_its_memory_and_its_plans_back_at_once(device: Device, rng: np.random.Generator) -> None:
    with Device(device.info.index) as own:
        for _ in range(2):
            made = session(own, rng, dtype="float16")
            made.step(made.arrays(3), 0)
            made.cache.update(*made.arrays(1)[1:], 3)
            assert own.allocation_count > 10
            del made
            assert own.allocation_count <= 2


def test_two_caches_in_turn(device: Device, rng: np.random.Generator) -> None:
    """A plan belongs to its cache: another cache of the same sizes is not read in its place."""
    pair = [session(device, rng, batch=1, heads=(2, 2)) for _ in range(2)]
    for start in range(6):
        for made in pair if start % 2 else pair[::-1]:
            made.step(made.arrays(1), start)
    del pair[0], made
    pair[0].step(pair[0].arrays(1), 6)


@pytest.mark.parametrize("algorithm", ["split", "fused", "three_pass"])
def test_an_algorithm_can_be_named(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    made = session(device, rng, capacity=12)
    query, key, value = arrays = made.arrays(4)
    out, lse = vkattn.sdpa_with_kv_cache(*arrays, made.cache, 0, return_lse=True, algorithm=algorithm)
    made.model.update(key, value, 0)
    made.compare(out, lse, query, 0)
    (graph,) = made.cache.plans.values()
    kernels = {dispatch.variant.kernel for dispatch in graph._longest.dispatches} - {"kv_append", "copy"}
    family = {"split": "attn_split", "fused": "attn_fused", "three_pass": "attn_softmax"}[algorithm]
    assert any(kernel.startswith(family) for kernel in kernels)


def test_an_algorithm_that_does_not_fit_writes_nothing(device: Device, rng: np.random.Generator) -> None:
    made = session(device, rng, heads=(33, 1), capacity=12)
    with pytest.raises(NoKernelError, match="264 query rows to a KV head; at most 256"):
        vkattn.sdpa_with_kv_cache(*made.arrays(8), made.cache, 0, algorithm="split")
    with pytest.raises(OptionError, match="algorithm"):
        vkattn.sdpa_with_kv_cache(*made.arrays(1), made.cache, 0, algorithm="fast")
    assert made.cache.lengths.max() == 0


@pytest.mark.parametrize("tokens", [33, 36])
def test_split_takes_as_many_rows_as_by_a_call(device: Device, rng: np.random.Generator, tokens: int) -> None:
    """A plan is for up to a power of two of tokens: with groups of 7, 64 would be too many for `split`, 36 are not."""
    made = session(device, rng, heads=(7, 1), batch=1, capacity=70, head_dim=8)
    for start, count in ((0, tokens), (tokens, 34)):
        query, key, value = arrays = made.arrays(count)
        out = vkattn.sdpa_with_kv_cache(*arrays, made.cache, start, algorithm="split")
        made.model.update(key, value, start)
        made.compare(out, None, query, start)
    assert len(made.cache.plans) == 1
    with pytest.raises(NoKernelError, match="q_len 37 x group_size 7 is 259 query rows to a KV head; at most 256"):
        vkattn.sdpa_with_kv_cache(*made.arrays(37), made.cache, 0, algorithm="split")


def test_a_call_that_fits_is_not_refused_for_its_plan(device: Device, rng: np.random.Generator) -> None:
    """Up to 32 rows of a mask over all 1024 tokens need more than the largest buffer; 17 over 40 tokens do not."""
    with small_buffers(device, 1 << 16) as own:
        made = session(own, rng, heads=(2, 1), batch=1, capacity=1024, head_dim=4)
        for start, tokens in ((0, 23), (23, 17), (23, 17), (40, 1)):
            mask = np.where(rng.random((tokens, start + tokens)) < 0.5, rng.standard_normal(start + tokens), -np.inf)
            made.step(made.arrays(tokens), start, mask=mask.astype(np.float32))
        assert len(made.cache.plans) == 3
        mask = np.zeros((600, 640), np.float32)
        with pytest.raises(CapacityError, match=r"mask \(1, 1, q_len, mask_len\) float32 .*needs 1536000 bytes"):
            vkattn.sdpa_with_kv_cache(*made.arrays(600), made.cache, 40, mask=mask)
        assert made.cache.lengths.tolist() == [[41]]


def test_a_change_of_the_allowed_tiers_makes_another_plan(device: Device, rng: np.random.Generator,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(device, rng, batch=1, capacity=12)
    chosen = []
    for start, tiers in enumerate(("base", "base,subgroup", "base", "base,subgroup")):
        monkeypatch.setenv("VKATTN_TIERS", tiers)
        query, key, value = arrays = made.arrays(1)
        out, lse = vkattn.sdpa_with_kv_cache(*arrays, made.cache, start, return_lse=True, algorithm="fused")
        made.model.update(key, value, start)
        made.compare(out, lse, query, start)
        plan = made.cache.plans.values()[-1]  # the one that was used last
        chosen.append([dispatch.variant.name for dispatch in plan.recording.dispatches])
    assert not any("subgroup" in name for name in chosen[0])
    shares = device.info.tuned.fused_subgroups and device.info.subgroup_size >= fused.SUBGROUP_LANES
    assert any("subgroup" in name for name in chosen[1]) == shares
    assert chosen[2:] == chosen[:2]
    assert len(made.cache.plans) == 2

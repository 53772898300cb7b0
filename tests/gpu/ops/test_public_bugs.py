"""What went wrong in other attention kernels, as their public bug reports tell, with the numbers that showed it.

Each case goes through every algorithm that can compute it, and is compared with the oracle or with values worked out by
hand. The thread is in the docstring. Cases of the same kind that are elsewhere:

- GQA groups 5, 6, 7 and 20 wrong or refused; heads shared by ``h % kv_heads``: test_attention.py (any_group_size,
  group_heads_are_consecutive). Value size differs from head size (pytorch#176767): value_dim_may_differ.
- A mask of more than 2^31 elements (mlx#2894): unit/test_plan.py. 70000 heads (xpu-ops#5224):
  test_attention_algorithms.py (many_heads_and_batches).
- Dot products beyond float16 (llama.cpp#18606), 70000 equal weights: half_dot_products_beyond..., equal_weights_....
- Kernels that assume a subgroup size (ggml#1619), or need shuffles (llama.cpp#19881): the property tests and
  test_races.py force every kernel that the device can run. A tile loaded again too early (llama.cpp#26434):
  test_races.py. Barriers that not all invocations meet (llama.cpp#17297): scripts/validation.py.
- 257 different lengths in a row (aule-attention 0.5): cache/test_sdpa_with_kv_cache.py (300_lengths_keep_few_plans).
- Empty keys crash (aule-attention 0.5): test_attention.py (nothing_to_attend_gives_zero, empty_outputs).
- Quantised caches and pages (llama.cpp#26195 with q8_0, flashinfer#2896 with pages): the sizes of these reports are
  here, without either. Quantised caches have cache/test_sdpa_quantised.py; there are no pages yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.tolerance import Expected
from vkattn.dispatch import PRIORITY
from vkattn.errors import OptionError
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

Shape = tuple[int, int]


def arrays(rng: np.random.Generator, heads: Shape, lengths: Shape, dims: int | Shape, *, batch: int = 1,
           dtype: Any = np.float32) -> list[np.ndarray]:
    """Return query, key and value for (query, KV) heads, (query, key) lengths and (head, value) sizes, bhsd."""
    head_dim, value_dim = (dims, dims) if isinstance(dims, int) else dims
    shapes = ((batch, heads[0], lengths[0], head_dim), (batch, heads[1], lengths[1], head_dim),
              (batch, heads[1], lengths[1], value_dim))
    return [(2 * rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


def by_each(roomy_device: Device, inputs: list[np.ndarray], **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (out, lse) of every algorithm that can compute the call; each has been compared with the oracle."""
    expected, results = Expected(*inputs, **options), []
    problem = attention_call(*inputs, **options).problem
    for module in PRIORITY:
        if not module.not_supported_reasons(problem, roomy_device.info):
            results.append(vkattn.attention(*inputs, return_lse=True, algorithm=module.NAME, device=roomy_device,
                                            **options))
            expected.check(*results[-1])
    assert len(results) >= 2
    return results


def test_rows_without_keys_are_nan(roomy_device: Device, rng: np.random.Generator) -> None:
    """pytorch#103963, openvino#36016, rten#1321: a boolean mask that closes whole rows."""
    mask = np.ones((8, 8), bool)
    mask[4:] = False
    for out, lse in by_each(roomy_device, arrays(rng, (1, 1), (8, 8), 8), mask=mask):
        assert (out[0, 0, 4:] == 0).all()
        assert np.isneginf(lse[0, 0, 4:]).all()


@pytest.mark.parametrize("tile", [16, 32, 64, 256, 1024])
def test_a_closed_first_tile_makes_the_running_maximum_nan(roomy_device: Device, rng: np.random.Generator,
                                                           tile: int) -> None:
    """llama.cpp#12776: the maximum starts at -inf, and -inf less -inf is NaN in the second, open tile."""
    mask = np.arange(2 * tile) >= tile
    inputs = arrays(rng, (2, 1), (5, 2 * tile), 16)
    by_each(roomy_device, inputs, mask=mask)
    by_each(roomy_device, inputs, mask=np.where(mask, np.float32(0), np.float32(-np.inf)))


def test_closed_blocks_give_the_lowest_float(roomy_device: Device, rng: np.random.Generator) -> None:
    """llama.cpp#16380: head size 128, 16 query heads to a KV head, 512 keys, softcap 10, ALiBi 8, blocks of -inf."""
    bias = rng.standard_normal((1, 512), np.float32)
    bias[:, 128:256] = bias[:, 320:] = -np.inf
    slopes = 2.0 ** -np.arange(1, 17) * 8
    by_each(roomy_device, arrays(rng, (16, 1), (1, 512), 128), mask=bias, softcap=10.0, q_offset=511,
            alibi_slopes=slopes.astype(np.float32) / 64)


@pytest.mark.parametrize("stale", [np.nan, np.inf])
def test_values_in_unused_slots_leak(roomy_device: Device, rng: np.random.Generator, stale: float) -> None:
    """llama.cpp#26744, flash-attention#1745: 0 times NaN. 3 live keys in 8 slots, and a masked one between."""
    query, key, value = arrays(rng, (2, 2), (2, 8), 8)
    trimmed = [query, key[:, :, :3].copy(), value[:, :, :3].copy()]
    key[:, :, 3:] = value[:, :, 3:] = stale
    for (out, lse), (wanted, wanted_lse) in zip(by_each(roomy_device, [query, key, value], kv_len=3),
                                                by_each(roomy_device, trimmed), strict=True):
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse, wanted_lse)
    key[:, :, 1] = value[:, :, 1] = stale
    is_open = np.arange(8) != 1
    without = [query, *(np.delete(array, 1, axis=2)[:, :, :2] for array in trimmed[1:])]
    for (out, _), (wanted, _) in zip(by_each(roomy_device, [query, key, value], kv_len=3, mask=is_open),
                                     by_each(roomy_device, without), strict=True):
        np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("q_len", "kv_len", "seen"), [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2])])
def test_causal_with_different_lengths(roomy_device: Device, q_len: int, kv_len: int, seen: list[int]) -> None:
    """flash-attention#402, #1778: 2 queries over 5 keys see 11110 and 11111; of 5 over 2 keys the first 3 see none."""
    query = np.zeros((1, 1, q_len, 4), np.float32)
    value = np.eye(kv_len, dtype=np.float32)[None, None]
    for out, _ in by_each(roomy_device, [query, np.ones((1, 1, kv_len, 4), np.float32), value], causal="bottom_right"):
        wanted = [[1 / count if column < count else 0 for column in range(kv_len)] for count in seen]
        np.testing.assert_allclose(out[0, 0], wanted, rtol=1e-6)


def test_decode_in_a_static_buffer_goes_by_the_row_and_not_by_its_position(roomy_device: Device,
                                                                          rng: np.random.Generator) -> None:
    """onnx#8054: one query, 8 slots, live lengths 3 and 8: the row sees all live keys. Then more queries than keys."""
    inputs = arrays(rng, (2, 1), (1, 8), 8, batch=2)
    for entry, live in enumerate((3, 8)):
        for array in inputs[1:]:
            array[entry, :, live:] = np.nan
    for out, _ in by_each(roomy_device, inputs, causal="bottom_right", kv_len=[3, 8]):
        for entry, live in enumerate((3, 8)):
            alone = [inputs[0][entry : entry + 1], *(array[entry : entry + 1, :, :live] for array in inputs[1:])]
            Expected(*alone).check(out[entry : entry + 1])
    for out, _ in by_each(roomy_device, arrays(rng, (2, 1), (4, 8), 8, batch=2), causal="bottom_right", kv_len=[3, 8]):
        assert (out[0, :, 0] == 0).all()
        assert (out[1] != 0).any(axis=-1).all()


def test_a_softcap_after_the_mask_lets_closed_keys_through(roomy_device: Device, rng: np.random.Generator) -> None:
    """onnx#7865, onnxruntime#28379: softcap turns -inf into -0.5, and a value of 1e6 shows."""
    inputs = arrays(rng, (1, 1), (3, 9), 8)
    inputs[2][:, :, 5] = 1e6
    bias = np.zeros(9, np.float32)
    bias[5] = -np.inf
    for out, _ in by_each(roomy_device, inputs, mask=bias, softcap=0.5):
        assert np.abs(out).max() < 20


def test_a_window_that_is_off_by_one(roomy_device: Device, rng: np.random.Generator) -> None:
    """transformers#39408, vllm#3385: of 16 tokens and a window of 4, row 10 sees 7 to 10; 16 tokens are all of them."""
    query = np.zeros((1, 1, 16, 4), np.float32)
    value = np.eye(16, dtype=np.float32)[None, None]
    for out, _ in by_each(roomy_device, [query, query, value], causal="top_left", window=(3, None)):
        np.testing.assert_allclose(out[0, 0, 10], np.where((np.arange(16) >= 7) & (np.arange(16) <= 10), 0.25, 0))
    inputs = arrays(rng, (1, 1), (16, 16), 8)
    for (wide, _), (causal, _) in zip(by_each(roomy_device, inputs, causal="top_left", window=(15, None)),
                                      by_each(roomy_device, inputs, causal="top_left"), strict=True):
        np.testing.assert_array_equal(wide, causal)


def test_a_window_of_0_is_taken_for_no_window(roomy_device: Device, rng: np.random.Generator) -> None:
    """unsloth#8253: 0 to both sides is the row itself; less is refused."""
    inputs = arrays(rng, (1, 1), (40, 40), 8)
    for out, _ in by_each(roomy_device, inputs, window=(0, 0)):
        np.testing.assert_array_equal(out, inputs[2])
    with pytest.raises(OptionError, match="window"):
        vkattn.attention(*inputs, window=(-1, 0), device=roomy_device)


@pytest.mark.parametrize("heads", [(24, 4), (28, 4), (64, 4), (9, 3)], ids=str)
def test_groups_that_are_no_power_of_two(roomy_device: Device, rng: np.random.Generator, heads: Shape) -> None:
    """flashinfer#140, #996, #2684, #4316: groups of 6, 7, 16 and 3, one query each, by every algorithm."""
    by_each(roomy_device, arrays(rng, heads, (1, 37), 16, batch=2))


@pytest.mark.parametrize("which", ["all", "value"])
def test_strided_arrays_are_read_as_contiguous(roomy_device: Device, rng: np.random.Generator, which: str) -> None:
    """pytorch#181133, #163597, candle#3703: batch 84, 3 tokens, 3 heads, head size 64, axes 1 and 2 exchanged."""
    rows = [rng.standard_normal((84, 3, 3, 64), np.float32).transpose(0, 2, 1, 3) for _ in range(3)]
    if which == "value":
        rows[:2] = map(np.ascontiguousarray, rows[:2])
    assert not rows[2].flags.c_contiguous
    by_each(roomy_device, rows)


def test_every_other_key_and_keys_backwards(roomy_device: Device, rng: np.random.Generator) -> None:
    """ROCm#3230, pytorch#112577: steps of 2 and of -1 through the tokens."""
    query, key, value = arrays(rng, (2, 1), (3, 40), 24)
    by_each(roomy_device, [query, key[:, :, ::2], value[:, :, ::-2]])


def test_alibi_slopes_of_12_heads(roomy_device: Device, rng: np.random.Generator) -> None:
    """mlx#343, vllm#945: the published slopes where the heads are no power of two; each head must get its own."""
    slopes = np.array([2.0**-n for n in range(1, 9)] + [2.0 ** -(n / 2) for n in (1, 3, 5, 7)], np.float32)
    np.testing.assert_allclose(slopes[8:], [0.70711, 0.35355, 0.17678, 0.08839], rtol=1e-4)
    inputs = arrays(rng, (12, 12), (9, 9), 8)
    distance = np.abs(np.arange(9)[:, None] - np.arange(9)).astype(np.float32)
    as_mask = Expected(*inputs, mask=-slopes[:, None, None] * distance, causal="top_left")
    for out, lse in by_each(roomy_device, inputs, alibi_slopes=slopes, causal="top_left"):
        as_mask.check(out, lse)


@pytest.mark.parametrize("head_dim", [1, 7, 20, 40, 48, 72, 100, 120, 129, 256, 576])
def test_a_head_size_that_nobody_tried(roomy_device: Device, rng: np.random.Generator, head_dim: int) -> None:
    """lattice#1549, tt-metal#33434; aule-attention is wrong at 7, computeml at 129, both without an error."""
    by_each(roomy_device, arrays(rng, (2, 1), (3, 35), head_dim))


def test_a_head_size_of_256_with_groups(roomy_device: Device, rng: np.random.Generator) -> None:
    """llama.cpp#26195, without its quantised values: 16 query heads, 4 KV heads, float16."""
    by_each(roomy_device, arrays(rng, (16, 4), (2, 70), 256, dtype=np.float16))


def test_sequences_of_no_tokens(roomy_device: Device, rng: np.random.Generator) -> None:
    """flashinfer#2896: lengths 0, 5, 16 and 17, around a page of 16."""
    inputs = arrays(rng, (2, 1), (1, 20), 8, batch=4)
    for entry, live in enumerate((0, 5, 16, 17)):
        for array in inputs[1:]:
            array[entry, :, live:] = np.nan
    for out, lse in by_each(roomy_device, inputs, kv_len=[0, 5, 16, 17]):
        assert (out[0] == 0).all()
        assert np.isneginf(lse[0]).all()


def test_heads_beyond_the_first_chunk_are_not_written(roomy_device: Device, rng: np.random.Generator) -> None:
    """ncnn#6528: 33 keys and 5 queries with tiles of 32, and scores that are computed in chunks of few heads."""
    inputs = arrays(rng, (9, 3), (5, 33), 8, batch=3)
    expected = Expected(*inputs)
    with Device(roomy_device.info.index, score_budget_bytes=2 * 32 * 64 * 4) as own:
        out, lse = vkattn.attention(*inputs, return_lse=True, algorithm="three_pass", device=own)
        expected.check(out, lse)
        assert own.plans.values()[0].key.chunks >= 5
    by_each(roomy_device, inputs)


def test_a_scale_that_is_ignored(roomy_device: Device, rng: np.random.Generator) -> None:
    """aule-attention 0.5 gives the same result for every scale."""
    inputs = arrays(rng, (1, 1), (4, 9), 8)
    for (small, _), (negative, _) in zip(by_each(roomy_device, inputs, scale=0.01),
                                         by_each(roomy_device, inputs, scale=-0.7), strict=True):
        assert np.abs(small - negative).max() > 0.1

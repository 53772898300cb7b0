"""The options of `vkattn.attention` against the oracle: masks, windows, positions, lengths, scale, softcap, sinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import vkattn
from tests.attention_cases import arrays, check
from vkattn.runtime.device import Device

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

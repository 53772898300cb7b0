"""Pass 2 by itself: softmax in place against `oracle.softmax`, exactly the vec4s that a row sees, and lse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels.cases import CASES, REPEATED, Case
from tests.gpu.kernels.harness import (
    BASES,
    GUARD,
    Rig,
    Rigs,
    as_tiles,
    assert_the_same_bits,
    block,
    from_tiles,
    place_tiles,
    take_lse,
    take_tiles,
    variants_of,
)
from tests.tolerance import assert_close, assert_lse_close
from vkattn import oracle

WORDS = {"params": 1 << 10, "scores": (1 << 17) + (1 << 12), "lse": 1 << 12}


@pytest.fixture(params=variants_of("attn_softmax"), ids=lambda variant: variant.name)
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Rig:
    return rigs.of(request.param)


def draw_scores(case: Case, rng: np.random.Generator, size: float = 5.0) -> np.ndarray:
    """Return scores ``[batch, heads, q_len, num_keys]``: -inf where masked, NaN where a row does not see the key."""
    shape = (case.batch_size, case.num_heads, case.q_len, case.num_keys)
    scores = size * rng.standard_normal(shape, np.float32)
    if case.mask is not None:
        scores[rng.random(shape) < 0.4] = -np.inf
        scores[:, :, case.q_len // 2] = -np.inf
        scores[..., 64:70] = -np.inf
    return np.where(case.visible(), scores, np.float32(np.nan))


def vec4s_with_a_key(case: Case, tiled_visible: np.ndarray) -> np.ndarray:
    """Return which elements lie in a vec4 with a key that the row sees; shapes as those of `as_tiles`."""
    return np.repeat(tiled_visible.reshape(*tiled_visible.shape[:2], case.score_cols // 4, 4).any(axis=3), 4, axis=2)


def pieces(case: Case, scores: np.ndarray, sinks: np.ndarray | None = None) -> dict[str, Any]:
    tiles = as_tiles(case, scores, np.uint32(GUARD).view(np.float32))
    return {"params": block(case, {}, sinks=sinks), "scores": place_tiles(case, tiles), "lse": []}


def run(rig: Rig, case: Case, scores: np.ndarray, sinks: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return rig.run(pieces(case, scores, sinks))


def check(case: Case, scores: np.ndarray, sinks: np.ndarray | None, after: dict[str, np.ndarray]) -> None:
    """Compare with the oracle, bit for bit where nothing may be written."""
    tiles = take_tiles(case, after["scores"])
    is_written = vec4s_with_a_key(case, as_tiles(case, case.visible(), False))
    before = as_tiles(case, scores, np.uint32(GUARD).view(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(tiles[~is_written], before[~is_written])
    probs = from_tiles(case, np.where(is_written, tiles, np.uint32(0))).view(np.float32)
    exact = np.where(case.visible(), scores, -np.inf)
    expected, lse = oracle.softmax(exact, sinks, return_lse=True)
    live = probs[..., : case.num_keys]
    size = np.zeros(lse.shape)
    assert_close(live, expected[..., : live.shape[3]], size)
    np.testing.assert_array_equal(live[np.isneginf(exact[..., : live.shape[3]])], 0)
    assert (probs[..., case.num_keys :] == 0).all()
    got = take_lse(case, after["lse"])
    if got is not None:
        assert_lse_close(got, lse, size)


def draw_sinks(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    return (8 * rng.standard_normal(case.num_heads)).astype(np.float32) if case.sinks else None


@pytest.mark.parametrize("name", CASES)
def test_probabilities_and_lse(rig: Rig, rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    scores, sinks = draw_scores(case, rng), draw_sinks(case, rng)
    check(case, scores, sinks, run(rig, case, scores, sinks))


@pytest.mark.parametrize("level", [0.0, 150.0, -150.0, 1e6, -1e30, 3e38, -3.4e38])
@pytest.mark.parametrize("size", [0.0, 1.0, 300.0])
def test_scores_far_from_zero(rig: Rig, rng: np.random.Generator, level: float, size: float) -> None:
    case = Case(q_len=9, kv_len=(70, 65), mask="bool")
    scores = (draw_scores(case, rng, size) + np.float32(level)).astype(np.float32)
    check(case, scores, None, run(rig, case, scores))


def test_scores_at_the_ends_of_float32(rig: Rig) -> None:
    largest = np.finfo(np.float32).max
    case = Case(batch_size=1, num_kv_heads=1, q_len=6, num_keys=5, kv_len=(5,), q_offset=(0,))
    rows = [[-largest] * 5, [largest] * 5, [-largest, largest, 0, 0, -np.inf], [-np.inf] * 5, [1e-45, 0, -1e-45, 0, 0],
            [-largest, -np.inf, -np.inf, -np.inf, -np.inf]]
    scores = np.array(rows, np.float32)[None, None]
    check(case, scores, None, run(rig, case, scores))
    sinks = np.array([-largest], np.float32)
    check(Case(**(case.__dict__ | {"sinks": True})), scores, sinks, run(rig, Case(**(case.__dict__ | {"sinks": True})),
                                                                       scores, sinks))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_a_number_makes_its_row_and_its_lse_nan(rig: Rig, rng: np.random.Generator,
                                                                     bad: float) -> None:
    case = Case(q_len=9)
    scores = draw_scores(case, rng)
    clean = run(rig, case, scores)
    scores[0, 1, 3, 40] = bad
    after = run(rig, case, scores)
    probs, before = (from_tiles(case, take_tiles(case, words["scores"])).view(np.float32) for words in (after, clean))
    lse, lse_before = (take_lse(case, words["lse"]) for words in (after, clean))
    assert lse is not None and lse_before is not None
    assert np.isnan(probs[0, 1, 3, :70]).any()
    assert np.isnan(lse[0, 1, 3])
    for got, expected in ((probs, before), (lse, lse_before)):
        got[0, 1, 3] = expected[0, 1, 3]
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_many_equal_scores(rig: Rig, rigs: Rigs) -> None:
    """The compensated sum: 8192 weights of 1, added lane by lane, and one large weight before them."""
    case = Case(batch_size=1, num_kv_heads=1, q_len=3, num_keys=8192, kv_len=(8192,), q_offset=(0,), tiles_per_chunk=1)
    wide = rigs.make(rig.variant, chunks=1, scores=1 << 19)
    scores = np.zeros((1, 1, 3, 8192), np.float32)
    scores[0, 0, 1, 5], scores[0, 0, 2, ::2] = 16, -30
    tiles = as_tiles(case, scores, np.uint32(GUARD).view(np.float32))
    after = wide.run({"params": block(case, {}), "scores": [(4 * BASES["scores_base"], tiles.view(np.uint32).ravel())],
                      "lse": []})
    expected, lse = oracle.softmax(scores, return_lse=True)
    got = after["scores"][4 * BASES["scores_base"] :][: tiles.size].view(np.float32).reshape(tiles.shape)
    np.testing.assert_allclose(got[0, :3], expected[0, 0], rtol=5e-6)  # e^-30 is not exact
    np.testing.assert_allclose(take_lse(case, after["lse"]), lse, rtol=2e-7)
    wide.close()


def test_the_bits_do_not_depend_on_the_number_of_workgroups_or_runs(rig: Rig, rigs: Rigs,
                                                                    rng: np.random.Generator) -> None:
    scores = draw_scores(REPEATED, rng)
    check(REPEATED, scores, None, run(rig, REPEATED, scores))
    assert_the_same_bits(rigs, rig, pieces(REPEATED, scores))

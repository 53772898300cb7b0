"""Pass 1 by itself: every variant against `oracle.attn_weights`, and exactly the tiles that it has to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels.cases import CASES, REPEATED, TILE_COLS, TILE_ROWS, Case
from tests.gpu.kernels.harness import (
    DTYPE,
    GUARD,
    Rig,
    Rigs,
    Store,
    as_tiles,
    assert_the_same_bits,
    block,
    draw,
    from_tiles,
    place_mask,
    take_tiles,
    variants_of,
)
from vkattn import oracle
from vkattn.kernels.manifest import Variant

WORDS = {"params": 1 << 10, "query": 1 << 16, "key": 1 << 17, "mask_data": 1 << 17, "scores": (1 << 17) + (1 << 12)}


@pytest.fixture(params=variants_of("attn_weights"), ids=lambda variant: variant.name)
def rig(request: pytest.FixtureRequest, rigs: Rigs) -> Rig:
    return rigs.of(request.param)


class Inputs:
    """Random inputs of one case, NaN in everything that must not be read, and what the oracle says."""

    def __init__(self, case: Case, variant: Variant, rng: np.random.Generator) -> None:
        query_dtype, key_dtype = DTYPE[variant.axes["query"]], DTYPE[variant.axes["key"]]
        self.case = case
        self.query = draw(rng, (case.batch_size, case.num_heads, case.q_len, case.head_dim), query_dtype)
        self.key = draw(rng, (case.batch_size, case.num_kv_heads, case.num_keys, case.head_dim), key_dtype)
        self.mask = case.draw_mask(rng)
        self.slopes = rng.uniform(-0.1, 1, case.num_heads).astype(np.float32) if case.alibi else None
        self.q_store = Store(case, self.query, query_dtype)
        self.k_store = Store(case, self.key, key_dtype, case.unread_keys()[:, None])

    def pieces(self) -> dict[str, Any]:
        strides = self.q_store.strides("q") | self.k_store.strides("k")
        return {"params": block(self.case, strides, self.mask, self.slopes), "query": self.q_store.place("query_base"),
                "key": self.k_store.place("key_base"), "mask_data": place_mask(self.mask), "scores": []}

    def options(self) -> dict[str, Any]:
        return {"scale": np.float32(self.case.scale), "softcap": self.case.softcap, "alibi_slopes": self.slopes,
                "mask": self.mask} | self.case.places

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return scores ``[batch, heads, q_len, num_keys]`` and the error that float32 may make in each.

        A dot product of terms of size m is off by a few 2^-24 m; every further step by as much of what it gives.
        """
        options = self.options()
        scores = oracle.attn_weights(self.query, self.key, **options)
        sizes = np.abs(self.query.astype(np.float64)), np.abs(self.key.astype(np.float64))
        terms = abs(options["scale"]) * (sizes[0] @ np.repeat(sizes[1], self.case.group_size, 1).swapaxes(-1, -2))
        if self.slopes is not None:
            place = np.array(self.case.q_offset)[:, None, None] + np.arange(self.case.q_len)[:, None]
            distance = np.abs(place - np.arange(self.case.num_keys))
            terms = terms + np.abs(self.slopes)[:, None, None] * distance[:, None]
        if self.mask is not None and self.mask.dtype != np.bool_:
            terms = terms + np.abs(np.where(np.isfinite(self.mask), self.mask, 0))
        return scores, 2.0**-22 * terms


def check(case: Case, inputs: Inputs, words: np.ndarray) -> None:
    """Compare a score buffer with the oracle, and check that exactly the tiles that a row sees were written."""
    tiles = take_tiles(case, words)
    rows = as_tiles(case, np.ones((case.batch_size, case.num_heads, case.q_len, case.score_cols), bool), False)
    seen = as_tiles(case, case.visible(), False)
    by_tile = seen.reshape(case.num_tiles, TILE_ROWS, case.score_cols // TILE_COLS, TILE_COLS).any(axis=(1, 3))
    is_written = np.repeat(by_tile, TILE_COLS, axis=1)[:, None, :] & rows
    np.testing.assert_array_equal(tiles[~is_written], GUARD)
    scores, bound = inputs.expected()
    expected = as_tiles(case, scores, -np.inf)[is_written]
    got = tiles.view(np.float32)[is_written].astype(np.float64)
    closed = np.isneginf(expected)
    np.testing.assert_array_equal(np.isneginf(got), closed)
    error = np.abs(np.where(closed, 0, got) - np.where(closed, 0, expected))
    worst = error - as_tiles(case, bound, 0.0)[is_written]
    assert not (worst > 0).any() and np.isfinite(error).all(), f"worst score is {worst.max()} beyond its bound"


@pytest.mark.parametrize("name", CASES)
def test_scores(rig: Rig, rng: np.random.Generator, name: str) -> None:
    inputs = Inputs(CASES[name], rig.variant, rng)
    check(CASES[name], inputs, rig.run(inputs.pieces())["scores"])


def test_a_key_that_is_not_finite_spoils_its_own_column_only(rig: Rig, rng: np.random.Generator) -> None:
    case = Case(kv_len=(70, 70), window=(None, 9))
    inputs = Inputs(case, rig.variant, rng)
    clean = from_tiles(case, take_tiles(case, rig.run(inputs.pieces())["scores"]))
    inputs.key[:, :, 7] = np.nan
    inputs.key[:, :, 11] = np.inf
    inputs.k_store = Store(case, inputs.key, inputs.k_store.dtype)
    dirty = from_tiles(case, take_tiles(case, rig.run(inputs.pieces())["scores"]))
    seen = case.visible()
    columns = np.isin(np.arange(case.score_cols), (7, 11))
    np.testing.assert_array_equal(dirty[..., ~columns], clean[..., ~columns])
    assert np.isnan(dirty[..., 7].view(np.float32)[seen[..., 7]]).all()
    assert not np.isfinite(dirty[..., 11].view(np.float32)[seen[..., 11]]).any()
    assert np.isneginf(dirty[..., :64].view(np.float32)[~seen[..., :64]]).all()


def test_the_bits_do_not_depend_on_the_number_of_workgroups_or_runs(rig: Rig, rigs: Rigs,
                                                                    rng: np.random.Generator) -> None:
    inputs = Inputs(REPEATED, rig.variant, rng)
    check(REPEATED, inputs, rig.run(inputs.pieces())["scores"])
    assert_the_same_bits(rigs, rig, inputs.pieces())

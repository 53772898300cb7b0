"""The cases that each of the three passes is tried with: sizes, lengths, positions, masks and options of a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vkattn.mask import visible

#: The rows of a tile in shaders/include/tiles.glsl, and what the length of a score row is padded to.
TILE_ROWS, TILE_COLS = 32, 64


@dataclass(frozen=True)
class Case:
    """Sizes and options of one run; ``num_keys`` rows of keys exist, of which ``kv_len`` are live."""

    batch_size: int = 2
    num_kv_heads: int = 2
    group_size: int = 1
    q_len: int = 5
    num_keys: int = 70
    head_dim: int = 17
    value_dim: int = 9
    kv_len: tuple[int, ...] = (70, 33)
    q_offset: tuple[int, ...] = (0, 0)
    window: tuple[int | None, int | None] = (None, None)
    mask: str | None = None  # "bool" or "float"
    mask_shape: tuple[bool, bool, bool, bool] = (True, True, True, True)  # full, or broadcast
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    lse: bool = True
    scale: float = 0.3
    layout: str = "bhsd"
    tiles_per_chunk: int = 3

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def tiles_per_head(self) -> int:
        return -(-self.q_len * self.group_size // TILE_ROWS)

    @property
    def num_tiles(self) -> int:
        return self.batch_size * self.num_kv_heads * self.tiles_per_head

    @property
    def max_kv_len(self) -> int:
        return max(self.kv_len, default=0)

    @property
    def score_cols(self) -> int:
        return -(-self.max_kv_len // TILE_COLS) * TILE_COLS

    @property
    def places(self) -> dict[str, Any]:
        """The oracle's options about positions."""
        return {"q_offset": np.array(self.q_offset), "kv_len": np.array(self.kv_len), "window": self.window}

    def visible(self) -> np.ndarray:
        """Return which keys each row sees by position, bool ``[batch, heads, q_len, num_keys]``."""
        seen = visible(self.q_len, self.num_keys, **self.places)
        return np.repeat(seen[:, None], self.num_heads, axis=1)

    def unread_keys(self) -> np.ndarray:
        """Return which keys come before or after all that a row of the batch sees, bool ``[batch, num_keys]``."""
        seen = self.visible().any(axis=(1, 2))
        return np.asarray(~(np.logical_or.accumulate(seen, 1) & np.logical_or.accumulate(seen[:, ::-1], 1)[:, ::-1]))

    def attended(self, mask: np.ndarray | None) -> np.ndarray:
        """Return which keys each row gives a weight, bool ``[batch, heads, q_len, num_keys]``."""
        if mask is None:
            return self.visible()
        return np.asarray(self.visible() & (mask if mask.dtype == np.bool_ else mask > -np.inf))

    def unread_values(self, mask: np.ndarray | None) -> np.ndarray:
        """Return which values no row gives a weight, bool ``[batch, num_kv_heads, num_keys]``."""
        rows = (self.batch_size, self.num_kv_heads, self.group_size * self.q_len, self.num_keys)
        return np.asarray(~self.attended(mask).reshape(rows).any(axis=2))

    def draw_mask(self, rng: np.random.Generator) -> np.ndarray | None:
        """Return the mask, NaN where it must not be read, with a closed row, closed columns and a closed tile."""
        if self.mask is None:
            return None
        full = (self.batch_size, self.num_heads, self.q_len, self.num_keys)
        shape = tuple(size if is_full else 1 for size, is_full in zip(full, self.mask_shape, strict=True))
        is_open = rng.random(shape) < 0.6
        if self.mask_shape[3]:
            is_open[..., 3:8] = False
            is_open[..., 64:128] &= rng.random() < 0.5
        if self.mask_shape[2]:
            is_open[..., self.q_len // 2, :] = False
        if self.mask == "bool":
            return is_open
        bias = np.where(is_open, 3 * rng.standard_normal(shape, np.float32), np.float32(-np.inf))
        if self.mask_shape[3]:
            bias[..., self.max_kv_len :] = np.nan
        return bias


#: What every variant computes again and again: four tiles of keys, and a workgroup for each of four tiles of rows.
REPEATED = Case(batch_size=1, group_size=2, q_len=20, num_keys=260, kv_len=(256,), q_offset=(230,), window=(None, 0),
                head_dim=20, value_dim=24, tiles_per_chunk=4)

EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)

#: What every pass is tried with, by name: long and short ones in turn.
CASES = {
    "plain": Case(),
    **{f"kv_len {n}": Case(batch_size=1, num_keys=n + 2, kv_len=(n,), q_offset=(n // 2,), q_len=3) for n in EDGES},
    "one key": Case(batch_size=1, num_kv_heads=1, q_len=1, num_keys=1, kv_len=(1,), q_offset=(0,), head_dim=1,
                    value_dim=1),
    "nothing live in one batch": Case(batch_size=3, kv_len=(0, 70, 1), q_offset=(0, 3, 0), tiles_per_chunk=2),
    "nothing live at all": Case(kv_len=(0, 0)),
    "no batch": Case(batch_size=0, kv_len=(), q_offset=()),
    "no rows": Case(q_len=0),
    "group 3": Case(group_size=3, q_len=11, head_dim=33, value_dim=65, tiles_per_chunk=2),
    "group 5, one row": Case(group_size=5, q_len=1, head_dim=31, value_dim=130, num_kv_heads=3),
    "group 40": Case(group_size=40, q_len=2, num_kv_heads=1, head_dim=5, layout="bshd"),
    "many rows": Case(batch_size=1, q_len=67, head_dim=64, value_dim=64, kv_len=(65,), q_offset=(0,), window=(None, 0)),
    "causal, a tile a chunk": Case(batch_size=1, num_kv_heads=1, q_len=100, num_keys=200, kv_len=(190,), q_offset=(90,),
                                   window=(None, 0), tiles_per_chunk=1),
    "rows before the first key": Case(q_len=40, q_offset=(-10, -39), window=(None, 0), layout="bshd"),
    "rows after the last key": Case(q_len=40, q_offset=(40, 500), window=(20, None)),
    "window": Case(group_size=3, q_len=23, num_keys=180, kv_len=(180, 130), q_offset=(100, 60), window=(37, 5),
                   layout="bshd", tiles_per_chunk=4),
    "window of the row itself": Case(q_len=60, num_keys=64, kv_len=(64, 64), q_offset=(3, 0), window=(0, 0)),
    "positions at the limits": Case(q_len=33, q_offset=(2**29, -(2**29)), window=(2**30, 2**30)),
    "bool mask": Case(mask="bool", q_len=20, num_keys=150, kv_len=(150, 97), group_size=2),
    "bool mask of one row": Case(mask="bool", mask_shape=(False, False, False, True), q_len=33, window=(None, 9),
                                 num_keys=99, kv_len=(99, 71)),
    "bool mask of one column": Case(mask="bool", mask_shape=(True, True, True, False), q_len=12, layout="bshd"),
    "float mask": Case(mask="float", q_len=20, num_keys=150, kv_len=(150, 97), group_size=2, layout="bshd"),
    "float mask of one head": Case(mask="float", mask_shape=(True, False, True, True), group_size=3, window=(50, 3),
                                   q_offset=(20, 5)),
    "float mask of one element": Case(mask="float", mask_shape=(False, False, False, False)),
    "softcap": Case(softcap=4.0, scale=1.5),
    "a small softcap": Case(softcap=0.01, scale=-3.0),
    "a softcap above the scores": Case(softcap=2000.0, scale=0.1),
    "a softcap far above the scores": Case(softcap=3e38),
    "the least softcap": Case(softcap=2.0**-126),
    "alibi": Case(alibi=True, q_offset=(65, 3), group_size=3, q_len=9),
    "sinks": Case(sinks=True, group_size=3, kv_len=(70, 0)),
    "no lse": Case(lse=False),
    "scale 0": Case(scale=0.0),
    "everything": Case(group_size=5, q_len=13, num_keys=140, kv_len=(140, 101), q_offset=(100, 30), window=(64, 3),
                       mask="float", mask_shape=(True, True, True, True), softcap=6.0, alibi=True, sinks=True,
                       head_dim=72, value_dim=35, layout="bshd", tiles_per_chunk=5),
}  # fmt: skip

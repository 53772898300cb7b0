"""How long problems are cut into chunks of query rows, and that Python and GLSL agree on the tiles."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.fakes import fake_device_info
from vkattn.errors import CapacityError
from vkattn.kernels import three_pass
from vkattn.kernels.three_pass import BLOCK_COLS, BLOCK_ROWS, chunking
from vkattn.problem import Problem

SHADERS = Path(__file__).resolve().parents[2] / "shaders"
PROBLEM = Problem(1, 16, 16, 4096, 4096, 64, 64, "float32", "float32", "float32")


def constant(name: str, file: str) -> int:
    """Return the value of a `const uint` in a shader."""
    found = re.search(rf"(?:const uint {name} =|#define {name}) (\d+)u", (SHADERS / file).read_text())
    assert found, f"{file} has no constant {name}"
    return int(found[1])


def test_tiles_are_those_of_the_shaders() -> None:
    assert constant("BLOCK_ROWS", "include/tiles.glsl") == BLOCK_ROWS
    assert constant("BLOCK_COLS", "attn_weights.comp") == BLOCK_COLS


def test_a_chunk_fits_the_budget_and_chunks_cover_every_row() -> None:
    words = (64 << 20) // 4
    cut = chunking(PROBLEM, 4096, 4096, words, fake_device_info(device_type="discrete"))
    assert cut.tiles_per_chunk * cut.tile_words <= words
    assert cut.row_tiles == 16 * 4096 // BLOCK_ROWS
    assert cut.num_chunks * cut.tiles_per_chunk >= cut.row_tiles > (cut.num_chunks - 1) * cut.tiles_per_chunk
    assert cut.num_chunks == 16


def test_a_slow_device_gets_shorter_dispatches() -> None:
    words = (64 << 20) // 4
    fast = chunking(PROBLEM, 4096, 4096, words, fake_device_info(device_type="discrete"))
    slow = chunking(PROBLEM, 4096, 4096, words, fake_device_info(device_type="cpu"))
    seconds = slow.tiles_per_chunk * BLOCK_ROWS * 4096 * 64 / three_pass.MULTIPLY_ADDS_PER_SECOND["cpu"]
    assert slow.tiles_per_chunk < fast.tiles_per_chunk
    assert seconds <= three_pass.DISPATCH_SECONDS


def test_a_score_row_is_padded_to_whole_tiles() -> None:
    cut = chunking(dataclasses.replace(PROBLEM, max_kv_len=65), 1, 65, 1 << 20, fake_device_info())
    assert cut.score_stride * 4 == 128


def test_group_rows_share_a_tile() -> None:
    grouped = dataclasses.replace(PROBLEM, num_kv_heads=2)  # 8 query heads to a KV head
    assert chunking(grouped, 4, 64, 1 << 20, fake_device_info()).row_tiles == 2
    assert chunking(grouped, 5, 64, 1 << 20, fake_device_info()).row_tiles == 4


def test_a_budget_below_one_tile_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"take 524288 bytes; the score buffer has 524284"):
        chunking(PROBLEM, 1, 4096, 524288 // 4 - 1, fake_device_info())

"""The three-pass family: attn_weights, attn_softmax, attn_output. What it supports, its variants, its sizes.

A score matrix of B x H x L x S float32 would not fit for long problems, so its rows go in chunks of row tiles: as many
as the score buffer holds, and few enough that one dispatch stays short (desktop drivers reset a GPU that is busy
for seconds). The three passes run once for each chunk, over the same buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..caps.model import DeviceInfo
from ..errors import CapacityError
from ..formats import variant_axes
from ..problem import Problem
from .grid import items_that_fit, iteration_limit, row_tiles, too_long
from .manifest import Variant, variant
from .passes import Cut, Pass
from .support import device_reasons

NAME = "three_pass"

#: Rows and columns of a tile in shaders/attn_weights.comp and include/tiles.glsl; tests tie them to the shaders.
BLOCK_ROWS = 32
BLOCK_COLS = 64

#: What a kernel of this family does in a second at the least, in multiply-adds, by device type.
MULTIPLY_ADDS_PER_SECOND = {"cpu": 1e9, "integrated": 2e10, "virtual": 2e10, "discrete": 6e11, "other": 2e10}

#: A dispatch is estimated to take at most this long, and a submission (of whole chunks) at most four times as long.
DISPATCH_SECONDS = 0.25
CHUNKS_PER_SUBMISSION = 4


def variants(problem: Problem, info: DeviceInfo | None = None) -> tuple[Variant, Variant, Variant]:
    """Return the variants of the three passes for the dtypes of ``problem``; any device."""
    query, key = variant_axes(problem.query_dtype, problem.key_dtype, problem.value_dtype)  # out and value too
    return (variant(f"attn_weights_{query}_{key}"), variant("attn_softmax"), variant(f"attn_output_{key}_{query}"))


def not_supported_reasons(problem: Problem, info: DeviceInfo) -> list[str]:
    """Return why this family cannot compute ``problem`` on the device; empty if it can. Any size will do."""
    reasons = [reason for kernel in variants(problem) for reason in device_reasons(kernel, info)]
    worst = output_iterations(problem.max_kv_len)
    if items_that_fit(worst, info) == 0:
        reasons.append(too_long(f"kv_len {problem.max_kv_len}", worst))
    return reasons


def output_iterations(max_kv_len: int) -> int:
    """Return the most loop iterations of one item of attn_output: blocks of 32 keys, each key by itself at worst."""
    return 8 + (-(-max_kv_len // 32) + 1) * 34


def tiles_that_fit(problem: Problem, max_kv_len: int, info: DeviceInfo) -> int | None:
    """Return the row tiles of a chunk that one dispatch of each pass can do within the device's loop limit."""
    if iteration_limit(info) is None:
        return None
    col_tiles = max(-(-max_kv_len // BLOCK_COLS), 1)
    weights = items_that_fit(2 * (33 + 9 * -(-problem.head_dim // 32)), info) or 0
    softmax = items_that_fit(2 * (2 * -(-max_kv_len // 128) + 10), info) or 0
    output = items_that_fit(output_iterations(max_kv_len), info) or 0
    value_chunks = max(-(-problem.value_dim // 64), 1)
    return max(1, min(weights // col_tiles, softmax // (BLOCK_ROWS // 4), output // value_chunks))


def passes(problem: Problem, info: DeviceInfo | None = None) -> tuple[Pass, ...]:
    """Return the three passes."""
    weights, softmax, output = variants(problem)
    return (Pass(weights, ("query", "key", "mask", "scores")), Pass(softmax, ("scores", "lse")),
            Pass(output, ("scores", "value", "out"), pushed={"scores": "probs"}))


@dataclass(frozen=True)
class Chunking:
    """How the rows of one run are cut.

    ``score_stride`` is the length of a score row in vecs of four, ``tiles_per_chunk`` the row tiles of a chunk,
    ``tile_words`` the words of the score buffer that one row tile takes.
    """

    row_tiles: int
    score_stride: int
    tile_words: int
    tiles_per_chunk: int

    @property
    def num_chunks(self) -> int:
        """Chunks that have work."""
        return -(-self.row_tiles // self.tiles_per_chunk)


def chunking(problem: Problem, q_len: int, max_kv_len: int, score_words: int, info: DeviceInfo) -> Chunking:
    """Cut ``q_len`` rows of queries over ``max_kv_len`` keys so that each chunk's scores fit ``score_words``.

    Raises
    ------
    CapacityError
        The scores of a single row tile do not fit.
    """
    score_stride = -(-max_kv_len // BLOCK_COLS) * (BLOCK_COLS // 4)
    tile_words = BLOCK_ROWS * score_stride * 4
    if tile_words > score_words:
        raise CapacityError(
            f"the scores of {BLOCK_ROWS} query rows over kv_len {max_kv_len} take {4 * tile_words} bytes; the score "
            f"buffer has {4 * score_words}. Hint: open the device with vkattn.Device(score_budget_bytes=...).")
    tiles = row_tiles(problem, q_len, BLOCK_ROWS)
    work = BLOCK_ROWS * max(max_kv_len, 1) * max(problem.head_dim, problem.value_dim)
    short = int(DISPATCH_SECONDS * MULTIPLY_ADDS_PER_SECOND[info.device_type] / work)
    fits = score_words // tile_words if tile_words else tiles
    loops = tiles_that_fit(problem, max_kv_len, info) or tiles
    return Chunking(tiles, score_stride, tile_words, max(1, min(fits, short, loops, tiles)))


def scratch_words(problem: Problem, info: DeviceInfo, budget_words: int) -> dict[str, int]:
    """Return the words of the score buffer: the whole matrix, or as much of it as the budget allows."""
    limit = min(info.max_storage_buffer_range // 4, budget_words)
    cut = chunking(problem, problem.max_q_len, problem.max_kv_len, limit, info)
    return {"scores": min(cut.row_tiles * cut.tile_words, limit)}


def cut(problem: Problem, q_len: int, max_kv_len: int, scratch: dict[str, int], info: DeviceInfo) -> Cut:
    """Return how a run of these live lengths is cut; ``scratch`` holds the words of `scratch_words` that there are."""
    chunks = chunking(problem, q_len, max_kv_len, scratch["scores"], info)
    return Cut({"score_stride": chunks.score_stride, "tiles_per_chunk": chunks.tiles_per_chunk}, chunks.num_chunks)

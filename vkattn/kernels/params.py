"""The words of a params block: what the host writes for each run and every attention kernel reads.

A block is a header of `HEADER_WORDS` words, one per name below, followed by five arrays: kv_len, q_offset, input_pos
(batch_size words each), alibi_slope and sink (num_heads words each). ``shaders/include/params.glsl`` is generated
from `FIELDS` by ``scripts/gen_params.py``; nothing else knows an offset. Strides of queries, keys, values and outputs
are in vecs (groups of four elements), of quantised keys and values in quads (four words), of the mask in elements.
"""

from __future__ import annotations

import numpy as np

#: Name and type ("u" uint, "i" int, "f" float) of each header word, in order.
FIELDS: tuple[tuple[str, str], ...] = (
    ("batch_size", "u"),
    ("num_kv_heads", "u"),
    ("group_size", "u"),  # query heads per KV head
    ("q_len", "u"),
    ("max_kv_len", "u"),  # the largest kv_len of the batch
    ("head_vecs", "u"),  # ceil(head_dim / 4)
    ("value_vecs", "u"),  # ceil(value_dim / 4)
    ("out_vecs", "u"),  # vecs in a padded row of the output
    ("flags", "u"),
    ("scale", "f"),
    ("softcap", "f"),  # 0 is off
    ("window_left", "i"),  # inclusive; 2^30 is off
    ("window_right", "i"),  # inclusive; 0 for causal; 2^30 is off
    ("q_stride_batch", "u"),
    ("q_stride_head", "u"),
    ("q_stride_row", "u"),
    ("k_stride_batch", "u"),
    ("k_stride_head", "u"),
    ("k_stride_row", "u"),
    ("v_stride_batch", "u"),
    ("v_stride_head", "u"),
    ("v_stride_row", "u"),
    ("out_stride_batch", "u"),
    ("out_stride_head", "u"),
    ("out_stride_row", "u"),
    ("mask_stride_batch", "u"),
    ("mask_stride_head", "u"),
    ("mask_stride_row", "u"),
    ("mask_stride_col", "u"),
    ("score_stride", "u"),  # vecs in a row of the score buffer
    ("tiles_per_chunk", "u"),  # row tiles whose scores the buffer holds
    ("num_splits", "u"),  # attn_split: parts of the keys of one head
    ("keys_per_split", "u"),
    ("key_offset", "u"),  # where the layer's keys and values start, in vecs or quads: a run-time choice of layer
    ("value_offset", "u"),
    ("new_k_stride_batch", "u"),  # the rows that kv_append writes to the cache
    ("new_k_stride_head", "u"),
    ("new_k_stride_row", "u"),
    ("new_v_stride_batch", "u"),
    ("new_v_stride_head", "u"),
    ("new_v_stride_row", "u"),
    ("q_words", "u"),  # live words of each input, for the copy kernel
    ("k_words", "u"),
    ("v_words", "u"),
    ("mask_words", "u"),
    ("formats", "u"),  # where the kernel is not compiled for them: of query (8 bits), key, value, new rows
)

HEADER_WORDS = 48
INDEX = {name: index for index, (name, _) in enumerate(FIELDS)}
TYPE = dict(FIELDS)

#: Fields that a kernel may have as specialization constants too.
CONSTANT_SIZES = ("batch_size", "num_kv_heads", "group_size", "q_len", "head_vecs", "value_vecs", "out_vecs")

#: Bits of ``flags``.
FLAG_MASK_BITS = 1  # the mask holds one bit per element, 1 = attend
FLAG_MASK_FLOAT = 2  # the mask holds one float32 per element, added to the score
FLAG_ALIBI = 4
FLAG_SINKS = 8
FLAG_LSE = 16
FLAG_APPEND = 32  # new rows go into the cache first

#: Push constant `count_index` of the copy kernel: the number of words is pushed, it is not a params word.
COUNT_IS_PUSHED = 0xFFFFFFFF

#: A window bound that no position reaches, yet safe to add to any position.
WINDOW_OFF = 1 << 30


def block_words(batch_size: int, num_heads: int) -> int:
    """Return the words of a block for ``batch_size`` sequences and ``num_heads`` query heads."""
    return HEADER_WORDS + 3 * batch_size + 2 * num_heads


def pushed_count(count: int, src_offset: int = 0, dst_offset: int = 0) -> dict[str, int]:
    """Return the push constants with which the copy kernel moves ``count`` words, whatever the params hold."""
    return {"count_index": COUNT_IS_PUSHED, "count": count, "src_offset": src_offset, "dst_offset": dst_offset}


def write_header(words: np.ndarray, values: dict[str, int | float]) -> None:
    """Write header values by name into ``words`` (uint32, at least `HEADER_WORDS`)."""
    ints, floats = words.view(np.int32), words.view(np.float32)
    for name, value in values.items():
        kind = TYPE[name]
        (words if kind == "u" else ints if kind == "i" else floats)[INDEX[name]] = value


def write_lengths(
    words: np.ndarray,
    batch_size: int,
    kv_len: np.ndarray | int,
    q_offset: np.ndarray | int,
    input_pos: np.ndarray | int = 0,
) -> None:
    """Write the arrays of lengths and positions; each argument holds batch_size values, or one for all."""
    at = HEADER_WORDS
    words[at : at + batch_size] = kv_len
    words.view(np.int32)[at + batch_size : at + 2 * batch_size] = q_offset
    words[at + 2 * batch_size : at + 3 * batch_size] = input_pos


def write_heads(
    words: np.ndarray,
    batch_size: int,
    num_heads: int,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """Write what there is of the arrays with one float32 per query head."""
    at = HEADER_WORDS + 3 * batch_size
    floats = words.view(np.float32)
    if alibi_slopes is not None:
        floats[at : at + num_heads] = alibi_slopes
    if sinks is not None:
        floats[at + num_heads : at + 2 * num_heads] = sinks

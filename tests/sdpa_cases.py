"""Calls of scaled_dot_product_attention as torch allows them: for the oracle's tests and for the device's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]

#: Name, then the shapes of query, key and value.
SHAPES: dict[str, tuple[Shape, Shape, Shape]] = {
    "2d": ((3, 5), (6, 5), (6, 7)),
    "3d": ((2, 33, 17), (2, 31, 17), (2, 31, 17)),
    "4d_one_query": ((2, 3, 1, 64), (2, 3, 65, 64), (2, 3, 65, 64)),
    "4d": ((2, 2, 33, 8), (2, 2, 65, 8), (2, 2, 65, 24)),
    "4d_more_queries": ((1, 2, 40, 16), (1, 2, 7, 16), (1, 2, 7, 16)),
    "4d_square": ((1, 3, 32, 80), (1, 3, 32, 80), (1, 3, 32, 80)),
    "5d": ((2, 2, 3, 5, 7), (2, 2, 3, 9, 7), (2, 2, 3, 9, 4)),
    "query_broadcasts": ((4, 3, 5), (2, 4, 6, 5), (2, 4, 6, 5)),
    "batch_of_one_key": ((3, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "one_head_of_value": ((2, 4, 3, 8), (2, 4, 6, 8), (2, 1, 6, 8)),
    "gqa_6_2": ((2, 6, 9, 16), (2, 2, 33, 16), (2, 2, 33, 16)),
    "gqa_9_3": ((1, 9, 3, 8), (1, 3, 31, 8), (1, 3, 31, 8)),
    "gqa_8_1": ((1, 8, 4, 64), (1, 1, 64, 64), (1, 1, 64, 64)),
    "gqa_3d": ((4, 5, 8), (2, 6, 8), (2, 6, 8)),
}
MASKS = ("none", "causal", "bool", "bool_keys", "bool_empty_rows", "float", "float_inf", "float_per_head")
SCALES = (None, 0.3, -0.5)
#: All combinations but causal with a negative scale, where torch 2.13 on a CPU multiplies its -inf by the scale.
CALLS = [
    (shape, mask, scale)
    for shape, mask, scale in itertools.product(SHAPES, MASKS, SCALES)
    if not (mask == "causal" and scale is not None and scale < 0)
]


@dataclass(frozen=True)
class Call:
    """One call: three arrays in float32 and the keyword arguments, NumPy only."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: dict[str, Any]

    def as_attention(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Return the same call for `oracle.attention`: each leading index a batch entry of one head."""
        arrays = [self.query, self.key, self.value]
        if self.options["enable_gqa"]:
            arrays = [np.repeat(array, self.query.shape[-3] // array.shape[-3], axis=-3) for array in arrays]
        leading = np.broadcast_shapes(*(array.shape[:-2] for array in arrays))
        options: dict[str, Any] = {"scale": self.options["scale"]}
        if self.options.get("is_causal"):
            options["causal"] = "top_left"
        if "attn_mask" in self.options:
            arrays.append(np.broadcast_to(self.options["attn_mask"], (*leading, *self.mask_shape)))
        full = [np.broadcast_to(array, (*leading, *array.shape[-2:])) for array in arrays]
        flat = [array.reshape(-1, 1, *array.shape[-2:]) for array in full]
        if "attn_mask" in self.options:
            options["mask"] = flat.pop()
        return flat, options

    @property
    def mask_shape(self) -> tuple[int, int]:
        """The last two dimensions that a mask broadcasts to: (q_len, kv_len)."""
        return self.query.shape[-2], self.key.shape[-2]


def make_call(shape_name: str, mask_name: str, scale: float | None, rng: np.random.Generator) -> Call:
    """Return the call named by its parts, with normal random numbers scaled to make the softmax uneven."""
    shapes = SHAPES[shape_name]
    query, key, value = (rng.normal(scale=2, size=shape).astype(np.float32) for shape in shapes)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": shape_name.startswith("gqa")}
    mask = _make_mask(mask_name, shapes, rng)
    if mask is not None:
        options["attn_mask"] = mask
    if mask_name == "causal":
        options["is_causal"] = True
    return Call(query, key, value, options)


def _make_mask(name: str, shapes: tuple[Shape, Shape, Shape], rng: np.random.Generator) -> np.ndarray | None:
    """Return the mask called ``name``, or None; it broadcasts to ``[..., q_len, kv_len]``."""
    q_len, kv_len = shapes[0][-2], shapes[1][-2]
    heads = shapes[0][:-2][-1:]
    allowed = rng.random((q_len, kv_len)) < 0.6
    allowed[:, 0] = True
    if name == "bool":
        return allowed
    if name == "bool_keys":
        return allowed[:1]
    if name == "bool_empty_rows":
        allowed[: (q_len + 1) // 2] = False
        return allowed
    bias = rng.normal(scale=3, size=(q_len, kv_len)).astype(np.float32)
    if name == "float":
        return bias
    if name == "float_inf":
        return np.where(allowed, bias, np.float32(-np.inf))
    if name == "float_per_head":
        return rng.normal(size=(*heads, 1, kv_len)).astype(np.float32)
    return None

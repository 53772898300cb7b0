"""The ONNX backend's cases for its operator Attention, as calls of `attention`: a third party's definition.

The onnx package makes the cases in memory, with the answers of its own reference. Only the first output, Y, is
compared: the others are the concatenated cache, and the scores, which a fused kernel never has.

What ONNX says differently (its operator's text, opset 25):

* 3-D inputs are ``[batch, tokens, heads * dim]``, so they are our layout "bshd" after a reshape.
* ``past_key`` and ``past_value`` come before key and value: the keys are the concatenation, and query row 0 stands
  behind the past.
* ``nonpad_kv_seqlen`` is the live lengths, and the last query row stands at the last live key ("bottom_right").
* With neither of these, query row 0 stands at key 0 ("top_left"), whatever the lengths.
* A mask may be shorter than the keys; the rest is closed.
* -1 is a window's bound that limits nothing; 0 is a softcap that is off.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

#: In onnx 1.23.2.
NUM_CASES = 93

#: ONNX's own relative tolerance of these cases. For bfloat16 it is two spacings of the type: ONNX's reference rounds
#: scaled queries and keys, scores and probabilities to bfloat16 on its way, so that 2 of its 960 elements are that far
#: from the exact answer (measured). The tests compare with the oracle as well, within our own tolerance.
RELATIVE = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 2.0**-6}
ABSOLUTE = 1e-7


@dataclass(frozen=True)
class Case:
    """One case: the arguments of `attention` and ONNX's Y in the layout of the call."""

    name: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: dict[str, Any]
    expected: np.ndarray

    @property
    def needs(self) -> frozenset[str]:
        """Options beyond the plainest call, by the names that NotImplementedError would give them."""
        names = {name for name in ("softcap", "window") if name in self.options}
        if self.query.dtype.name == "bfloat16":
            names.add("bfloat16")
        return frozenset(names)

    def assert_expected(self, actual: np.ndarray) -> None:
        """Assert that an output is ONNX's Y, within ONNX's tolerance."""
        assert actual.shape == self.expected.shape
        np.testing.assert_allclose(
            actual.astype(np.float64),
            self.expected.astype(np.float64),
            rtol=RELATIVE[self.expected.dtype.name],
            atol=ABSOLUTE,
        )


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return all cases in the order of the onnx package."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # collecting makes the cases of every operator
        from onnx.backend.test.case.node import collect_testcases

        found = [case for case in collect_testcases("Attention") if not case.name.endswith("_expanded")]
        return tuple(_case(case) for case in found)


def _case(test: Any) -> Case:
    """Return one of ONNX's cases as a call."""
    from onnx.helper import get_attribute_value

    (node,) = test.model.graph.node
    attributes = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
    ((inputs, outputs),) = test.data_sets
    given = dict(zip(filter(None, node.input), map(np.asarray, inputs), strict=True))
    expected = np.asarray(outputs[0])

    names = ("Q", "K", "V")
    layout = "bhsd" if given["Q"].ndim == 4 else "bshd"
    if layout == "bshd":
        heads = {"Q": attributes["q_num_heads"], "K": attributes["kv_num_heads"], "V": attributes["kv_num_heads"]}
        given.update({name: given[name].reshape(*given[name].shape[:2], heads[name], -1) for name in names})
        expected = expected.reshape(*expected.shape[:2], heads["Q"], -1)
    query, key, value = (given[name] for name in names)
    token_axis = layout.index("s")
    q_len = query.shape[token_axis]

    options: dict[str, Any] = {"layout": layout}
    has_cache = "past_key" in given or "nonpad_kv_seqlen" in given
    if attributes.get("is_causal"):
        options["causal"] = "bottom_right" if has_cache else "top_left"
    if "past_key" in given:
        past = [given[name] for name in ("past_key", "past_value")]  # always [batch, heads, tokens, dim]
        if layout == "bshd":
            past = [array.transpose(0, 2, 1, 3) for array in past]
        # What stands behind the past is not always as long as the query, so "bottom_right" does not place it.
        options["q_offset"] = past[0].shape[token_axis]
        key, value = (np.concatenate(pair, token_axis) for pair in zip(past, (key, value), strict=True))
    if "nonpad_kv_seqlen" in given:
        options["kv_len"] = given["nonpad_kv_seqlen"]
    if "attn_mask" in given:
        options["mask"] = _pad_mask(given["attn_mask"], key.shape[token_axis])
    if "scale" in attributes:
        options["scale"] = attributes["scale"]
    if attributes.get("softcap"):
        options["softcap"] = attributes["softcap"]
    window = tuple(attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if window != (-1, -1):
        options["window"] = tuple(None if bound == -1 else bound for bound in window)
        if "causal" not in options and "q_offset" not in options:
            options["q_offset"] = given["nonpad_kv_seqlen"] - q_len if "nonpad_kv_seqlen" in given else 0
    return Case(test.name, query, key, value, options, expected)


def _pad_mask(mask: np.ndarray, num_keys: int) -> np.ndarray:
    """Return a mask whose last dimension is the number of keys, the missing columns closed."""
    missing = num_keys - mask.shape[-1]
    closed = np.full((*mask.shape[:-1], missing), False if mask.dtype == np.bool_ else -np.inf, mask.dtype)
    return np.concatenate([mask, closed], axis=-1)

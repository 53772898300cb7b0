"""Every mistake in a call gets its error, naming the argument, before any device is opened."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import vkattn
from tests.fakes import fake_device_info
from vkattn.dispatch import choose
from vkattn.errors import DTypeError, OptionError, ShapeError
from vkattn.validate import attention_call, causal_window

Q = np.zeros((2, 8, 5, 16), np.float32)
K = np.zeros((2, 4, 7, 16), np.float32)
V = np.zeros((2, 4, 7, 24), np.float32)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def mask_with(value: float, column: int) -> np.ndarray:
    mask = np.zeros((2, 1, 5, 7), np.float32)
    mask[1, 0, 2, column] = value
    return mask


class Unwilling:
    """Something whose conversion to an array fails in its own way."""

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        raise KeyError("no")


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("query rank", {"query": array(8, 5, 16)}, ShapeError, r"`query` has shape \(8, 5, 16\)"),
    ("key batch", {"key": array(1, 4, 7, 16)}, ShapeError, r"`key` has shape \(1, 4, 7, 16\) but `query` has batch"),
    ("value batch", {"value": array(3, 4, 7, 24)}, ShapeError, "`value` has shape"),
    ("key head_dim", {"key": array(2, 4, 7, 15)}, ShapeError, "head_dim 16"),
    ("value tokens", {"value": array(2, 4, 6, 24)}, ShapeError, "4 heads and 7 tokens"),
    ("value heads", {"value": array(2, 2, 7, 24)}, ShapeError, "4 heads and 7 tokens"),
    ("head ratio", {"query": array(2, 6, 5, 16)}, ShapeError, r"num_heads 6.*multiple of num_kv_heads \(4\)"),
    ("no KV heads", {"key": array(2, 0, 7, 16), "value": array(2, 0, 7, 24)}, ShapeError, r"num_kv_heads \(0\)"),
    ("head_dim 0", {"query": array(2, 8, 5, 0), "key": array(2, 4, 7, 0)}, ShapeError, "at least 1"),
    ("value_dim 0", {"value": array(2, 4, 7, 0)}, ShapeError, "value_dim"),
    ("float64", {"value": array(2, 4, 7, 24, dtype=np.float64)}, DTypeError, r"`value` is float64.*Hint: pass value"),
    ("int", {"query": array(2, 8, 5, 16, dtype=np.int32)}, DTypeError, "`query` is int32"),
    ("complex", {"key": array(2, 4, 7, 16, dtype=np.complex64)}, DTypeError, "`key` is complex64"),
    ("mixed", {"value": array(2, 4, 7, 24, dtype=np.float16)}, DTypeError, "`key` is float32 but `value` is float16"),
    ("half query", {"query": array(2, 8, 5, 16, dtype=np.float16)}, DTypeError, "`query` is float16 but `key` is"),
    ("scale NaN", {"scale": float("nan")}, OptionError, "`scale` is nan"),
    ("scale infinite", {"scale": float("inf")}, OptionError, "`scale` is inf"),
    ("scale beyond float32", {"scale": 1e39}, OptionError, "`scale` is 1e"),
    ("scale text", {"scale": "big"}, OptionError, "`scale` is 'big'"),
    ("softcap 0", {"softcap": 0.0}, OptionError, "Hint: None is no softcap"),
    ("softcap NaN", {"softcap": float("nan")}, OptionError, "`softcap` is nan"),
    ("causal True", {"causal": True}, OptionError, "top_left.*bottom_right"),
    ("causal word", {"causal": "lower"}, OptionError, "`causal` is 'lower'"),
    ("window negative", {"window": (-1, 0), "q_offset": 0}, OptionError, "not negative"),
    ("window scalar", {"window": 4}, OptionError, r"pair \(left, right\)"),
    ("window without offset", {"window": (3, 3)}, OptionError, "`q_offset` is needed"),
    ("slopes shape", {"alibi_slopes": np.ones(4), "q_offset": 0}, ShapeError, r"`alibi_slopes` has shape \(4,\)"),
    ("slopes NaN", {"alibi_slopes": np.full(8, np.nan), "q_offset": 0}, OptionError, "`alibi_slopes` holds"),
    ("sinks shape", {"sinks": np.ones((8, 1))}, ShapeError, "`sinks` has shape"),
    ("sinks infinite", {"sinks": np.full(8, -np.inf)}, OptionError, "`sinks` holds"),
    ("kv_len too long", {"kv_len": 8}, OptionError, "`kv_len` is"),
    ("kv_len negative", {"kv_len": [-1, 2]}, OptionError, "`kv_len` is"),
    ("kv_len count", {"kv_len": [1, 2, 3]}, ShapeError, "`kv_len` has shape"),
    ("kv_len float", {"kv_len": 2.5}, OptionError, "`kv_len` is 2.5"),
    ("q_offset count", {"q_offset": [1, 2, 3]}, ShapeError, "`q_offset` has shape"),
    ("layout", {"layout": "sbhd"}, OptionError, "`layout` is 'sbhd'"),
    ("mask shape", {"mask": np.ones((5, 6), bool)}, ShapeError, r"`mask` has shape \(5, 6\).*\(2, 8, 5, 7\)"),
    ("mask rank", {"mask": np.ones((1, 2, 8, 5, 7), bool)}, ShapeError, "`mask` has shape"),
    ("mask int", {"mask": np.ones((5, 7), np.int64)}, DTypeError, "`mask` is int64"),
    ("mask half", {"mask": np.zeros((5, 7), np.float16)}, DTypeError, "`mask` is float16"),
    ("mask NaN", {"mask": np.full((5, 7), np.nan, np.float32)}, OptionError, "NaN or plus infinity"),
    ("mask +inf", {"mask": np.full((5, 7), np.inf, np.float32)}, OptionError, "NaN or plus infinity"),
    ("mask NaN in a live column", {"mask": mask_with(np.nan, 3), "kv_len": [2, 4]}, OptionError, "NaN or plus"),
    ("scale of an array", {"scale": np.array([0.5])}, OptionError, "`scale` is array"),
    ("scale of digits", {"scale": "0.5"}, OptionError, "`scale` is '0.5'"),
    ("scale True", {"scale": True}, OptionError, "`scale` is True"),
    ("scale beyond float", {"scale": 10**400}, OptionError, "`scale` is 1000"),
    ("scale below float32", {"scale": 1e-40}, OptionError, "1.18e-38"),
    ("softcap below float32", {"softcap": 1e-50}, OptionError, "1.18e-38"),
    ("softcap beyond float32", {"softcap": 1e39}, OptionError, "3.4e"),
    ("window of rank 0", {"window": np.array(4)}, OptionError, "must be a pair"),
    ("window set", {"window": {1, 2}}, OptionError, "must be a pair"),
    ("kv_len ragged", {"kv_len": [[1], [2, 3]]}, OptionError, "`kv_len` is"),
    ("q_offset ragged", {"q_offset": [[1], [2, 3]]}, OptionError, "`q_offset` is"),
    ("q_offset beyond", {"q_offset": 2**29 + 1}, OptionError, "within -536870912 .. 536870912"),
    ("sinks text", {"sinks": ["1"] * 8}, DTypeError, "`sinks` is str"),
    ("sinks complex", {"sinks": np.ones(8, complex)}, DTypeError, "`sinks` is complex128"),
    ("slopes of dates", {"alibi_slopes": np.ones(8, "M8[s]"), "q_offset": 0}, DTypeError, "`alibi_slopes` is datetime"),
    ("query that cannot be converted", {"query": Unwilling()}, DTypeError, "`query` of type Unwilling"),
    ("key ragged", {"key": [[1.0], [2.0, 3.0]]}, DTypeError, "`key` of type list"),
    ("layout list", {"layout": ["bhsd"]}, OptionError, "`layout` is"),
    ("layout array", {"layout": np.array(["bhsd", "bshd"])}, OptionError, "`layout` is"),
    ("return_lse", {"return_lse": np.array([1, 0])}, OptionError, "`return_lse` is"),
]


@pytest.mark.parametrize(("change", "error", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"query": Q, "key": K, "value": V} | change
    with pytest.raises(error, match=words):
        attention_call(**arguments)
    with pytest.raises(error, match=words):  # and so from the public function, which needs no device to say it
        vkattn.attention(**arguments)


def test_errors_are_of_pythons_own_kinds_too() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        attention_call(Q, K[..., :3], V)
    with pytest.raises(TypeError, match="float64"):
        attention_call(Q.astype(np.float64), K, V)


def test_sizes_and_defaults() -> None:
    call = attention_call(Q, K, V, causal="bottom_right")
    problem = call.problem
    assert (problem.batch_size, problem.num_heads, problem.num_kv_heads, problem.group_size) == (2, 8, 4, 2)
    assert (problem.max_q_len, problem.max_kv_len, problem.head_dim, problem.value_dim) == (5, 7, 16, 24)
    assert call.options.scale == 0.25
    assert call.options.q_offset.tolist() == [2, 2]
    assert call.options.window == (None, 0)
    assert problem.mask is None


def test_bshd_names_the_same_problem() -> None:
    swapped = [a.transpose(0, 2, 1, 3) for a in (Q, K, V)]
    assert attention_call(*swapped, layout="bshd").problem == dataclasses.replace(
        attention_call(Q, K, V).problem, layout="bshd")


def test_a_causal_mask_closes_the_right_side_of_a_window() -> None:
    assert causal_window("top_left", (4, 9)) == (4, 0)
    assert causal_window(None, (4, 9)) == (4, 9)


def test_half_masks_become_float32() -> None:
    half = [a.astype(np.float16) for a in (Q, K, V)]
    call = attention_call(*half, mask=np.full((5, 7), -np.inf, np.float16))
    assert call.mask is not None
    assert call.mask.dtype == np.float32
    assert call.mask.shape == (1, 1, 5, 7)
    assert call.problem.mask == "float32"


@pytest.mark.parametrize("rest", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_mask_may_hold_anything_beyond_the_live_keys(rest: float, dtype: Any) -> None:
    arrays = [a.astype(dtype) for a in (Q, K, V)]
    mask = np.zeros((2, 1, 5, 7), dtype)
    mask[0, :, :, 3:] = rest
    mask[1, :, :, 5:] = rest
    attention_call(*arrays, mask=mask, kv_len=[3, 5])
    attention_call(*arrays, mask=mask[0, 0], kv_len=[3, 2])
    with pytest.raises(OptionError, match="NaN or plus infinity"):
        attention_call(*arrays, mask=mask, kv_len=[4, 5])
    with pytest.raises(OptionError, match="NaN or plus infinity"):
        attention_call(*arrays, mask=mask[0, 0], kv_len=[3, 5])


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_a_mask_that_numpy_broadcast_is_not_spread(dtype: Any) -> None:
    rows = np.broadcast_to(np.ones((5, 7), dtype), (2, 8, 5, 7))
    columns = np.broadcast_to(np.ones((2, 1, 1, 7), dtype), (2, 8, 5, 7))
    for mask, shape in ((rows, (1, 1, 5, 7)), (columns, (2, 1, 1, 7)),
                        (np.broadcast_to(np.ones((), dtype), (2, 8, 5, 7)), (1, 1, 1, 1))):
        checked = attention_call(Q, K, V, mask=mask).mask
        assert checked is not None
        assert checked.shape == shape


def test_numbers_may_come_as_any_scalar() -> None:
    options = attention_call(Q, K, V, scale=np.float16(0.5), softcap=np.array(3), window=np.array([1, 2]),
                             sinks=range(8), q_offset=np.int8(-3), kv_len=np.array([1, 2], np.uint64),
                             return_lse=np.bool_(True)).options
    assert (options.scale, options.softcap, options.window, options.return_lse) == (0.5, 3, (1, 2), True)
    assert (options.q_offset.tolist(), options.kv_len.tolist()) == ([-3, -3], [1, 2])


@pytest.mark.parametrize("device", ["llvmpipe", 0, object()])
def test_a_device_must_be_one(device: Any) -> None:
    for function in (vkattn.attention, vkattn.scaled_dot_product_attention):
        with pytest.raises(OptionError, match=r"`device` is .*Hint: vkattn.Device"):
            function(Q, Q, Q, device=device)


@pytest.mark.parametrize("algorithm", [None, ["auto"], np.array(["auto", "auto"])])
def test_an_algorithm_must_be_a_name(algorithm: Any) -> None:
    with pytest.raises(OptionError, match="`algorithm` is"):
        choose(attention_call(Q, K, V).problem, fake_device_info(), algorithm)


TORCH_NAMED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("query ragged", {"query": [[1.0], [2.0, 3.0]]}, DTypeError, "`query` of type list"),
    ("value that cannot be converted", {"value": Unwilling()}, DTypeError, "`value` of type Unwilling"),
    ("mask that cannot be converted", {"attn_mask": Unwilling()}, DTypeError, "`attn_mask` of type Unwilling"),
    ("dropout array", {"dropout_p": np.zeros(2)}, OptionError, "`dropout_p` is"),
    ("is_causal array", {"is_causal": np.array([1, 0])}, OptionError, "`is_causal` is"),
    ("enable_gqa word", {"enable_gqa": "yes"}, OptionError, "`enable_gqa` is"),
]


@pytest.mark.parametrize(("change", "error", "words"), [row[1:] for row in TORCH_NAMED],
                         ids=[row[0] for row in TORCH_NAMED])
def test_wrong_torch_named_calls(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        vkattn.scaled_dot_product_attention(**({"query": Q, "key": Q, "value": Q} | change))


@pytest.mark.parametrize("change", [{"dropout_p": 0.1}, {"attn_mask": np.ones((5, 7), bool), "is_causal": True}])
def test_torch_named_refusals(change: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"dropout_p|is_causal"):
        vkattn.scaled_dot_product_attention(Q, Q, Q, **change)


def test_torch_named_shapes() -> None:
    with pytest.raises(ShapeError, match=r"do not broadcast\. Hint: enable_gqa=True lets each KV head serve 2 query"):
        vkattn.scaled_dot_product_attention(Q, K, V)  # 8 against 4 heads
    for key in (K[:, :3], np.concatenate([K, K[:1]])):  # what enable_gqa would not mend either
        with pytest.raises(ShapeError, match=r"do not broadcast\.$"):
            vkattn.scaled_dot_product_attention(Q, key, key)
    with pytest.raises(ShapeError, match="at least two"):
        vkattn.scaled_dot_product_attention(Q[0, 0, 0], K, V)
    with pytest.raises(ShapeError, match="at least three"):
        vkattn.scaled_dot_product_attention(Q[0, 0], K[0, 0], V[0, 0], enable_gqa=True)

"""Names of dtypes, and which arrays have one."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from vkattn import dtypes
from vkattn.errors import DTypeError


@pytest.mark.parametrize("name", dtypes.FLOAT_DTYPES)
def test_tables_agree_with_numpy(name):
    dtype = dtypes.numpy_dtype(name)
    assert dtype.name == name
    assert dtype.itemsize == dtypes.ITEM_BYTES[name]
    assert dtypes.dtype_name(np.zeros(3, dtype), "query") == name
    assert set(dtypes.AXIS) == set(dtypes.ITEM_BYTES) == set(dtypes.FLOAT_DTYPES)


def test_bfloat16_is_that_of_ml_dtypes():
    assert dtypes.numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)


def test_bfloat16_needs_ml_dtypes_only_when_asked_for():
    code = (
        "import sys; from vkattn import dtypes; assert 'ml_dtypes' not in sys.modules;"
        "dtypes.numpy_dtype('float16'); assert 'ml_dtypes' not in sys.modules;"
        "assert dtypes.numpy_dtype('bfloat16').name == 'bfloat16'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_ml_dtypes_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes.numpy_dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # its import fails
    with pytest.raises(DTypeError, match=r"need the package ml_dtypes\. Hint: pip install ml_dtypes"):
        dtypes.numpy_dtype("bfloat16")
    assert dtypes.numpy_dtype("float16") == np.float16


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.bool_, np.complex64, object])
def test_other_dtypes_are_refused_with_a_hint(dtype):
    with pytest.raises(DTypeError, match=r"`key` is .*; supported: float32, .*\. Hint: pass key\.astype"):
        dtypes.dtype_name(np.zeros(3, dtype), "key")


def test_a_dtype_that_is_known_but_not_supported_here():
    with pytest.raises(DTypeError, match=r"`mask` is float16; supported: float32\.$"):
        dtypes.dtype_name(np.zeros(3, np.float16), "mask", ("float32",))


def test_what_is_not_an_array_has_the_dtype_numpy_gives_it():
    with pytest.raises(DTypeError, match="`query` is float64"):
        dtypes.dtype_name([1.0, 2.0], "query")

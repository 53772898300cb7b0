"""vkattn.attention on the device against the oracle, over drawn shapes, dtypes, options, layouts and views.

Bounded and the same in every run by default; VKATTN_LONG=1 draws thousands.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

import vkattn
from tests.strategies import Case, cases
from tests.tolerance import assert_matches_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.property]


@given(case=cases())
def test_attention_is_the_oracle(device, case: Case):
    out, lse = vkattn.attention(*case.poisoned, return_lse=True, device=device, **case.options)
    assert_matches_oracle(out, *case.poisoned, lse=lse, **case.options)


@given(case=cases())
def test_what_lies_beyond_the_live_length_changes_no_bit(device, case: Case):
    """Poison beyond kv_len does not show, and the same call gives the same bits whatever ran before it.

    Poison elsewhere (see the test above) may change a rounding: a kernel may sum what it must select differently.
    """
    clean, clean_lse = vkattn.attention(*case.clean, return_lse=True, device=device, **case.options)
    tail, tail_lse = vkattn.attention(*case.tail, return_lse=True, device=device, **case.options)
    np.testing.assert_array_equal(bits(tail), bits(clean))
    np.testing.assert_array_equal(tail_lse, clean_lse)
    vkattn.attention(*case.poisoned, device=device, **case.options)
    again = vkattn.attention(*case.clean, device=device, **case.options)
    np.testing.assert_array_equal(bits(again), bits(clean))


def bits(array: np.ndarray) -> np.ndarray:
    """Return floats as unsigned integers."""
    return array.view(f"u{array.itemsize}")

"""vkattn.attention on the device against the oracle, over drawn shapes, dtypes, options, layouts and views.

Bounded and the same in every run by default; VKATTN_LONG=1 draws thousands.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vkattn
from tests.strategies import THEMES, Case, cases
from tests.tolerance import assert_matches_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.property]


@pytest.mark.parametrize("theme", THEMES)
@given(data=st.data())
def test_attention_is_the_oracle(device, theme: str, data: st.DataObject):
    case = data.draw(cases(theme))
    out, lse = vkattn.attention(*case.poisoned, return_lse=True, device=device, **case.options)
    assert_matches_oracle(out, *case.poisoned, lse=lse, **case.options)


@given(case=cases())
def test_what_is_not_attended_changes_no_bit(device, case: Case):
    """Poison, memory layouts and what ran before do not show: the same call gives the same bits."""
    clean, clean_lse = vkattn.attention(*case.clean, return_lse=True, device=device, **case.options)
    poisoned, poisoned_lse = vkattn.attention(*case.poisoned, return_lse=True, device=device, **case.options)
    again = vkattn.attention(*case.clean, device=device, **case.options)
    np.testing.assert_array_equal(bits(poisoned), bits(clean))
    np.testing.assert_array_equal(poisoned_lse, clean_lse)
    np.testing.assert_array_equal(bits(again), bits(clean))


def bits(array: np.ndarray) -> np.ndarray:
    """Return floats as unsigned integers."""
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_poison_of_another_call_changes_no_bit(device, rng, dtype):
    """What a kernel notes about one call's values (here: NaN under a closed mask) must not live on in shared memory."""
    query, key, value = (
        rng.normal(size=shape).astype(dtype) for shape in [(1, 14, 45, 16), (1, 2, 95, 16), (1, 2, 95, 16)]
    )
    before = vkattn.attention(query, key, value, device=device)
    is_open = np.arange(95) % 32 != 5
    dirty_key, dirty_value = (np.where(is_open[:, None], array, np.nan).astype(dtype) for array in (key, value))
    dirty = vkattn.attention(query, dirty_key, dirty_value, mask=is_open, device=device)
    assert np.isfinite(dirty).all()
    after = vkattn.attention(query, key, value, device=device)
    np.testing.assert_array_equal(bits(after), bits(before))

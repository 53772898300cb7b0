"""Every algorithm and kernel on the device against the oracle, over drawn shapes, dtypes, options, layouts and views.

Bounded and the same in every run by default; VKATTN_LONG=1 draws thousands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkattn
from tests.strategies import THEMES, Case, cases
from tests.tolerance import Expected
from tests.ways import splits_of, ways
from vkattn.dtypes import FLOAT_DTYPES
from vkattn.kernels import split
from vkattn.ops import plan
from vkattn.runtime.device import Device
from vkattn.validate import attention_call

pytestmark = [pytest.mark.gpu, pytest.mark.property]

IS_LONG = os.environ.get("VKATTN_LONG") == "1"
#: Every plan compiles its kernels, which takes most of the time of the bounded form: there, buffers of one size let one
#: plan serve many examples, and only the theme that has all options has all dtypes.
MIN_WORDS = 1 << 18
MAX_PLANS = 64
DTYPES = {theme: FLOAT_DTYPES if IS_LONG or theme == "everything" else ("float32",) for theme in THEMES}
LONG_OR_BOUNDED = settings.get_profile(settings.get_current_profile_name()).max_examples
IS_SLOW = "SwiftShader" in os.environ.get("VKATTN_EXPECT_DEVICE", "")  # it compiles ten times as long as lavapipe
EXAMPLES = 12 if IS_SLOW and not IS_LONG else LONG_OR_BOUNDED
#: Into how many parts `split` cuts the keys; None leaves it the choice.
SPLITS = [None, None, 1, 2, 3, 7, *([split.MAX_SPLITS] if IS_LONG else [])]
#: Small enough that `three_pass` computes some examples in chunks.
SCORE_BUDGET_BYTES = 1 << 20


@pytest.fixture(scope="module")
def roomy_device(device: Device) -> Iterator[Device]:
    """A device of its own that keeps many plans, each for examples of any size."""
    with (Device(device.info.index, score_budget_bytes=SCORE_BUDGET_BYTES) as opened,
          mock.patch.object(plan, "MIN_WORDS", plan.MIN_WORDS if IS_LONG else MIN_WORDS)):
        opened.plans.max_plans = MAX_PLANS
        yield opened


def compare(device: Device, case: Case, data: st.DataObject, *, shuffles: bool) -> None:
    """Compute ``case`` in every way: each must be the oracle's, and what is not attended must change no bit of it."""
    expected = Expected(*case.poisoned, **case.options)
    splits = data.draw(st.sampled_from(SPLITS), label="splits")
    return_lse = data.draw(st.booleans(), label="return_lse of the clean call")
    problem = attention_call(*case.poisoned, **case.options).problem
    with splits_of(splits):
        chosen = ways(problem, device.info, shuffles=shuffles)
    for way in chosen:
        options = case.options | {"algorithm": way.algorithm, "device": device}
        with splits_of(splits), way.forced():
            out, lse = vkattn.attention(*case.poisoned, return_lse=True, **options)
            clean = vkattn.attention(*case.clean, return_lse=return_lse, **options)
        try:
            expected.check(out, lse)
            if return_lse:
                clean, clean_lse = clean
                np.testing.assert_array_equal(clean_lse, lse)
            np.testing.assert_array_equal(bits(clean), bits(out))
        except AssertionError as error:
            error.add_note(f"computed by {way}, num_splits {splits}")
            raise


def bits(array: np.ndarray) -> np.ndarray:
    """Return floats as unsigned integers."""
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("theme", THEMES)
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_every_algorithm_is_the_oracle(roomy_device: Device, theme: str, data: st.DataObject) -> None:
    """Poison, memory layouts and whether lse is asked for do not show either.

    Kernels that only other devices choose are compiled for this in the long form.
    """
    compare(roomy_device, data.draw(cases(theme, dtypes=DTYPES[theme])), data, shuffles=IS_LONG)


@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_short_queries_by_every_kernel(roomy_device: Device, data: st.DataObject) -> None:
    """The same for the kernels of `split` with shuffles too: of these there are too many for all sizes."""
    compare(roomy_device, data.draw(cases(few_kernels=True)), data, shuffles=True)


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

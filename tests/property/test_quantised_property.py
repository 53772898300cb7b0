"""Every algorithm and kernel over quantised keys and values against the oracle, with codes and scales of all kinds.

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

from tests.strategies_quantised import QuantisedCase, quantised_cases
from tests.tolerance import Expected
from tests.ways import splits_of, ways
from vkattn.kernels import split_cut
from vkattn.ops import plan
from vkattn.ops.attention import compute
from vkattn.runtime.device import Device

pytestmark = [pytest.mark.gpu, pytest.mark.property]

IS_LONG = os.environ.get("VKATTN_LONG") == "1"
IS_SLOW = "SwiftShader" in os.environ.get("VKATTN_EXPECT_DEVICE", "")  # it compiles ten times as long as lavapipe
LONG_OR_BOUNDED = settings.get_profile(settings.get_current_profile_name()).max_examples
EXAMPLES = 10 if IS_SLOW and not IS_LONG else LONG_OR_BOUNDED
#: As in test_attention_property.py: plans of one size, kept, so that few kernels are compiled.
MIN_WORDS, MAX_PLANS = 1 << 18, 64
SPLITS = [None, None, 1, 2, 5, *([split_cut.MAX_SPLITS] if IS_LONG else [])]


@pytest.fixture(scope="module")
def roomy_device(device: Device) -> Iterator[Device]:
    """A device of its own that keeps many plans, each for examples of any size."""
    with (Device(device.info.index) as opened,
          mock.patch.object(plan, "MIN_WORDS", plan.MIN_WORDS if IS_LONG else MIN_WORDS)):
        opened.plans.max_plans = MAX_PLANS
        yield opened


@given(case=quantised_cases(), splits=st.sampled_from(SPLITS))
@settings(max_examples=EXAMPLES)
def test_every_algorithm_is_the_oracle(roomy_device: Device, case: QuantisedCase, splits: int | None) -> None:
    """Rows that nobody attends, whose scales are no numbers, change no bit.

    Kernels that only other devices choose are tried too, but on a device that compiles slowly in the long form only.
    """
    expected = Expected(case.query, *case.exact, **case.options)
    poisoned, clean = case.call(case.poisoned), case.call(case.clean, return_lse=False)
    with splits_of(splits):
        chosen = ways(poisoned.problem, roomy_device.info, shuffles=IS_LONG or not IS_SLOW)
    for way in chosen:
        with splits_of(splits), way.forced():
            out, lse = compute(poisoned, roomy_device, way.algorithm)
            again, _ = compute(clean, roomy_device, way.algorithm)
        try:
            expected.check(out, lse)
            np.testing.assert_array_equal(again.view(f"u{again.itemsize}"), out.view(f"u{out.itemsize}"))
        except AssertionError as error:
            error.add_note(f"computed by {way}, num_splits {splits}")
            raise

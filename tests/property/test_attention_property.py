"""Every algorithm and kernel on the device against the oracle, over drawn shapes, dtypes, options, layouts and views.

Bounded and the same in every run by default; VKATTN_LONG=1 draws thousands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vkattn
from tests.strategies import THEMES, Case, cases
from tests.tolerance import Expected
from tests.ways import splits_of, ways
from vkattn import oracle
from vkattn.dtypes import FLOAT_DTYPES
from vkattn.kernels import split_cut
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
SPLITS = [None, None, 1, 2, 3, 7, *([split_cut.MAX_SPLITS] if IS_LONG else [])]
#: Small enough that `three_pass` computes some examples in chunks.
SCORE_BUDGET_BYTES = 1 << 20
#: A weight that no kernel rounds to 0.
LEAST_WEIGHT = 1e-30
SMALLEST = float(np.finfo(np.float64).tiny)


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


@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_what_is_not_finite_reaches_only_what_attends_it(roomy_device: Device, data: st.DataObject) -> None:
    """One element of a query, key or value: by every kernel of `split` too, no bit of anything else changes.

    NaN shows in every row that gives it a weight; of a value, in its element alone.
    """
    case = data.draw(cases(few_kernels=True))
    which, bad = data.draw(st.sampled_from(["query", "key", "value"])), data.draw(st.sampled_from([np.nan, np.inf]))
    layout = case.options["layout"]
    arrays = dict(zip(("query", "key", "value"), case.clean, strict=True))
    as_bhsd = {name: array if layout == "bhsd" else array.swapaxes(1, 2) for name, array in arrays.items()}
    if 0 in as_bhsd[which].shape:
        return
    place = tuple(data.draw(st.integers(0, size - 1)) for size in as_bhsd[which].shape)
    hit = weights_of(as_bhsd, place, which, case.options)
    spoilt = dict(as_bhsd)
    spoilt[which] = as_bhsd[which].copy()
    spoilt[which][place] = bad
    given = [array if layout == "bhsd" else array.swapaxes(1, 2) for array in spoilt.values()]
    problem = attention_call(*case.clean, **case.options).problem
    for way in ways(problem, roomy_device.info):
        options = case.options | {"algorithm": way.algorithm, "device": roomy_device, "return_lse": True}
        with way.forced():
            before, after = vkattn.attention(*case.clean, **options), vkattn.attention(*given, **options)
        outs = [out if layout == "bhsd" else out.swapaxes(1, 2) for out in (before[0], after[0])]
        reached = np.broadcast_to((hit > 0)[..., None], outs[0].shape).copy()
        if which == "value":
            reached[..., np.arange(reached.shape[-1]) != place[3]] = False
        lse_reached = hit > 0 if which != "value" else np.zeros_like(hit, bool)
        try:
            assert (bits(np.ascontiguousarray(outs[0])) == bits(np.ascontiguousarray(outs[1])))[~reached].all()
            assert (bits(before[1]) == bits(after[1]))[~lse_reached].all()
            if np.isnan(bad):
                shown = reached & (hit > LEAST_WEIGHT)[..., None]
                assert np.isnan(outs[1].astype(np.float32)[shown]).all()
                assert np.isnan(after[1][lse_reached & (hit > LEAST_WEIGHT)]).all()
        except AssertionError as error:
            error.add_note(f"{bad} in {which} {place}, computed by {way}")
            raise


def weights_of(arrays: dict[str, np.ndarray], place: tuple[int, ...], which: str,
               options: dict[str, Any]) -> np.ndarray:
    """Return the weight that each row ``[batch, heads, q_len]`` gives to the key or value at ``place``, above 0 if it
    attends it; for a query, the largest that its own row gives.
    """
    no_sinks = {name: given for name, given in options.items() if name not in ("sinks", "layout")}
    scores = oracle.attn_weights(arrays["query"], arrays["key"], **no_sinks)
    weights = np.where(np.isfinite(scores), np.maximum(oracle.softmax(scores, options.get("sinks")), SMALLEST), 0)
    batch, head, token = place[:3]
    hit = np.zeros(weights.shape[:3])
    if which == "query":
        hit[batch, head, token] = weights[batch, head, token].max(initial=0)
    else:
        group_size = weights.shape[1] // arrays["key"].shape[1]
        heads = slice(head * group_size, (head + 1) * group_size)
        hit[batch, heads] = weights[batch, heads, :, token]
    return hit


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

"""The oracle against torch, in float64: two independent definitions of scaled_dot_product_attention."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sdpa_cases import CALLS, make_call
from vkattn import oracle

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")


@pytest.mark.parametrize(("shape_name", "mask_name", "scale"), CALLS)
def test_same_as_torch(rng, shape_name, mask_name, scale):
    call = make_call(shape_name, mask_name, scale, rng)
    tensors = [torch.from_numpy(array).double() for array in (call.query, call.key, call.value)]
    options = dict(call.options)
    if "attn_mask" in options:
        mask = torch.from_numpy(options["attn_mask"])
        options["attn_mask"] = mask if mask.dtype == torch.bool else mask.double()
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **options).numpy()
    actual = oracle.scaled_dot_product_attention(call.query, call.key, call.value, **call.options)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)

    one_head, attention_options = call.as_attention()
    flat = oracle.attention(*one_head, **attention_options)
    np.testing.assert_allclose(flat.reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)

"""vkattn.scaled_dot_product_attention on the device against torch's function of that name on the CPU, call by call.

The same calls go through the oracle in tests/unit/test_oracle_torch.py. torch computes in float64 on the same rounded
inputs, so that what is measured is our error and not the sum of two.
"""

from __future__ import annotations

import numpy as np
import pytest

import vkattn
from tests.sdpa_cases import CALLS, make_call
from tests.tolerance import assert_close
from vkattn import oracle
from vkattn.errors import DTypeError, OptionError, ShapeError

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")


def in_torch(array: np.ndarray) -> torch.Tensor:
    """Return an array as a float64 tensor, or a bool one."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == torch.bool else tensor.double()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("shape_name", "mask_name", "scale"), CALLS)
def test_same_as_torch(device, rng, shape_name, mask_name, scale, dtype):
    call = make_call(shape_name, mask_name, scale, rng)
    arrays = [array.astype(dtype) for array in (call.query, call.key, call.value)]
    options = {name: in_torch(given) if name == "attn_mask" else given for name, given in call.options.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(*map(in_torch, arrays), **options).numpy()
    actual = vkattn.scaled_dot_product_attention(*arrays, **call.options, device=device)
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    one_head, attention_options = call.as_attention()
    size = oracle.magnitude(*one_head[:2], **attention_options)
    rows = (-1, 1, *actual.shape[-2:])
    assert_close(actual.reshape(rows), expected.reshape(rows), size)


ONES = np.ones((2, 4, 6, 8), np.float32)
#: Name, then query, key and value, and the options.
REFUSED = {
    "heads without enable_gqa": ((ONES, ONES[:, :2], ONES[:, :2]), {}),
    "heads that do not divide": ((ONES, ONES[:, :3], ONES[:, :3]), {"enable_gqa": True}),
    "head_dim": ((ONES, ONES[..., :7], ONES), {}),
    "columns of the mask": ((ONES, ONES, ONES), {"attn_mask": np.ones((6, 5), bool)}),
    "batch of the mask": ((ONES, ONES, ONES), {"attn_mask": np.ones((3, 1, 6, 6), bool)}),
    "dtypes": ((ONES, ONES, ONES.astype(np.float16)), {}),
    "one dimension": ((ONES[0, 0, 0], ONES, ONES), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(device, name):
    arrays, options = REFUSED[name]
    tensors = [torch.from_numpy(array) for array in arrays]
    torch_options = {k: torch.from_numpy(v) if k == "attn_mask" else v for k, v in options.items()}
    with pytest.raises((RuntimeError, ValueError)):
        torch.nn.functional.scaled_dot_product_attention(*tensors, **torch_options)
    with pytest.raises((ShapeError, OptionError, DTypeError)):
        vkattn.scaled_dot_product_attention(*arrays, **options, device=device)


@pytest.mark.parametrize(
    ("value", "options"), [(ONES[:, :, :5], {}), (ONES, {"attn_mask": np.ones((6, 6), bool), "is_causal": True})]
)
def test_what_torch_documents_as_an_error_is_refused(device, value, options):
    """Values of another length, and a mask together with is_causal: torch 2.13 on a CPU computes something."""
    with pytest.raises((ShapeError, OptionError)):
        vkattn.scaled_dot_product_attention(ONES, ONES, value, **options, device=device)

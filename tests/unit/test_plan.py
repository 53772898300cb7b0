"""What a plan refuses before anything is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fakes import fake_device_info
from vkattn.errors import CapacityError
from vkattn.kernels import three_pass
from vkattn.ops.plan import plan_key
from vkattn.validate import attention_call


def device_with(**overrides: Any) -> Any:
    return SimpleNamespace(info=fake_device_info(**overrides), score_budget_bytes=64 << 20)


@pytest.mark.parametrize(("q_len", "is_refused"), [(1 << 16, False), ((1 << 16) + 1, True)])
def test_a_bool_mask_has_no_more_elements_than_kernels_can_index(q_len: int, is_refused: bool) -> None:
    """2^32 elements are 512 MiB, far within the largest buffer of a GPU; the index of one more would wrap."""
    query, key = np.zeros((1, 1, q_len, 1), np.float32), np.zeros((1, 1, 1 << 16, 1), np.float32)
    mask = np.lib.stride_tricks.sliding_window_view(np.ones(q_len + (1 << 16) - 1, bool), 1 << 16)  # never read
    call, device = attention_call(query, key, key, mask=mask), device_with(max_storage_buffer_range=(1 << 32) - 1)
    if is_refused:
        with pytest.raises(CapacityError, match=r"`mask` has 4295032832 elements.*4294967296.*Hint"):
            plan_key(call, device, three_pass)
    else:
        assert plan_key(call, device, three_pass)[0].mask == 1 << 27


def test_an_array_beyond_the_largest_buffer_is_refused() -> None:
    x = np.broadcast_to(np.float32(0), (1, 1, 1 << 22, 64))
    with pytest.raises(CapacityError, match="`query` needs 1073741824 bytes"):
        plan_key(attention_call(x, x[:, :, :5], x[:, :, :5]), device_with(), three_pass)

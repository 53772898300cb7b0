"""What the one-dispatch algorithms need beyond inputs and outputs, at the sizes that the project promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fakes import fake_device_info
from vkattn.caps.model import DeviceInfo
from vkattn.kernels import fused, split, split_cut, three_pass
from vkattn.ops.plan import plan_key
from vkattn.validate import Call, attention_call

MIB = 1 << 20
ROOM: dict[str, Any] = {"max_storage_buffer_range": 1 << 31, "max_storage_buffers_per_stage": 16,
                        "max_shared_memory_bytes": 48 << 10, "max_workgroup_invocations": 1024,
                        "max_workgroup_size": (1024, 1024, 64),
                        "subgroup_operations": frozenset({"basic", "vote", "shuffle", "arithmetic", "ballot"})}
DEVICES = [fake_device_info(device_type=kind, subgroup_size=size, **ROOM)
           for kind, size in (("cpu", 4), ("cpu", 8), ("integrated", 16), ("discrete", 32), ("virtual", 32))]


def call_of(q_len: int, kv_len: int) -> Call:
    """Return a call of 24 query and 8 KV heads, head_dim 128, float16; its arrays take no memory."""
    arrays = [np.broadcast_to(np.float16(0), (1, heads, tokens, 128)) for heads, tokens in
              ((24, q_len), (8, kv_len), (8, kv_len))]
    return attention_call(*arrays, causal="bottom_right", return_lse=True)


def scratch_bytes(call: Call, info: DeviceInfo, module: Any) -> int:
    """Return the bytes of a plan's buffers that are neither inputs nor outputs, for every way to hold the call."""
    assert not module.not_supported_reasons(call.problem, info)
    key, _ = plan_key(call, SimpleNamespace(info=info, score_budget_bytes=64 * MIB), module)
    arrays = sum(getattr(key, name) for name in ("query", "key", "value", "mask", "out", "lse"))
    return key.nbytes - 4 * arrays


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: f"{info.device_type}-{info.subgroup_size}")
def test_fused_at_8192_tokens_needs_less_than_64_mib(info: DeviceInfo) -> None:
    call = call_of(8192, 8192)
    assert 0 < scratch_bytes(call, info, fused) < 64 * MIB
    assert scratch_bytes(call, info, three_pass) > 63 * MIB  # the score buffer is the whole budget: this is counted


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: f"{info.device_type}-{info.subgroup_size}")
@pytest.mark.parametrize("q_len", [1, 4, 21])
def test_split_at_131072_keys_needs_less_than_16_mib(info: DeviceInfo, q_len: int) -> None:
    call = call_of(q_len, 131072)
    assert 0 < scratch_bytes(call, info, split) < 16 * MIB


def test_what_split_needs_is_what_its_parts_take() -> None:
    """24 query heads in items of up to 8 rows, each split into at most 128 parts of a row and its state."""
    problem = call_of(1, 131072).problem
    for info in DEVICES:
        words = split.scratch_words(problem, info, 1 << 30)
        rows = split.shape(problem, info).rows
        most = 8 * -(-3 // rows) * split_cut.MAX_SPLITS * rows * (128 + 4)
        assert words["parts"] <= most
        assert words["tickets"] == 8 * -(-3 // rows)

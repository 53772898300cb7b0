"""Each algorithm of `vkattn.attention` by its name, what it refuses, and more items or keys than one dispatch takes."""

from __future__ import annotations

import numpy as np
import pytest

import vkattn
from tests.attention_cases import ANY_DTYPE, arrays, check
from tests.tolerance import assert_matches_oracle
from vkattn.runtime.device import Device


@pytest.mark.parametrize("algorithm", ANY_DTYPE)
def test_every_algorithm_by_name(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    for batch, heads, q_len, kv_len, head_dim, value_dim in (
            (1, (2, 1), 3, 4, 8, 8), (2, (6, 2), 5, 700, 33, 65), (1, (8, 1), 8, 257, 128, 128),
            (2, (16, 1), 1, 100, 256, 17), (1, (3, 3), 64, 64, 20, 9)):
        inputs = arrays(rng, batch, heads, q_len, kv_len, head_dim, value_dim)
        mask = rng.random((q_len, kv_len)) < 0.7
        options = {"causal": "bottom_right", "mask": mask, "kv_len": kv_len - 1, "sinks": np.arange(heads[0]) * 0.5}
        check(device, inputs, algorithm=algorithm, **options)
        check(device, inputs, algorithm=algorithm)


def test_an_unknown_algorithm_is_refused_with_the_choices(device: Device, rng: np.random.Generator) -> None:
    with pytest.raises(vkattn.errors.OptionError, match=r"`algorithm` is 'flash'; supported: 'auto', 'split', "):
        vkattn.attention(*arrays(rng, 1, (2, 1), 3, 4, 8), algorithm="flash", device=device)


def test_an_algorithm_that_cannot_is_refused_with_its_reasons(device: Device, rng: np.random.Generator) -> None:
    inputs = arrays(rng, 1, (2, 1), 129, 4, 300)
    with pytest.raises(vkattn.errors.NoKernelError, match=r"(?s)split: q_len 129 x group_size 2 is 258 .*head_dim 300"):
        vkattn.attention(*inputs, algorithm="split", device=device)
    check(device, inputs)


@pytest.mark.once
def test_many_heads_and_batches(device: Device, rng: np.random.Generator) -> None:
    """More (batch, head) pairs than a dimension of a dispatch has workgroups."""
    check(device, arrays(rng, 70000, (1, 1), 1, 2, 4))


@pytest.mark.parametrize("algorithm", [*ANY_DTYPE, "auto"])
def test_many_items_by_each_algorithm(device: Device, rng: np.random.Generator, algorithm: str) -> None:
    """Llvmpipe ends an invocation's loops after 65535 rounds in all, without an error: work is cut before that."""
    inputs = arrays(rng, 4000 if "SwiftShader" in device.info.name else 20000, (1, 1), 1, 3, 4)
    if algorithm == "split" and "llvmpipe" in device.info.name:
        with pytest.raises(vkattn.errors.NoKernelError, match="65535 loop iterations"):
            vkattn.attention(*inputs, algorithm="split", device=device)
    else:
        check(device, inputs, algorithm=algorithm)


@pytest.mark.parametrize("kv_len", [30000, 100000])
def test_many_keys_for_many_rows_are_right_or_refused(device: Device, rng: np.random.Generator, kv_len: int) -> None:
    inputs = arrays(rng, 1, (1, 1), 65, kv_len, 4)
    if kv_len == 100000 and "llvmpipe" in device.info.name:
        with pytest.raises(vkattn.errors.NoKernelError, match=r"kv_len 100000 takes .* llvmpipe ends loops"):
            vkattn.attention(*inputs, device=device, algorithm="fused")
    check(device, inputs)  # there "auto" goes back to split, which cuts the keys
    check(device, [inputs[0][:, :, :2], *inputs[1:]])  # few rows: the keys are split


def test_values_that_are_all_infinite_over_many_keys(device: Device, rng: np.random.Generator) -> None:
    """Such values take more rounds of loops than any others, and masks more again; none may be cut short."""
    query, key, value = arrays(rng, 1, (1, 1), 4, 4000, 128)
    value[..., ::2] = np.inf
    options = {"mask": rng.random((4, 4000)) < 0.9, "softcap": 30.0}
    out = vkattn.attention(query, key, value, algorithm="fused", device=device, **options)
    assert (out[..., ::2] == np.inf).all()
    assert_matches_oracle(out[..., 1::2], query, key, value[..., 1::2], **options)

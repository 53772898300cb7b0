"""The subgroup kernels of `split` in subgroups of 16, as many GPUs have them: lavapipe with vectors of 512 bits.

A program, run by tests/gpu/kernels/test_attn_split.py: the driver reads the width of its vectors when it is loaded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.caches import Session, assert_holds
from tests.fakes import with_tuning
from tests.ways import splits_of
from vkattn import KVCache
from vkattn.runtime.device import Device

#: The dtype of the cache, head_dim, value_dim, splits (None is what a GPU chooses), and the kernel.
CASES = [
    ("float16", 128, 72, None, "attn_split_subgroup_f32_f16_r8_l16_q1"),
    ("float32", 100, 128, 5, "attn_split_subgroup_f32_f32_r8_l16_q2"),
    ("q4_0", 256, 200, 40, "attn_split_quant_subgroup_q4_0_l16"),
]


def main() -> None:
    """Decode with caches of each kind, a few tokens at a time, and compare with the oracle."""
    with Device() as device:
        print(device.info.subgroup_size)
        device.info = with_tuning(replace(device.info, device_type="discrete", tuning=None), split_subgroups=True)
        for dtype, head_dim, value_dim, splits, name in CASES:
            with splits_of(splits):
                cache = KVCache(2, 2, 300, head_dim, value_dim=value_dim, dtype=dtype, device=device)
                session = Session(cache, 6, np.random.default_rng(1))
                for start, tokens in ((0, 8), (8, 5), (np.array([3, 13]), 7), (10, 6)):
                    session.step(session.arrays(tokens), start)
                assert_holds(cache, session.model)
            (graph,) = cache.plans.values()
            assert name in [dispatch.variant.name for dispatch in graph._longest.dispatches]
            cache.close()


if __name__ == "__main__":
    main()

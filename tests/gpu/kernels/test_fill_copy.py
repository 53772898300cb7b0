"""fill and copy by themselves: exactly their words, whatever the number of workgroups."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.kernels.harness import GUARD, Rig
from vkattn.kernels.manifest import variant
from vkattn.runtime.device import Device

SIZE = 1 << 15
COUNTS = (0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 191, 192, 193, 4096, 4099, 20000)
GROUPS = (1, 3, 64)
NO_INDEX = 0xFFFFFFFF


@pytest.mark.parametrize("groups", GROUPS)
def test_fill_writes_its_words_only(device: Device, groups: int) -> None:
    starts = np.cumsum((0, *COUNTS))[:-1] + 5 + 3 * np.arange(len(COUNTS))
    fill = variant("fill")
    pushes = [{"offset": int(at), "count": count, "value": 0xABCD0000 + count}
              for at, count in zip(starts, COUNTS, strict=True)]
    rig = Rig(device, fill, pushes, {"dst": SIZE}, groups)
    expected = np.full(SIZE, GUARD, np.uint32)
    for push in pushes:
        expected[push["offset"] : push["offset"] + push["count"]] = push["value"]
    for _ in range(3):
        np.testing.assert_array_equal(rig.run({"dst": []})["dst"], expected)
    rig.close()


@pytest.mark.parametrize("groups", GROUPS)
def test_copy_moves_its_words_only(device: Device, rng: np.random.Generator, groups: int) -> None:
    source = rng.integers(0, 2**32, SIZE - 8, dtype=np.uint32)
    starts = np.cumsum((0, *COUNTS))[:-1] + 5 + 3 * np.arange(len(COUNTS))
    pushes = [{"count_index": NO_INDEX, "count": count, "src_offset": 11 * i, "dst_offset": int(at)}
              for i, (at, count) in enumerate(zip(starts, COUNTS, strict=True))]
    rig = Rig(device, variant("copy"), pushes, {"params": 16, "src": SIZE, "dst": SIZE}, groups)
    expected = np.full(SIZE, GUARD, np.uint32)
    for push in pushes:
        at, start = push["dst_offset"], push["src_offset"]
        expected[at : at + push["count"]] = source[start : start + push["count"]]
    np.testing.assert_array_equal(rig.run({"params": [], "src": [(0, source)], "dst": []})["dst"], expected)
    rig.close()


@pytest.mark.parametrize("groups", GROUPS)
def test_the_count_of_copy_may_be_data(device: Device, rng: np.random.Generator, groups: int) -> None:
    """The pushed count is then ignored, and one recording moves another number of words at each run."""
    source = rng.integers(0, 2**32, SIZE - 8, dtype=np.uint32)
    push = {"count_index": 7, "count": 9999, "src_offset": 3, "dst_offset": 21}
    rig = Rig(device, variant("copy"), [push], {"params": 16, "src": SIZE, "dst": SIZE}, groups)
    for count in (*COUNTS, *COUNTS[::-1]):
        words = np.array([count], np.uint32)
        after = rig.run({"params": [(7, words)], "src": [(0, source)], "dst": []})["dst"]
        expected = np.full(SIZE, GUARD, np.uint32)
        expected[21 : 21 + count] = source[3 : 3 + count]
        np.testing.assert_array_equal(after, expected)
    rig.close()

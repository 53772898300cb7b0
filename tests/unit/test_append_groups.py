"""How many workgroups an append has: enough for its rows, in any format."""

import pytest

from vkattn.cache.append import append_groups


@pytest.mark.parametrize(("rows", "dims", "dtypes", "expected"), [
    (1, (4, 4), ("float16", "float16"), 1),
    (8, (128, 128), ("float16", "float16"), 8),  # 8 x 64 vecs
    (9, (65, 3), ("float32", "float32"), 3),  # 9 x 18 vecs
    (3, (64, 64), ("int8", "int8"), 6),
    (3, (64, 64), ("float16", "q4_0"), 6),
    (0, (64, 64), ("int8", "int8"), 1),
])
def test_groups(rows: int, dims: tuple[int, int], dtypes: tuple[str, str], expected: int) -> None:
    assert append_groups(rows, dims, dtypes) == expected

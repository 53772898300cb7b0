"""The oracle against every case of the ONNX backend: this proves the mapping that the device's tests use."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.onnx_cases import NUM_CASES, Case, cases
from vkattn import oracle


def test_all_cases_are_there():
    assert len(cases()) == NUM_CASES
    assert len({case.name for case in cases()}) == NUM_CASES
    dtypes = Counter(case.query.dtype.name for case in cases())
    assert dtypes == {"float32": 82, "float16": 6, "bfloat16": 5}
    layouts = Counter(case.options["layout"] for case in cases())
    assert layouts == {"bhsd": 68, "bshd": 25}
    options = Counter(option for case in cases() for option in case.options if option != "layout")
    assert options == {
        "mask": 52, "causal": 32, "q_offset": 22, "kv_len": 13, "softcap": 11, "window": 10, "scale": 6,
    }  # fmt: skip


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_oracle_gives_the_answer_of_onnx(case: Case):
    out = oracle.attention(case.query, case.key, case.value, **case.options)
    case.assert_expected(out.astype(case.expected.dtype))

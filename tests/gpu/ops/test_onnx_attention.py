"""Every case of the ONNX backend's operator Attention on the device, against ONNX's answer and the oracle's.

tests/unit/test_oracle_onnx.py proves that the mapping of `tests.onnx_cases` is right.
"""

from __future__ import annotations

import pytest

import vkattn
from tests.onnx_cases import Case, cases
from tests.tolerance import assert_matches_oracle

#: Options that `vkattn.attention` does not have yet, and the cases that need each, by name. A case listed here must
#: raise NotImplementedError naming the option; a case that is not listed must be right.
OPTIONS_NOT_YET: dict[str, list[str]] = {}


def not_yet(case: Case) -> list[str]:
    """Return the missing options for which ``case`` is listed."""
    return [option for option, names in OPTIONS_NOT_YET.items() if case.name in names]


def test_the_list_of_missing_options_is_exact():
    """An option is listed with exactly the cases that need it."""
    needed = {option: [case.name for case in cases() if option in case.needs] for option in OPTIONS_NOT_YET}
    assert needed == OPTIONS_NOT_YET


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(device, case: Case):
    def run():
        return vkattn.attention(
            case.query, case.key, case.value, return_lse=True, device=device, **case.options
        )  # fmt: skip

    if missing := not_yet(case):
        with pytest.raises(NotImplementedError, match="|".join(missing)):
            run()
        return
    out, lse = run()
    assert out.dtype == case.query.dtype
    case.assert_expected(out)
    assert_matches_oracle(out, case.query, case.key, case.value, lse=lse, **case.options)

"""Steps of a graph go into submissions by what they are estimated to take."""

from __future__ import annotations

import pytest

from vkattn.graph.steps import Step, submissions
from vkattn.kernels.manifest import variant


def steps(*seconds: float) -> list[Step]:
    return [Step("node", variant("copy"), (), (), seconds=estimate) for estimate in seconds]


@pytest.mark.parametrize(("seconds", "expected"), [
    ((), []),
    ((0.0, 0.0, 0.0), [0, 0, 0]),
    ((0.5, 0.5, 0.5), [0, 0, 1]),
    ((0.5, 0.0, 0.6, 0.0, 0.3), [0, 0, 1, 1, 1]),
    ((3.0, 0.1, 3.0), [0, 1, 2]),  # what takes longer alone stands alone
    ((0.0, 3.0), [0, 0]),  # a submission without work to speak of takes anything
])
def test_no_submission_is_long(seconds: tuple[float, ...], expected: list[int]) -> None:
    assert submissions(steps(*seconds), 1.0) == expected

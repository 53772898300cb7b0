"""The bounded set of plans: which one has to go, when, and that it is closed."""

from __future__ import annotations

import pytest

from vkattn.lru import MAX_PLANS, BoundedPlans


class FakePlan:
    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self.times_closed = 0

    def close(self) -> None:
        self.times_closed += 1


def test_a_plan_is_made_once() -> None:
    plans, made = BoundedPlans(), []

    def make() -> FakePlan:
        made.append(FakePlan())
        return made[-1]

    assert plans.get("a", make) is plans.get("a", make)
    assert len(made) == len(plans) == 1


def test_the_least_recently_used_plan_is_closed_first() -> None:
    plans = BoundedPlans(max_plans=3)
    a, b, c = (plans.get(key, FakePlan) for key in "abc")
    plans.get("a", FakePlan)
    d = plans.get("d", FakePlan)
    assert plans.values() == [c, a, d]
    assert [plan.times_closed for plan in (a, b, c, d)] == [0, 1, 0, 0]
    assert plans.get("b", FakePlan) is not b


def test_16_plans_live_at_most_unless_told_otherwise() -> None:
    plans = BoundedPlans()
    made = [plans.get(key, FakePlan) for key in range(40)]
    assert len(plans) == MAX_PLANS == 16
    assert [plan.times_closed for plan in made] == [1] * 24 + [0] * 16


def test_bytes_are_bounded_before_the_new_plan_is_made() -> None:
    plans = BoundedPlans(max_bytes=100)
    old = plans.get("old", lambda: FakePlan(60))
    alive_at_making = []

    def make() -> FakePlan:
        alive_at_making.append(old.times_closed == 0)
        return FakePlan(50)

    plans.get("new", make, nbytes=50)
    assert alive_at_making == [False]
    assert (len(plans), plans.nbytes) == (1, 50)
    plans.get("small", lambda: FakePlan(50), nbytes=50)
    assert (len(plans), plans.nbytes) == (2, 100)


def test_a_single_plan_may_be_larger_than_the_bound() -> None:
    plans = BoundedPlans(max_bytes=100)
    plans.get("small", lambda: FakePlan(10))
    large = plans.get("large", lambda: FakePlan(1000), nbytes=1000)
    assert plans.values() == [large]
    assert plans.get("large", FakePlan) is large


def test_a_plan_that_cannot_be_made_is_not_kept() -> None:
    plans = BoundedPlans()

    def fail() -> FakePlan:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        plans.get("a", fail)
    assert len(plans) == 0
    assert isinstance(plans.get("a", FakePlan), FakePlan)


def test_clear_closes_each_plan_once() -> None:
    plans = BoundedPlans()
    made = [plans.get(key, FakePlan) for key in range(5)]
    plans.clear()
    plans.clear()
    assert len(plans) == 0
    assert [plan.times_closed for plan in made] == [1] * 5

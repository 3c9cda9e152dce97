"""The order of calls, and what is planned for which numbers."""

from itertools import pairwise

import pytest

from samebits.checks.compile.job import Job, StepRecord
from samebits.checks.compile.sequence import Option, Scenario, plan
from samebits.checks.compile.target import Target

pytestmark = pytest.mark.reference

LIMIT = Option("limit", (0.5, 1.5, 2.5, 3.5))
FLAG = Option("flag", (True, False))


def values(scenario, phase):
    return [step.values["limit"] for step in scenario.steps(phase) if step.shape == 0]


def test_a_sequence_comes_back_to_its_second_value():
    assert values(Scenario("s", (LIMIT,), True, None, 2), "fresh") == [0.5, 1.5, 2.5, 3.5, 1.5]


def test_the_second_process_has_another_order_and_begins_with_a_later_value():
    scenario = Scenario("s", (LIMIT,), True, None, 2)

    assert values(scenario, "warm")[0] == 2.5
    assert set(values(scenario, "warm")) == set(LIMIT.values)
    assert values(scenario, "warm") != values(scenario, "fresh")


@pytest.mark.parametrize("phase", ["fresh", "warm"])
def test_both_shapes_are_called(phase):
    scenario = Scenario("s", (LIMIT,), True, None, 2)

    assert {step.shape for step in scenario.steps(phase)} == {0, 1}


def test_a_bool_alternates():
    steps = Scenario("s", (FLAG,), False, None, 1).steps("fresh")

    assert [step.values["flag"] for step in steps] == [True, False, True, False, False]


def test_in_pairs_each_number_changes_while_the_other_stays():
    steps = Scenario("s", (LIMIT, Option("eps", (1, 2, 3, 4))), False, None, 1).steps("fresh")

    moves = [(a.values, b.values) for a, b in pairwise(steps)]

    assert any(a["limit"] != b["limit"] and a["eps"] == b["eps"] for a, b in moves)
    assert any(a["eps"] != b["eps"] for a, b in moves)


def test_the_plan_crosses_gradient_and_dynamic_and_begins_with_floats():
    scenarios, left_out = plan([FLAG, LIMIT], gradients=[False, True], shapes=2)

    assert [s.options[0].path for s in scenarios[:4]] == ["limit"] * 4
    assert {(s.gradient, s.dynamic) for s in scenarios[:4]} == {
        (g, d) for g in (False, True) for d in (None, True)
    }
    assert len(scenarios) == 12
    assert left_out == []


def test_pairs_that_are_left_out_are_named():
    options = [Option(f"n{i}", (1.5, 2.5)) for i in range(5)]

    _, left_out = plan(options, gradients=[False], shapes=1)

    assert len(left_out) == 4


def test_a_job_is_read_as_it_was_written(tmp_path):
    scenario = Scenario("s", (LIMIT,), True, None, 2, "new_ones")
    job = Job(
        kind="run",
        target=Target("a:b"),
        folder=str(tmp_path),
        output="o",
        scenarios=(scenario,),
        first={"s": {"out": 1e-8}},
        fault=StepRecord("s", "warm", 2, {"limit": 0.5}),
    )

    job.write(tmp_path / "job")

    assert Job.read(tmp_path / "job") == job
    assert job.cache_of(scenario).startswith(str(tmp_path))

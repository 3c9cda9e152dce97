"""What an audit says as JSON."""

import json
import math

import pytest

from samebits.checks.compile.job import StepRecord
from samebits.checks.compile.record import Audit, Surveyed
from samebits.checks.compile.report import results, to_json
from samebits.checks.compile.sequence import PHASES, Option, Scenario

pytestmark = pytest.mark.reference


def test_numbers_that_are_not_finite_leave_json_valid():
    values = (math.inf, 1.0)
    scenario = Scenario("s", (Option("limit", values),), gradient=False, dynamic=None, shapes=1)
    found = Audit("a:b", {}, [Surveyed("limit", "float", values, "")], [scenario])
    found.steps.append(
        StepRecord(
            "s", "fresh", 1, {"limit": math.inf}, wrong=True, distance=math.inf, actual=math.nan
        )
    )

    said = json.loads(json.dumps(to_json(found), allow_nan=False))

    assert said["numbers"][0]["values"] == ["inf", 1.0]
    (result,) = said["results"]
    assert (result["verdict"], result["measured"]) == ("fail", None)
    assert "measured is not finite" in result["note"]
    assert said["faults"][0]["wrong_calls"][0]["actual"] == "nan"


@pytest.mark.parametrize(("phases", "verdict"), [(("fresh",), "not_run"), (PHASES, "pass")])
def test_a_sequence_without_its_second_process_is_no_pass(phases, verdict):
    scenario = Scenario("s", (Option("limit", (1.0, 2.0)),), False, None, 1)
    found = Audit("m:f", {}, scenarios=[scenario])
    for phase in phases:
        found.steps += [StepRecord("s", phase, index, {"limit": 1.0}) for index in range(5)]

    assert [result.verdict for result in results(found)] == [verdict]


def looked_up(keys, **facts):
    """Return an audit of calls that were right, each of another value, with these keys."""
    scenario = Scenario("s", (Option("limit", (1.0, 2.0, 3.0, 4.0)),), False, None, 1)
    found = Audit("m:f", {}, scenarios=[scenario])
    for phase in PHASES:
        for index, step in enumerate(scenario.steps(phase)):
            value = step.values["limit"]
            key = keys(phase, value)
            record = StepRecord("s", phase, index, dict(step.values))
            if key and value != 1.0:
                record.keys = {key: [f"Eq(limit, {value})"], "of a graph that forgets nothing": []}
                for name, fact in facts.items():
                    setattr(record, name, fact)
            found.steps.append(record)
    return found


@pytest.mark.parametrize(
    ("keys", "verdict"),
    [
        (lambda phase, value: "one for all", "fail"),
        # As the constants of a Triton kernel are part of the key.
        (lambda phase, value: f"of {value}", "pass"),
        # A key that counts launches looks alike in the second process only.
        (lambda phase, value: f"{value if phase == 'fresh' else value % 3 + 2}", "fail"),
        # Nothing to compare it with.
        (lambda phase, value: "of two" if value == 2.0 else "", "fail"),
    ],
    ids=["shared", "told apart", "shared by processes", "one value"],
)
def test_a_forgotten_guard_is_a_fault_where_the_key_does_not_tell_the_value(keys, verdict):
    found = looked_up(keys)

    assert [result.verdict for result in results(found)] == [verdict]
    assert [bool(fault["guards"]) for fault in to_json(found)["faults"]] == [True] * (
        verdict == "fail"
    )


@pytest.mark.parametrize(("branched", "verdict"), [(False, "fail"), (True, "pass")])
def test_code_of_another_value_is_rightly_reused_by_a_function_that_branches(branched, verdict):
    found = looked_up(lambda phase, value: f"of {value}", reused=1, branched=branched)

    assert [result.verdict for result in results(found)] == [verdict]

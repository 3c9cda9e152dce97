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

"""What the check says about any framework: verdicts, findings, figures."""

import json
import math

import pytest
import torch
from models_provider import Toy, ToyCase, ToyLanguage, ToyProvider

from samebits.checks.models import language
from samebits.checks.models.experts import judge_case, judge_class, judge_found
from samebits.checks.models.finding import Finding, worst

pytestmark = pytest.mark.reference

PROVIDER = ToyProvider()


def judge(implementation, case="default", dtype=torch.float32):
    found = judge_case(ToyCase("toy.Experts", odd=False), PROVIDER, [implementation], dtype)
    return {f.quantity: f for f in found if f.case == case}


def verdicts(*arguments):
    return {name: f.verdict for name, f in judge(*arguments).items()}


@pytest.mark.parametrize("case", ["default", "dropped", "sensitivity:slope"])
def test_what_is_right_passes_every_case(case):
    assert verdicts("eager", case) == {"out": "pass", "d_x": "pass"}


OTHERS = {
    "wrong": {"out": "fail", "d_x": "pass"},
    "infinite": {"out": "fail", "d_x": "pass"},
    "incomplete": {"all": "fail", "out": "pass"},
    "misshapen": {"out": "fail", "d_x": "pass"},
    "absent": {"all": "not_run"},
    "refusing": {"all": "unsupported"},
    "crashing": {"all": "fail"},
}


@pytest.mark.parametrize(("implementation", "expected"), OTHERS.items(), ids=OTHERS)
def test_anything_else_gets_the_verdict_that_it_deserves(implementation, expected):
    assert verdicts(implementation) == expected


def test_a_change_that_is_not_followed_fails_only_there():
    assert verdicts("stale") == {"out": "pass", "d_x": "pass"}
    assert verdicts("stale", "sensitivity:slope") == {"out": "fail", "d_x": "fail"}
    # In bf16 gradients are left out: see CONTINUOUS.
    assert verdicts("stale", "sensitivity:slope", torch.bfloat16) == {"out": "fail"}


def test_a_finding_says_what_was_run_and_where_it_is_worst():
    finding = judge("wrong")["out"]
    assert finding.model == "toy.Experts"
    assert finding.evidence == "arguments"
    assert finding.dtype == "fp32"
    assert finding.measured > finding.allowed > 0
    assert finding.worst_row in range(4)
    assert "T=4 K=1 E=2 H=16 F=8" in finding.note
    assert "the toy's loop" in finding.note


def test_an_error_message_keeps_all_its_lines_on_one():
    assert judge("refusing")["all"].note == "ToyError: no · odd sizes"


def test_two_functions_in_one_class_fail_the_class():
    found = {
        f.quantity: f for f in judge_class(ToyCase("toy.TwoFunctions", odd=False), torch.float32)
    }
    assert (found["out"].verdict, found["d_x"].verdict) == ("pass", "fail")
    assert found["d_x"].implementation == "class"


def test_a_limit_that_does_not_bind_is_no_pass():
    found = {f.quantity: f for f in judge_class(ToyCase("toy.Experts", odd=False), torch.float32)}
    assert found["binding:limit"].verdict == "not_run"
    assert "10% below" in found["binding:limit"].note
    assert "too few" in found["binding:limit"].note


def test_a_class_that_cannot_be_built_is_not_run():
    found = list(judge_found(Toy("toy.Unbuildable"), PROVIDER, ["eager"], [torch.float32]))
    assert {(f.case, f.verdict) for f in found} == {("default", "not_run"), ("odd", "not_run")}
    assert "no configuration fits" in found[0].note


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("toy.Broken", "not built: ZeroDivisionError: in its constructor"),
        ("toy.NoOracle", "ToyError: needs a device"),
    ],
)
def test_a_class_whose_own_code_raises_is_not_run(name, note):
    found = list(judge_found(Toy(name), PROVIDER, ["eager"], [torch.float32]))
    assert {(f.case, f.verdict) for f in found} >= {("default", "not_run"), ("odd", "not_run")}
    assert {f.verdict for f in found} == {"not_run"}
    assert all(note in f.note for f in found if not f.case.startswith("sensitivity"))


def test_a_class_that_takes_some_values_only_is_judged_at_those():
    found = list(judge_found(Toy("toy.Particular"), PROVIDER, ["eager"], [torch.float32]))
    others = {(f.quantity, f.verdict) for f in found if f.verdict != "pass"}
    assert others == {("binding", "not_run")}
    assert {f.verdict for f in found if f.case == "sensitivity:slope"} == {"pass"}


def judge_language(implementation, *, name="toy.LM", ablation=1.0):
    builder = ToyLanguage(name, ablation)
    found = language.judge_language(builder, PROVIDER, [implementation], [torch.float32])
    return {f.case: f for f in found}


def test_language_models_get_figures_and_a_control():
    found = judge_language("eager")
    assert {case: f.verdict for case, f in found.items()} == {
        "language_model": "pass",
        "control": "pass",
    }
    assert found["language_model"].figures["flips"] == 3
    assert found["language_model"].figures["choices"] == 128
    wrong = judge_language("wrong")["language_model"]
    assert wrong.verdict == "fail"
    assert wrong.figures["mean"] == wrong.figures["max"] == 0.5
    assert wrong.figures["outside_share"] == 1.0


def test_a_control_that_differs_fails_on_its_own():
    found = judge_language("split")
    assert found["language_model"].verdict == "pass"
    assert found["control"].verdict == "fail"


def test_language_models_that_say_nothing_are_not_run():
    assert judge_language("absent")["language_model"].verdict == "not_run"
    assert judge_language("eager", ablation=0.4)["language_model"].verdict == "not_run"
    assert judge_language("eager", name="toy.UnbuildableLM")["language_model"].verdict == "not_run"


def finding(**changes):
    values = {"model": "m.C", "case": "default", "implementation": "a", "dtype": "bf16"}
    return Finding(**(values | {"quantity": "out", "verdict": "pass"} | changes))


def test_figures_that_are_not_finite_become_null_and_the_note_says_so():
    line = json.loads(finding(measured=math.inf, allowed=1.0, figures={"max": math.nan}).to_json())
    assert line["measured"] is None
    assert line["allowed"] == 1.0
    assert line["figures"] == {"max": None}
    assert "measured not finite" in line["note"]


def test_the_worst_finding_is_the_plainest_failure():
    passes = finding(measured=0.5, allowed=1.0)
    late = finding(verdict="fail", case="sensitivity:x", measured=9.0, allowed=1.0)
    small = finding(verdict="fail", measured=2.0, allowed=1.0)
    large = finding(verdict="fail", measured=3.0, allowed=1.0)
    unknown = finding(verdict="fail", measured=math.nan, allowed=1.0)
    assert worst([passes, late, small, large]) is large
    assert worst([passes, late]) is late
    assert worst([large, unknown]) is unknown

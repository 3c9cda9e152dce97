"""Whole audits, in processes of their own: of planted compilers, of two programs by inductor."""

import json

import pytest
import torch

from samebits import cli
from samebits.checks.compile import TargetError, audit_compile, report
from samebits.checks.compile.audit import audit
from samebits.checks.compile.self_test import judge
from samebits.checks.compile.target import Target

pytestmark = pytest.mark.reference

KNOWN_BAD = "samebits.checks.compile.known_bad"


def verdicts(found):
    return {result.case: result.verdict for result in report.results(found)}


def notes(found):
    return " ".join(result.note for result in report.results(found))


def test_a_planted_fault_is_found_and_shown(capsys):
    code = cli.main(["check", "compile", f"{KNOWN_BAD}:planted", "--json", "--no-remedies"])

    found = json.loads(capsys.readouterr().out)

    assert code == 1
    assert found["faults"][0]["paths"] == ["scale"]
    wrong = found["faults"][0]["wrong_calls"][0]
    assert wrong["values"] != {"scale": 0.5}
    assert wrong["actual"] != wrong["expected"]


def test_a_right_compiler_passes_everything():
    found = audit(Target("planted:right"))

    assert len(verdicts(found)) == 4
    assert set(verdicts(found).values()) == {"pass"}
    assert found.reproducer is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dies", "the process ended with code 7"),
        ("raises", "this compiler cannot"),
        ("nothing_to_compile", "nothing was compiled"),
    ],
)
def test_what_could_not_be_compiled_is_not_run(name, reason):
    found = audit(Target(f"planted:{name}"))

    assert set(verdicts(found).values()) == {"not_run"}
    assert reason in notes(found)


def test_the_budget_ends_an_audit_that_hangs(capsys):
    code = cli.main(["check", "compile", "planted:hangs", "--budget", "25"])

    assert code == 3
    assert "the budget ran out" in capsys.readouterr().out


def test_a_fault_from_the_first_call_on_is_told_apart():
    found = audit(Target("planted:wrong_at_once"), stop_at_first=True, remedies=False)

    assert "not a stale number" in notes(found)


def test_a_launcher_that_remembers_fails():
    found = audit(Target("programs:forgetful_launch", "programs:tensor_and_int"))

    assert verdicts(found)["step"] == "fail"


def test_a_local_function_travels_to_other_processes():
    factor = 0.5

    def local(x):
        return x * factor

    found = audit_compile(local, lambda: ((torch.ones(2, 3),), {}), budget=1e-3)

    assert found.late
    assert found.target.endswith("local")


def test_what_cannot_travel_is_refused():
    class Inside:
        scale = 0.5

    inside = Inside()

    def local(x, options):
        return x * options.scale

    with pytest.raises(TargetError, match="cannot be sent to another process"):
        audit_compile(local, lambda: ((torch.ones(2),), {"options": inside}))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--self-test", "planted:right"],
        ["no_such_module:f"],
        ["planted:right", "--number", "nothing"],
        ["planted:right", "--budget", "0"],
    ],
)
def test_usage_errors_exit_with_2(arguments, capsys):
    assert cli.main(["check", "compile", *arguments]) == 2
    assert capsys.readouterr().err


def test_the_clamped_swiglu_is_found_with_this_torch_or_mended_by_it():
    found = audit(Target(f"{KNOWN_BAD}:clamped_swiglu"), stop_at_first=True, remedies=False)

    mended = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
    assert bool(found.wrong) is not mended
    assert judge("clamped_swiglu", found)[0] == "pass"
    if found.wrong:
        assert any("limit" in guard for step in found.steps for guard in step.dropped)


def test_inductor_is_right_where_a_float_is_only_multiplied():
    found = audit(Target("battery:multiply"), budget=600)

    assert set(verdicts(found).values()) == {"pass"}
    assert not found.latent

"""`samebits check models`: arguments, output, exit codes, and the schema of its JSON."""

import argparse
import json
import re

import pytest
from models_provider import ToyLanguage, ToyProvider
from models_schema import SCHEMA, breaches

from samebits.checks.models import add_arguments, main
from samebits.checks.models.finding import Finding
from samebits.checks.models.report import cell, issue_text, summary, table

pytestmark = pytest.mark.reference


def run(*words, provider=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(words), provider or ToyProvider())


def lines(capsys, *words, provider=None):
    code = run("--json", *words, provider=provider)
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_line_of_json_keeps_the_schema(capsys):
    able = ("eager", "wrong", "infinite", "absent", "refusing", "crashing", "incomplete")
    names = ("toy.Experts", "toy.TwoFunctions", "toy.Unbuildable")
    held = (ToyLanguage("toy.LM"), ToyLanguage("toy.UnbuildableLM"))
    code, found = lines(capsys, provider=ToyProvider(names, able, held))
    assert code == 1
    assert {f["verdict"] for f in found} == {"pass", "fail", "unsupported", "not_run"}
    assert [b for f in found for b in breaches(f, SCHEMA)] == []
    assert all(f["versions"] == {"toy": "1.0"} for f in found)


def test_the_schema_requires_every_field_and_refuses_others():
    example = json.loads(
        Finding(
            model="m.C",
            case="odd",
            implementation="a",
            dtype="bf16",
            quantity="out",
            verdict="pass",
        ).to_json()
    )
    assert list(breaches(example, SCHEMA)) == []
    assert set(SCHEMA["required"]) == set(SCHEMA["properties"]) == set(example)
    wrong = [{**example, "verdict": "maybe"}, {**example, "extra": 1}, {**example, "measured": "1"}]
    wrong += [{**example, "case": "some other"}, {k: v for k, v in example.items() if k != "note"}]
    assert all(len(list(breaches(value, SCHEMA))) == 1 for value in wrong)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--implementation", "eager", "--model", "toy.Experts"], 0),
        (["--implementation", "wrong", "--model", "toy.Experts"], 1),
        (["--implementation", "crashing", "--model", "toy.Experts"], 2),
        (["--implementation", "absent", "--model", "toy.Experts"], 3),
        (["--implementation", "refusing", "--model", "toy.Experts"], 3),
        (["--model", "toy.TwoFunctions", "--implementation", "eager"], 1),
        (["--model", "toy.Experts", "--fail-on", "eager"], 0),
        (["--model", "toy.Experts", "--fail-on", "wrong"], 1),
        (["--model", "toy.Experts", "--fail-on", "absent"], 3),
        (["--model", "toy.Experts", "--fail-on", "unknown"], 2),
        (["--model", "nothing"], 2),
        ([], 1),
    ],
)
def test_exit_codes(words, code, capsys):
    assert run(*words) == code
    out, err = capsys.readouterr()
    assert bool(out) == (code != 2)
    assert bool(err) == (code == 2)


def test_a_name_may_be_whole_a_model_or_a_class(capsys):
    for name in ("twin.Experts", "twin"):
        _, found = lines(capsys, "--model", name)
        assert {f["model"] for f in found} == {"twin.Experts"}


def test_a_name_that_means_two_classes_lists_them(capsys):
    assert run("--model", "Experts") == 2
    err = capsys.readouterr().err
    assert "toy.Experts" in err
    assert "twin.Experts" in err


def test_the_language_model_of_a_chosen_class_is_judged_too_or_alone(capsys):
    _, found = lines(capsys, "--model", "toy.Experts")
    assert {f["model"] for f in found} == {"toy.Experts", "toy.LM"}
    _, found = lines(capsys, "--model", "toy.LM")
    assert {f["model"] for f in found} == {"toy.LM"}


def test_full_asks_for_every_language_model():
    for words, full in ([], False), (["--full"], True):
        provider = ToyProvider()
        run("--list", *words, provider=provider)
        assert provider.full == [full]


def test_list_names_everything_and_runs_nothing(capsys):
    assert run("--list") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("toy.Experts", "toy.LM", "refusing", "3 experts classes"))
    assert "pass" not in out


def test_the_table_shows_one_line_for_models_that_are_alike(capsys):
    run("--implementation", "eager", "--implementation", "wrong")
    out = capsys.readouterr().out
    assert "toy.Experts and 1 more like it" in out
    assert "WRONG" in out
    assert "(by its arguments)" in out
    assert re.search(r"\d+ pass, \d+ fail, \d+ unsupported, \d+ not_run", out)


def test_issue_text_names_versions_numbers_and_how_to_see_it(capsys):
    assert run("--issue-text", "--model", "toy.Experts", "--implementation", "wrong") == 1
    out = capsys.readouterr().out
    assert "toy 1.0" in out
    assert "| toy.Experts | wrong | fp32 | default | out |" in out
    assert "samebits check models --model toy.Experts --model toy.LM --implementation wrong" in out
    assert "Evidence `arguments`" in out


def test_issue_text_of_nothing(capsys):
    assert issue_text([]) == ""
    assert run("--issue-text", "--model", "toy.Experts", "--implementation", "eager") == 0
    assert capsys.readouterr().out == "nothing failed\n"


def finding(verdict, case="default", **changes):
    values = {"model": "m.C", "implementation": "a", "dtype": "bf16", "quantity": "out"}
    return Finding(**(values | {"verdict": verdict, "case": case} | changes))


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        ([finding("pass"), finding("pass", "odd")], "ok"),
        ([finding("pass"), finding("unsupported", "odd")], "ok, refuses odd"),
        ([finding("pass"), finding("unsupported")], "ok"),
        ([finding("pass"), finding("fail", measured=0.25, allowed=0.1)], "WRONG 2.5e-01"),
        ([finding("fail", "dropped", measured=0.25, allowed=0.1)], "WRONG 2.5e-01 (dropped)"),
        ([finding("fail", measured=float("inf"), allowed=0.1)], "WRONG"),
        ([finding("fail")], "raises"),
        ([finding("not_run"), finding("unsupported")], "not run"),
        ([finding("unsupported")], "refused"),
    ],
)
def test_a_cell_says_it_in_a_word(findings, text):
    assert cell(findings).text == text


def test_reasons_are_counted_once():
    found = [finding("not_run", model=f"m{i}.C", note="no kernel") for i in range(3)]
    text = summary(found)
    assert text.count("no kernel") == 1
    assert "3 models" in text
    assert "not run" in table(found)

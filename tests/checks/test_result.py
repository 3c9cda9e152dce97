"""Results: exit codes, tables and JSON."""

import json
import sys
from dataclasses import FrozenInstanceError

import pytest

from samebits.checks.result import (
    Result,
    Verdict,
    exit_code,
    plain_table,
    print_results,
    print_table,
)

pytestmark = pytest.mark.reference


def _result(case: str = "a", verdict: Verdict = "pass", **values: object) -> Result:
    return Result(check="parity", case=case, problem="H=1", backend="b", verdict=verdict, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["pass", "pass"], 0),
        (["pass", "unsupported", "not_run"], 0),
        (["pass", "fail"], 1),
        (["fail", "not_run"], 1),
        (["not_run"], 3),
        (["unsupported"], 3),
        ([], 3),
    ],
)
def test_exit_code(verdicts: list[Verdict], expected: int) -> None:
    assert exit_code(verdicts) == expected


def test_results_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        _result().verdict = "fail"  # type: ignore[misc]


def test_json_has_every_field_and_no_nan() -> None:
    line = _result(measured=float("nan"), allowed=1.0, note="d_x").to_json()

    parsed = json.loads(line)
    assert list(parsed) == list(Result.__slots__)
    assert parsed["measured"] is None
    assert parsed["allowed"] == 1.0
    assert parsed["note"] == "measured is not finite; d_x"


def test_plain_table_aligns_and_does_not_pad() -> None:
    assert plain_table(["a", "bb"], [["xxx", ""], ["y", "z"]]) == "a    bb\nxxx\ny    z"


def test_table_goes_to_stdout_and_counts_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [_result(case, "unsupported", note="no gate") for case in ("c", "d", "e")]

    print_results([_result(measured=0.5, allowed=1.0), *refused], as_json=False)

    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == [
        "b        a             pass         5.00e-01  1.00e+00",
        "b        c and 2 more  unsupported                      no gate",
    ]
    assert err == "1 pass, 3 unsupported\n"


def test_measured_results_never_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_results([_result(measured=0.5), _result("b", measured=0.5)], as_json=False)

    assert len(capsys.readouterr().out.splitlines()) == 3


def test_json_lines_are_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_results([_result(), _result("b", "fail")], as_json=True)

    out, err = capsys.readouterr()
    assert [json.loads(line)["verdict"] for line in out.splitlines()] == ["pass", "fail"]
    assert err == ""


@pytest.mark.parametrize(("no_color", "drawn"), [("", True), ("1", False)])
def test_a_terminal_gets_the_same_words(
    no_color: str,
    drawn: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    print_table(["verdict"], [["fail"], ["[bold]"]])

    out = capsys.readouterr().out
    assert "fail" in out
    assert "[bold]" in out
    assert ("\x1b[" in out) is drawn

"""`samebits check parity`: our backends pass, planted faults fail, refusals are refusals."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import Activation, Layout, Routing, cli, experts
from samebits.checks.parity import Subject, judge_case, load
from samebits.checks.result import Result
from samebits.problem import ProbPlacement
from samebits.testing.cases import CASES

pytestmark = pytest.mark.reference

CPU = torch.device("cpu")


class _OwnError(Exception):
    """As libraries define them: derived from nothing that Python raises itself."""


def _judge(function: Callable[..., Tensor], case: str = "gpt-oss-whole") -> Result:
    return judge_case(Subject("it", function, lambda problem: None), case, CASES[case], CPU, 7)


def _changed(**changes: Any) -> Callable[..., Tensor]:
    """``experts`` with options of the activation replaced."""

    def function(
        x: Tensor, routing: Any, weights: Any, activation: Activation, **options: Any
    ) -> Tensor:
        return experts(x, routing, weights, replace(activation, **changes), **options)

    return function


def _swapped(x: Tensor, routing: Any, weights: Any, activation: Any, **options: Any) -> Tensor:
    layout = replace(weights.layout, up_first=not weights.layout.up_first)
    return experts(x, routing, replace(weights, layout=layout), activation, **options)


def _halves(x: Tensor, routing: Any, weights: Any, activation: Any, **options: Any) -> Tensor:
    return experts(x, routing, replace(weights, layout=Layout()), activation, **options)


def _twice(x: Tensor, routing: Any, weights: Any, activation: Any, **options: Any) -> Tensor:
    probs = routing.topk_probs * routing.topk_probs
    return experts(x, Routing(routing.topk_ids, probs), weights, activation, **options)


def _last_skipped(x: Tensor, routing: Any, weights: Any, activation: Any, **options: Any) -> Tensor:
    last = weights.down.shape[0] - 1
    ids = torch.where(routing.topk_ids == last, -1, routing.topk_ids)
    return experts(x, Routing(ids, routing.topk_probs), weights, activation, **options)


def _moved(x: Tensor, routing: Any, weights: Any, activation: Any, **options: Any) -> Tensor:
    placement = ProbPlacement.FC2_INPUT
    return experts(x, routing, weights, activation, **options | {"placement": placement})


FAULTS = {
    "clamp dropped": _changed(limit=None),
    "alpha dropped": _changed(alpha=1.0),
    "offset dropped": _changed(linear_offset=0.0),
    "gate and up swapped": _swapped,
    "interleave dropped": _halves,
    "probability twice": _twice,
    "last expert skipped": _last_skipped,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(fault: str) -> None:
    result = _judge(FAULTS[fault])

    assert result.verdict == "fail"
    assert result.measured is not None
    assert result.allowed is not None
    assert result.measured > 10 * result.allowed


def test_a_probability_in_the_wrong_place_fails_where_there_is_a_norm() -> None:
    assert _judge(_moved, "norm").verdict == "fail"


@pytest.mark.parametrize("case", ["swiglu", "gpt-oss-whole", "norm", "bf16", "counted"])
def test_our_function_passes_as_anyones(case: str) -> None:
    result = _judge(experts, case)

    assert result.verdict == "pass", result
    assert result.note.partition(",")[0] in {
        "out",
        "d_x",
        "d_topk_probs",
        "d_gate_up",
        "d_down",
    } | {
        "d_gate_up_bias",
        "d_down_bias",
        "d_norm_scale",
    }


def test_a_gradient_that_stops_fails() -> None:
    def function(x: Tensor, routing: Any, weights: Any, activation: Any) -> Tensor:
        probs = routing.topk_probs.detach()
        return experts(x, Routing(routing.topk_ids, probs), weights, activation)

    result = _judge(function)

    assert result.verdict == "fail"
    assert "gradient to topk_probs" in result.note


def test_no_gradient_at_all_fails_unless_the_output_alone_is_judged() -> None:
    def function(x: Tensor, routing: Any, weights: Any, activation: Any) -> Tensor:
        return experts(x, routing, weights, activation).detach()

    subject = Subject("it", function, lambda problem: None)
    forward = replace(CASES["swiglu"], grad=False)

    assert "--forward" in _judge(function, "swiglu").note
    assert judge_case(subject, "swiglu", forward, CPU, 7).verdict == "pass"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda out: out.double(), "dtype"),
        (lambda out: out[:-1], "shape"),
        (lambda out: out * float("nan"), "not finite"),
    ],
)
def test_an_output_of_the_wrong_kind_fails(change: Callable[[Tensor], Tensor], note: str) -> None:
    result = _judge(lambda *a, **o: change(experts(*a, **o)), "swiglu")

    assert result.verdict == "fail"
    assert note in json.loads(result.to_json())["note"]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (NotImplementedError("no biases"), "unsupported"),
        (ImportError("no module"), "not_run"),
        (RuntimeError("crashed"), "fail"),
        (TypeError("wrong"), "fail"),
        (_OwnError("of its own making"), "fail"),
        (SystemExit("gone"), "fail"),
    ],
)
def test_errors_of_the_function(error: BaseException, verdict: str) -> None:
    def function(*arguments: Any, **options: Any) -> Tensor:
        raise error

    result = _judge(function)

    assert result.verdict == verdict
    assert str(error) in result.note


def test_an_interrupt_is_not_a_verdict() -> None:
    def function(*arguments: Any, **options: Any) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _judge(function)


def test_the_command_judges_a_function_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_experts.py").write_text(
        "import samebits\n"
        "def plain(x, routing, weights, activation):\n"
        "    return samebits.experts(x, routing, weights)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    cases = ["--case", "swiglu", "--case", "swiglu-limit", "--case", "fc1_input"]

    code = cli.main(["check", "parity", "my_experts:plain", *cases, "--json"])

    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = {result["case"]: result["verdict"] for result in results}
    assert verdicts == {"swiglu": "pass", "swiglu-limit": "fail", "fc1_input": "unsupported"}
    assert code == 1


def test_the_command_judges_our_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "parity", "--case", "swiglu", "--device", "cpu"]) == 0

    out = capsys.readouterr().out
    assert "grouped  swiglu  pass" in out
    assert "fused    swiglu  unsupported" in out


def test_nothing_that_could_run_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "parity", "--case", "norm", "--backend", "fused", "--device", "cpu"]

    assert cli.main(command) == 3
    assert "needs an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "TARGET must look like package.module:function, got 'nowhere'"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["math:f"], "TARGET 'math:f': math has no attribute 'f'"),
        (["math:pi"], "TARGET must name a function, got a float"),
        (["math:sqrt", "--backend", "grouped"], "--backend and TARGET exclude each other"),
        (["--device", "bogus"], "--device must be a torch device, got 'bogus'"),
        (["--tokens", "0"], "argument --tokens: the number must be an int >= 1, got '0'"),
        (["--case", "bogus"], "invalid choice: 'bogus'"),
    ],
)
def test_usage_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "parity", *words]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("def (", "SyntaxError: invalid syntax"),
        ("class Own(Exception): pass\nraise Own('so')", "Own: so"),
        ("def __getattr__(name): raise OSError('lazy')", "does_not_import.f raises OSError: lazy"),
    ],
)
def test_a_module_that_does_not_import_is_a_usage_error(
    source: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "does_not_import.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "does_not_import", raising=False)

    assert cli.main(["check", "parity", "does_not_import:f"]) == 2
    assert message in capsys.readouterr().err


def test_load_follows_attributes() -> None:
    assert load("samebits.testing.cases:CASES.get") == CASES.get

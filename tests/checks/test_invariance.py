"""Row independence: what about a batch a function depends on, and that nothing else is blamed."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samebits.checks.invariance import Rows, audit
from samebits.checks.invariance.audit import results
from samebits.cli import main

pytestmark = pytest.mark.reference

SIZES = (1, 2, 5, 16)
ROWS = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
CALLS = itertools.count()
SMALL = ["--problem", "H=16 F=24 E=4 K=2 dtype=fp32", "--tokens", "1,2,9"]


def by_row(x: Tensor) -> Tensor:
    return x.tanh() * 2


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def placed(x: Tensor) -> Tensor:
    return x + torch.arange(len(x))[:, None] * 2.0**-20


def summed(x: Tensor) -> Tensor:
    return x + 0.0 * x.sum()


def drifting(x: Tensor) -> Tensor:
    return x + next(CALLS)


def signed(x: Tensor) -> Tensor:
    return torch.zeros_like(x) * (1 if len(x) < 5 else -1)


def together(x: Tensor) -> Tensor:
    if len(x) == 1:
        raise ValueError("one row has no variance")
    return by_row(x)


def answers(function, *args, names=(), **kwargs):
    found = list(audit(Rows(function, args or [ROWS], kwargs, names=names), SIZES))
    return {answer.case: answer for answer in found}


def wrong(found) -> set[str]:
    return {case for case, answer in found.items() if answer.difference is not None}


@pytest.mark.parametrize(
    ("function", "cases"),
    [
        (by_row, set()),
        (placed, {"position"}),
        (summed, {"neighbours"}),
        (drifting, {"repeat"}),
        (signed, {"T"}),
        (centred, {"T", "position", "neighbours"}),
    ],
)
def test_what_a_row_depends_on_is_named(function, cases):
    found = answers(function)

    # The order of a mean's terms may change with positions, or not.
    assert wrong(found) | {"position"} == cases | {"position"}
    if function is not centred:
        assert wrong(found) == cases


def test_the_first_difference_says_where_and_how_much():
    found = answers(placed)["position"].difference

    assert (found.tokens, found.position, found.row, found.output) == (2, 1, 0, "out")
    assert found.differing == found.elements == 12
    assert 0 < found.largest < 2.0**-19
    assert str(found).startswith("T=2, row 0 at position 1 against position 0: 12 of 12 elements")


def test_values_that_compare_equal_differ_by_their_bytes():
    found = answers(signed)["T"].difference

    assert (found.tokens, found.largest, found.differing) == (5, 0.0, 12)
    assert "0.0 and 0.0" in str(found).replace("-", "")


def test_the_neighbours_that_change_a_row_are_named():
    assert "beside NaN" in str(answers(summed)["neighbours"].difference)


def test_nothing_is_said_where_the_same_call_differs():
    found = answers(drifting)

    assert {found[case].reason for case in ("T", "position", "neighbours")} == {
        "the same call twice gives other bits"
    }


def test_a_row_that_cannot_be_alone_is_judged_against_the_smallest_batch():
    found = answers(together)

    assert found["T"].reason == ""
    assert found["T"].difference is None
    assert found["neighbours"].difference is None
    assert found["neighbours"].reason == ""


def test_integers_move_with_their_rows_and_other_arguments_stay():
    ids = torch.arange(7) % 3
    table = torch.randn(3, 12)

    found = answers(lambda x, table, *, ids: x * table[ids], ROWS, table, ids=ids)

    assert wrong(found) == set()


def test_rows_can_be_named():
    square = torch.randn(7, 12)

    assert wrong(answers(lambda x, w: x * w[0], ROWS, square, names=["0"])) == set()
    assert wrong(answers(lambda x, w: x * w[0], ROWS, square)) != set()


@pytest.mark.parametrize(
    ("args", "names", "message"),
    [
        ([], (), "no argument is a tensor with rows"),
        ([1.0, torch.tensor(2.0)], (), "no argument is a tensor with rows"),
        ([torch.ones(0, 3)], (), "the rows are none"),
        ([torch.ones(4, 3)], ["x"], "--rows must name tensors, of 0, got 'x'"),
        ([torch.ones(4, 3), torch.ones(5)], ["0", "1"], "of one length"),
    ],
)
def test_arguments_without_rows_are_refused(args, names, message):
    with pytest.raises(ValueError, match=message):
        Rows(by_row, args, names=names)


@pytest.mark.parametrize("target", ["reference", "grouped"])
def test_experts_are_judged_by_name(target, capsys):
    assert main(["check", "invariance", target, *SMALL, "--json"]) in (0, 1)

    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["case"] for result in found] == ["repeat", "T", "position", "neighbours"]
    assert found[0]["verdict"] == "pass"
    assert {result["backend"] for result in found} == {target}


def test_a_function_of_anyone(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "rows_of_a_test.py").write_text(
        "import torch\n"
        "def centred(x): return x - x.mean(0)\n"
        "def make_inputs(): return (torch.randn(6, 8),), {}\n"
        "def other(): return (torch.randn(6, 8), torch.randn(6, 8)), {}\n"
        "def product(x, w): return x @ w.T\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["check", "invariance"]

    assert main([*command, "rows_of_a_test:centred", "--tokens", "1,2,4"]) == 1
    assert "T=2, row 0 first, against alone: 8 of 8 elements" in capsys.readouterr().out
    words = ["--inputs", "rows_of_a_test:other", "--rows", "0", "--tokens", "1,3"]
    assert main([*command, "rows_of_a_test:product", *words]) in (0, 1)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nobody"], 2, "TARGET must be one of fused, grouped, reference"),
        (["nowhere:f"], 2, "module 'nowhere' does not import"),
        (["reference", "--inputs", "a:b"], 2, "--inputs and --rows must come with"),
        (["math:sqrt", "--problem", "H=1"], 2, "--problem must come with experts"),
        (["reference", "--model", "mixtral"], 2, "--model must come with transformers/"),
        (["reference", "--problem", "H=1"], 2, "the problem must state"),
        (["reference", "--tokens", "1,x"], 2, "--tokens must be numbers"),
        (["reference", "--tokens", "1"], 2, "one of them at least 2"),
    ],
)
def test_bad_input_is_refused(words, code, message, capsys):
    assert main(["check", "invariance", *words]) == code
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="fused runs here")
def test_a_backend_that_cannot_run_here(capsys):
    assert main(["check", "invariance", "fused"]) == 3
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def _verdicts(function, tokens=(1, 2, 16, 17)) -> dict[str, tuple[str, str]]:
    rows = Rows(function, [torch.randn(20, 8, generator=torch.Generator().manual_seed(0))])
    found = results(list(audit(rows, tokens)), "f", "")
    return {result.case: (result.verdict, result.note) for result in found}


def test_a_result_that_is_by_chance_as_long_as_a_batch_holds_no_rows():
    found = _verdicts(lambda x: (2 * x, torch.arange(16.0)))

    assert {verdict for verdict, _ in found.values()} == {"pass"}


def test_sizes_that_a_function_refuses_are_named_and_the_others_judged():
    def even(x):
        if len(x) % 2:
            raise ValueError("odd")
        return x - x.mean(0)

    found = _verdicts(even, (1, 2, 4, 17, 20))

    verdict, note = found["T"]
    assert verdict == "fail"
    assert "T=4, row 0 first, against T=2, the smallest that runs" in note
    assert "could not be run at 17 (T=17: ValueError: odd)" in note
    assert found["neighbours"][0] == "fail"


def test_results_that_are_all_nan_show_nothing():
    found = _verdicts(lambda x: x * float("nan"))

    assert {verdict for verdict, _ in found.values()} == {"not_run"}
    assert "every result is NaN" in found["T"][1]


def test_imaginary_parts_are_compared_and_measured():
    rows = Rows(lambda x: torch.complex(x, x - x.mean(0)), [torch.arange(12.0).reshape(4, 3)])

    found = {answer.case: answer.difference for answer in audit(rows, (1, 2))}

    assert found["T"] is not None
    assert found["T"].largest == 1.5


def test_a_call_that_only_repeats_is_no_pass(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "few_calls_of_a_test.py").write_text(
        "import torch\n"
        "calls = []\n"
        "def few(x):\n"
        "    calls.append(x)\n"
        "    assert len(calls) <= 4\n"
        "    return x\n"
        "def make_inputs(): return (torch.randn(6, 8),), {}\n"
    )
    monkeypatch.chdir(tmp_path)

    assert main(["check", "invariance", "few_calls_of_a_test:few", "--tokens", "1,2,4"]) == 3
    assert "pass" in capsys.readouterr().out

"""The pytest plugin on other people's code: what each assert lets through, and what it stops."""

import subprocess
import sys
from pathlib import Path

import pytest

from samebits import env

pytestmark = pytest.mark.reference

SOURCE = str(Path(__file__).parents[1] / "src")

ROWS = """
import torch

def inputs():
    return (torch.randn(6, 8), torch.randn(8, 8)), {}

def by_row(x, weight):
    return x.tanh() * weight[0]

def centred(x, weight):
    return x - x.mean(0)

def poisoned(x, weight):
    return x + 0.0 * x.sum()

def test_by_row(assert_row_independent):
    assert_row_independent(by_row, inputs)

def test_centred(assert_row_independent):
    assert_row_independent(centred, inputs)

def test_poisoned(assert_row_independent):
    assert_row_independent(poisoned, inputs)
"""

REPEATS = """
import itertools
import torch

def inputs():
    return (torch.randn(6, 8, requires_grad=True),), {}

calls = itertools.count()

def steady(x):
    return torch.nn.functional.dropout(x, 0.5)

def drifting(x):
    return x + next(calls)

class Drift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + next(calls)

def test_steady(assert_repeatable):
    assert_repeatable(steady, inputs)

def test_drifting(assert_repeatable):
    assert_repeatable(drifting, inputs)

def test_drifting_gradient(assert_repeatable):
    assert_repeatable(Drift.apply, inputs)

def test_nothing(assert_repeatable):
    assert_repeatable(lambda x: None, inputs)
"""

PARITY = """
import torch

def inputs():
    return (torch.randn(6, 32).bfloat16(),), {}

def reference(x):
    return x * torch.sigmoid(x)

def better(x):
    return (x.float() * torch.sigmoid(x.float())).to(x.dtype)

def worse(x):
    return (better(x).float() * 1.05).to(x.dtype)

def test_better(assert_parity):
    assert_parity(better, reference, inputs)

def in_place(x):
    return x.mul_(torch.sigmoid(x))

def wide():
    return (torch.randn(6, 32),), {}

def narrow(x):
    return reference(x).bfloat16()

def test_worse(assert_parity):
    assert_parity(worse, reference, inputs)

def test_in_place(assert_parity):
    assert_parity(in_place, reference, inputs)

def test_narrower_result(assert_parity):
    assert_parity(narrow, reference, wide)

def test_narrow_reference(assert_parity):
    assert_parity(reference, narrow, wide)

def test_nothing(assert_parity):
    assert_parity(lambda x: None, lambda x: None, inputs)
"""

STALE = """
import torch
from samebits.checks.compile import known_bad

def test_planted(assert_no_stale_scalars):
    assert_no_stale_scalars(known_bad.planted, known_bad.make_inputs)

def test_no_number(assert_no_stale_scalars):
    assert_no_stale_scalars(torch.neg, lambda: ((torch.ones(2),), {}))

def test_no_time(assert_no_stale_scalars):
    assert_no_stale_scalars(known_bad.clamped_swiglu, known_bad.make_inputs, budget=0.01)
"""


def outcomes(folder, text):
    """Return ``{test: outcome}`` of a test file under the plugin, and what pytest printed."""
    (folder / "test_it.py").write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "samebits_pytest", "-rA", "-q", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=env.for_child(PYTHONPATH=SOURCE, OMP_NUM_THREADS="1"),
    )
    found = {}
    for line in run.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("PASSED", "FAILED"):
            found[rest.partition("::")[2].partition(" ")[0]] = word
        elif word == "SKIPPED":
            found["skipped"] = rest
    return found, run.stdout


def test_rows_that_depend_on_others_fail(tmp_path):
    found, said = outcomes(tmp_path, ROWS)

    assert found == {"test_by_row": "PASSED", "test_centred": "FAILED", "test_poisoned": "FAILED"}
    assert "T=2, row 0 first, against alone" in said
    assert "beside NaN" in said


def test_outputs_and_gradients_that_drift_fail(tmp_path):
    found, said = outcomes(tmp_path, REPEATS)

    assert found == {
        "test_steady": "PASSED",
        "test_drifting": "FAILED",
        "test_drifting_gradient": "FAILED",
        "test_nothing": "FAILED",
    }
    assert "the function returns no tensor" in said
    assert "grad args[0], call 2" in said


def test_parity_is_judged_by_the_error_of_the_reference(tmp_path):
    found, said = outcomes(tmp_path, PARITY)

    assert found == {
        "test_better": "PASSED",
        "test_worse": "FAILED",
        "test_in_place": "PASSED",
        "test_narrower_result": "FAILED",
        "test_narrow_reference": "FAILED",
        "test_nothing": "FAILED",
    }
    assert "over budget" in said
    assert "the reference gives torch.bfloat16 on fp64" in said
    assert "the reference returns no tensor" in said


def test_stale_numbers_fail_and_what_was_not_judged_does_not_pass(tmp_path):
    found, said = outcomes(tmp_path, STALE)

    assert found["test_planted"] == "FAILED"
    assert found["test_no_time"] == "FAILED"
    assert "test_no_number" not in found
    assert "no number reaches it" in found["skipped"]
    assert "ran out before all was judged" in said


def test_the_plugin_imports_neither_torch_nor_samebits():
    code = (
        "import sys, samebits_pytest;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'samebits')))"
    )

    run = subprocess.run(
        [sys.executable, "-c", code], env=env.for_child(PYTHONPATH=SOURCE), check=False
    )

    assert run.returncode == 0

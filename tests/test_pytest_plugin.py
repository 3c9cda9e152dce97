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

MODULES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.scale

net = Net()

def inputs():
    return (torch.randn(6, 8),), {}

def test_module(assert_parity):
    assert_parity(lambda x: net(x), net, inputs)
    assert net.linear.weight.dtype == torch.float32

def test_method(assert_parity):
    assert_parity(net, net.forward, inputs)

def test_compiled(assert_parity):
    assert_parity(net, torch.compile(net, backend="eager"), inputs)

def test_worse(assert_parity):
    assert_parity(lambda x: net(x) * 1.001, net, inputs)

def test_closed_over(assert_parity):
    assert_parity(net, lambda x: net(x), inputs)
"""

# Each assert with what no test should be written like: what it is told instead.
MISTAKES = """
import pytest
import torch

def double(x):
    return x * 2

def inputs():
    return (torch.randn(6, 8),), {}

NAMES = ("no_stale_scalars", "row_independent", "repeatable", "parity")

@pytest.fixture(params=NAMES)
def check(request):
    found = request.getfixturevalue("assert_" + request.param)
    if request.param == "parity":
        return lambda function, made: found(function, double, made)
    return found

BY_FACTORY = {
    "tensor": (lambda: torch.randn(6, 8), r"must return \\(args, kwargs\\).*, got Tensor"),
    "flat": (lambda: (torch.randn(6, 8), 0.5), r"such as .*, got \\(Tensor, float\\)"),
    "none": (lambda: None, "must return .*, got NoneType"),
    "takes": (lambda count: inputs(), "the factory of inputs raises TypeError"),
    "raises": (lambda: 1 / 0, "the factory of inputs raises ZeroDivisionError"),
}

@pytest.mark.parametrize("name", BY_FACTORY)
def test_factory(check, name):
    factory, message = BY_FACTORY[name]
    with pytest.raises(ValueError, match=message):
        check(double, factory)

@pytest.mark.parametrize("made", [inputs(), "module:inputs"])
def test_no_factory(check, made):
    with pytest.raises(TypeError, match="make_inputs must be a function that returns"):
        check(double, made)

@pytest.mark.parametrize("function", [3, "module:function"])
def test_no_function(check, function):
    with pytest.raises(TypeError, match="function must be callable, got"):
        check(function, inputs)

def test_no_reference(assert_parity):
    with pytest.raises(TypeError, match="reference must be callable, got Tensor"):
        assert_parity(double, torch.ones(2), inputs)

@pytest.mark.parametrize("name", NAMES[1:])
def test_arity(request, name):
    check = request.getfixturevalue("assert_" + name)
    more = [double] if name == "parity" else []
    with pytest.raises(ValueError, match="does not take what make_inputs.* returns: missing"):
        check(lambda x, y: x, *more, inputs)

def test_arity_of_the_reference(assert_parity):
    with pytest.raises(ValueError, match="does not take what make_inputs"):
        assert_parity(double, lambda x, y: x, inputs)

@pytest.mark.parametrize("times", ["3", 2.5, True])
def test_times(assert_repeatable, times):
    with pytest.raises(TypeError, match="times must be an int"):
        assert_repeatable(double, inputs, times=times)

def test_once(assert_repeatable):
    with pytest.raises(ValueError, match="times must be >= 2, got 1"):
        assert_repeatable(double, inputs, times=1)

def test_one_path(assert_no_stale_scalars):
    with pytest.raises(TypeError, match="only must be a sequence of paths, got 'limit'"):
        assert_no_stale_scalars(double, inputs, only="limit")

@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_budget(assert_no_stale_scalars, budget):
    with pytest.raises(ValueError, match="budget must be finite and > 0"):
        assert_no_stale_scalars(double, inputs, budget=budget)

def test_budget_in_words(assert_no_stale_scalars):
    with pytest.raises(TypeError, match="budget must be a plain Python number"):
        assert_no_stale_scalars(double, inputs, budget="5")

@pytest.mark.parametrize("name", NAMES[2:])
def test_no_elements(request, name):
    check = request.getfixturevalue("assert_" + name)
    more = [double] if name == "parity" else []
    with pytest.raises(ValueError, match="without elements: nothing can be compared"):
        check(double, *more, lambda: ((torch.ones(0, 4),), {}))

def test_another_shape(assert_parity):
    with pytest.raises(pytest.fail.Exception, match="shape .2, 8. instead of .6, 8."):
        assert_parity(lambda x: double(x)[:2], double, inputs)

def test_another_kind(assert_parity):
    with pytest.raises(pytest.fail.Exception, match="out: torch.int32 instead of torch.float32"):
        assert_parity(lambda x: double(x).int(), double, inputs)

def test_other_results_in_fp64(assert_parity):
    def reference(x):
        return (x, x) if x.dtype == torch.float64 else x

    with pytest.raises(ValueError, match="must return the same for every dtype"):
        assert_parity(double, reference, inputs)

def test_complex(assert_parity):
    assert_parity(lambda x: x.double() * 1.5j, lambda x: x * 1.5j, inputs)
    with pytest.raises(pytest.fail.Exception, match="over budget"):
        assert_parity(lambda x: x * 1.501j, lambda x: x * 1.5j, inputs)
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


def outcomes(folder, **texts):
    """Return ``{file: {test: outcome}}`` of test files under the plugin, and what it printed."""
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "samebits_pytest", "-rA", "-q", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=env.for_child(PYTHONPATH=SOURCE, OMP_NUM_THREADS="1"),
    )
    found = {name: {} for name in texts}
    for line in run.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("PASSED", "FAILED"):
            file, _, test = rest.partition("::")
            name = file.removeprefix("test_").removesuffix(".py")
            found[name][test.partition(" ")[0]] = word
        elif word == "SKIPPED":
            found["skipped"] = rest
    return found, run.stdout


def test_each_assert_stops_what_it_is_for_and_names_mistakes(tmp_path):
    # In one process: each would import torch.
    found, said = outcomes(
        tmp_path, rows=ROWS, repeats=REPEATS, parity=PARITY, modules=MODULES, mistakes=MISTAKES
    )

    assert found["rows"] == {
        "test_by_row": "PASSED",
        "test_centred": "FAILED",
        "test_poisoned": "FAILED",
    }
    assert "T=2, row 0 first, against alone" in said
    assert "beside NaN" in said

    assert found["repeats"] == {
        "test_steady": "PASSED",
        "test_drifting": "FAILED",
        "test_drifting_gradient": "FAILED",
        "test_nothing": "FAILED",
    }
    assert "the function returns no tensor" in said
    assert "grad args[0], call 2" in said

    assert found["parity"] == {
        "test_better": "PASSED",
        "test_worse": "FAILED",
        "test_in_place": "PASSED",
        "test_narrower_result": "FAILED",
        "test_narrow_reference": "FAILED",
        "test_nothing": "FAILED",
    }
    assert said.count("over budget") >= 2
    assert "the reference gives torch.bfloat16 on fp64" in said
    assert "the reference returns no tensor" in said

    assert found["modules"] == {
        "test_module": "PASSED",
        "test_method": "PASSED",
        "test_compiled": "PASSED",
        "test_worse": "FAILED",
        "test_closed_over": "FAILED",
    }
    assert "on fp64: it must compute in the dtype of its inputs; give a module as the" in said

    assert len(found["mistakes"]) >= 40
    assert set(found["mistakes"].values()) == {"PASSED"}, said


def test_stale_numbers_fail_and_what_was_not_judged_does_not_pass(tmp_path):
    found, said = outcomes(tmp_path, stale=STALE)

    assert found["stale"] == {"test_planted": "FAILED", "test_no_time": "FAILED"}
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

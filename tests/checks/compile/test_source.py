"""The scripts that an audit writes: whole by themselves, with the fewest calls."""

import ast
import importlib
import math

import programs
import pytest
import stale_triton
import torch

from samebits.checks.compile.follow_up import choose
from samebits.checks.compile.job import Job, StepRecord
from samebits.checks.compile.record import Audit
from samebits.checks.compile.reproducer import write
from samebits.checks.compile.sequence import Option, Scenario
from samebits.checks.compile.source import copied, literal
from samebits.checks.compile.target import Target

pytestmark = pytest.mark.reference

LIMITS = (0.5, 0.25, 0.75, 2.0)


def script(
    tmp_path, name, inputs, path, *, index=2, phase="fresh", dynamic=None, values=LIMITS, **facts
):
    scenario = Scenario("sequence", (Option(path, values),), True, dynamic, 2)
    job = Job(
        kind="reproduce",
        target=Target(name, inputs),
        folder=str(tmp_path),
        output=str(tmp_path / "out"),
        scenarios=(scenario,),
        fault=StepRecord("sequence", phase, index, {path: 0.75}, distance=0.5, allowed=1e-5),
        shapes=2,
        **facts,
    )
    return write(job)["source"]


def run(source):
    """Return the namespace of a script, without its call of ``main``."""
    space = {"__name__": "script"}
    exec(compile(source, "script", "exec"), space)
    return space


def test_the_function_is_copied_with_what_it_mentions(tmp_path):
    source = script(
        tmp_path, "programs:fused_swiglu", "programs:two_floats", "limit", compiled=True
    )

    space = run(source)

    assert "samebits" not in source.replace("`samebits check compile`", "")
    assert space["FusedSwiGLU"].__name__ == "FusedSwiGLU"
    assert hasattr(space["clamped_swiglu_backward"], "_torchdynamo_orig_callable")
    assert space["CALLS"] == [[({"limit": 0.5}, 0), ({"limit": 0.25}, 0), ({"limit": 0.75}, 0)]]


def test_names_in_annotations_and_defaults_are_no_obstacle(tmp_path):
    source = script(tmp_path, "programs:annotated", "programs:two_floats", "limit")

    assert run(source)["annotated"](torch.ones(2), 0.25).tolist() == [0.75, 0.75]


def test_a_triton_kernel_is_copied(tmp_path, monkeypatch):
    source = copied(stale_triton.launch_expression)

    # Triton reads the source of a kernel from its file.
    path = tmp_path / "copied_kernel.py"
    path.write_text(f"from __future__ import annotations\n{source.imports}\n{source.text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    space = vars(importlib.import_module("copied_kernel"))

    assert space["target"].__name__ == "launch_expression"
    assert type(space["_scale_kernel"]) is type(stale_triton._scale_kernel)
    assert source.imports.splitlines()[1:] == ["import triton", "import triton.language as tl"]


def test_always_dynamic_code_needs_two_calls(tmp_path):
    source = script(
        tmp_path, "programs:clamped_swiglu", "programs:two_floats", "limit", index=1, dynamic=True
    )

    assert [values["limit"] for values, _ in run(source)["CALLS"][0]] == [0.5, 0.25]


@pytest.mark.parametrize("dynamic", [None, True])
def test_code_that_is_compiled_already_is_made_dynamic_by_a_setting(tmp_path, dynamic):
    where = ("programs:fused_swiglu", "programs:two_floats", "limit")

    source = script(tmp_path, *where, dynamic=dynamic, compiled=True)

    assert ("assume_static_by_default = False" in source) is bool(dynamic)
    assert "compiled = target\n" in source


def test_what_a_decorator_compiles_is_compiled_by_the_script(tmp_path):
    where = ("reached_programs:decorated", "programs:two_floats", "limit")

    source = script(tmp_path, *where, dynamic=None, compiled=True)

    assert "compiled = torch.compile(target, dynamic=None)\n" in source


def test_the_fault_that_is_shown_needs_no_setting_and_no_second_process():
    option = Option("limit", LIMITS)
    found = Audit("a:b", {})
    found.scenarios = [
        Scenario("always", (option,), False, True, 1),
        Scenario("pair", (option, Option("eps", LIMITS)), False, None, 1),
        Scenario("alone", (option,), True, None, 1),
    ]
    found.steps = [
        StepRecord("always", "fresh", 1, wrong=True),
        StepRecord("pair", "fresh", 2, wrong=True),
        StepRecord("alone", "warm", 1, wrong=True),
        StepRecord("alone", "fresh", 4, wrong=True),
        StepRecord("alone", "fresh", 3),
    ]

    assert choose(found) is found.steps[3]


def test_a_fault_of_the_second_process_needs_both(tmp_path):
    source = script(
        tmp_path, "programs:clamped_swiglu", "programs:two_floats", "limit", phase="warm"
    )

    assert len(run(source)["CALLS"]) == 2


def test_an_infinite_limit_is_written_as_python_reads_it(tmp_path):
    values = (math.inf, *LIMITS[1:])
    where = ("programs:clamped_swiglu", "programs:tensor_and_infinity", "limit")

    calls = run(script(tmp_path, *where, values=values))["CALLS"][0]

    assert [call[0]["limit"] for call in calls] == [math.inf, 0.25, 0.75]


def test_a_closure_cell_becomes_a_global_that_is_set(tmp_path):
    source = script(tmp_path, "programs:closure", "programs:one_tensor", "target:limit")

    space = run(source)
    args, kwargs = space["inputs"](0)
    space["set_values"](args, kwargs, {"target:limit": 0.125})

    assert space["limit"] == 0.125
    assert torch.equal(space["target"](*args), programs.clamped_swiglu(args[0], 0.125))


def test_a_module_has_no_source_of_its_own_and_is_imported(tmp_path):
    where = ("programs:layers", "programs:one_tensor", "target.layers.1.limit")
    with pytest.raises(TypeError, match="is not a function"):
        script(tmp_path, *where)

    space = run(script(tmp_path, *where, inline=False))
    args, kwargs = space["inputs"](0)
    space["set_values"](args, kwargs, {"target.layers.1.limit": 0.125})

    assert space["target"].layers[1].limit == 0.125
    programs.layers.layers[1].limit = 0.25


def test_a_lambda_has_no_source():
    with pytest.raises(ValueError, match="is part of another statement"):
        copied(lambda x: x)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1.5, -2.0], [0.25, 4.0]]),
        torch.tensor([1, 2, 3]),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        {"a": [1.0, None, "text"], "b": (2, torch.float16)},
    ],
)
def test_inputs_are_written_as_they_are(value):
    made = eval(literal(value), {"torch": torch})

    assert type(made) is type(value)
    assert torch.equal(made, value) if isinstance(value, torch.Tensor) else made == value


def test_large_inputs_keep_shape_and_kind():
    made = eval(literal(torch.randn(20, 30).half()), {"torch": torch})

    assert (made.shape, made.dtype) == ((20, 30), torch.float16)


def test_an_object_has_no_literal():
    with pytest.raises(ValueError, match="an input of type Options has no source"):
        literal(programs.Options())


def test_scripts_are_syntax_of_every_supported_python(tmp_path):
    source = script(tmp_path, "programs:clamped_swiglu", "programs:two_floats", "limit")

    assert ast.parse(source, feature_version=(3, 10))

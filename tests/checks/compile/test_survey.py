"""What is known before anything is compiled: values that matter, targets that cannot be used."""

import math
import subprocess
import sys
from pathlib import Path
from threading import Lock

import programs
import pytest
import torch

from samebits.checks.compile import process
from samebits.checks.compile import survey as survey_module
from samebits.checks.compile.job import Job
from samebits.checks.compile.place import candidates
from samebits.checks.compile.survey import copy_of, guarded, survey
from samebits.checks.compile.target import Target, TargetError, guess_inputs, load

pytestmark = pytest.mark.reference


def surveyed(tmp_path, name, inputs=None):
    job = Job(
        kind="survey", target=Target(name, inputs), folder=str(tmp_path), output=str(tmp_path / "o")
    )
    return guarded(lambda: survey(job))


def by_path(found):
    return {number["path"]: number for number in found["numbers"]}


def test_values_that_change_the_result_are_found(tmp_path):
    found = surveyed(tmp_path, "programs:clamped_swiglu")

    assert by_path(found)["limit"]["values"] == [0.75, 0.375, 1.5, 0.5625]
    assert (found["wanted"], found["shapes"], found["compiled"]) == ("all", 2, False)
    assert found["remembers"] == []


def test_a_number_without_effect_is_not_judged(tmp_path):
    found = surveyed(tmp_path, "programs:with_options", "programs:with_objects")

    numbers = by_path(found)

    assert len(numbers["options.limit"]["values"]) == 4
    assert numbers["options.rows"]["note"] == (
        "no other value changes the eager result of these inputs"
    )


def test_a_launcher_that_remembers_is_found_without_compiling(tmp_path):
    found = surveyed(tmp_path, "programs:forgetful_launch", "programs:tensor_and_int")

    assert [(r["path"], r["effect"] > 0.01) for r in found["remembers"]] == [("step", True)]


def test_a_launcher_that_remembers_nothing_is_not(tmp_path):
    found = surveyed(tmp_path, "programs:careful_launch", "programs:tensor_and_int")

    assert found["remembers"] == []
    assert by_path(found)["step"]["values"] == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("programs", None, "TARGET must look like package.module:function, got 'programs'"),
        ("no_such_module:f", None, "module 'no_such_module' does not import"),
        ("programs:nothing", None, "has no attribute 'nothing'"),
        ("programs:SCALE", None, "TARGET must name a callable, got float"),
        ("programs:clamped_swiglu", "programs:failing_inputs", "raises KeyError: 'no such data'"),
        ("programs:clamped_swiglu", "programs:Options", "must return (args, kwargs)"),
        ("programs:keeps_its_graph", "programs:two_floats", "raises when it is called again"),
        ("programs:random_eager", "programs:two_floats", "is not deterministic"),
        ("programs:clamped_swiglu", "programs:one_tensor", "the eager function raises TypeError"),
    ],
)
def test_bad_input_gets_a_clear_error(tmp_path, name, inputs, message):
    assert message in surveyed(tmp_path, name, inputs)["error"]


def test_inputs_are_guessed_from_annotations():
    def target(x, scale: float, rows: int = 5, *, mask: torch.Tensor, on: bool): ...

    args, kwargs = guess_inputs(target)

    assert (tuple(args[0].shape), args[1:]) == ((4, 8), (0.75,))
    assert (tuple(kwargs["mask"].shape), kwargs["on"]) == ((4, 8), False)


def test_no_input_is_guessed_from_what_a_container_holds():
    def optional(x: torch.Tensor | None, scale: int | float): ...
    def sizes(x, sizes: list[int]): ...

    assert guess_inputs(optional)[0][1] == 2
    with pytest.raises(TargetError, match=r"'sizes' \(list\[int\]\) can be guessed"):
        guess_inputs(sizes)


def test_inputs_of_a_module_are_guessed_from_its_forward():
    args, _ = guess_inputs(programs.Adapter())

    assert tuple(args[0].shape) == (4, 8)


def test_a_number_that_moves_the_imaginary_part_only_is_judged(tmp_path):
    found = surveyed(tmp_path, "programs:imaginary", "programs:two_floats")

    assert len(by_path(found)["limit"]["values"]) == 4


def test_make_inputs_beside_the_target_is_taken():
    function, factory = load(Target("planted_compilers:right"))

    assert callable(function)
    assert factory()[0][1] == 0.5


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 2.0, -3.0, 1e-6, math.inf, math.nan])
def test_no_candidate_is_zero_or_one(value):
    found = list(candidates(value))

    assert len(found) >= 6
    assert not {0.0, 1.0, value} & set(found)


def test_objects_of_a_module_are_targets():
    assert load(Target("programs:closure", "programs:one_tensor"))[0] is programs.closure


def test_a_fork_that_cuda_refuses_is_replaced_by_a_fresh_process(tmp_path, monkeypatch):
    # What forked copies see of a process that has touched CUDA on import.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    # One is enough here: each costs a fresh process.
    monkeypatch.setattr(survey_module, "_firsts", lambda number: number["unchanged"])

    found = surveyed(tmp_path, "programs:forgetful_launch", "programs:inputs_by_cuda")

    assert [r["path"] for r in found["remembers"]] == ["step"]


def test_what_fails_in_a_fork_is_tried_without_where_cuda_may_be_why(tmp_path, monkeypatch):
    target = ("programs:careful_launch", "programs:inputs_by_a_library_that_no_fork_can_use")
    # In turn: here the copies share one process, and how torch compiles is the process's.
    tried, alone = [], Lock()

    def ask(job, deadline, *, leads):
        with alone:
            tried.append((job.kind, leads))
            return guarded(lambda: copy_of(job))

    monkeypatch.setattr(process, "ask", ask)

    assert "initialization error" in surveyed(tmp_path, *target)["error"]
    assert tried == []
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    assert by_path(surveyed(tmp_path, *target))["step"]["values"] == [3, 4, 5, 6]
    assert tried == [("look", False), *[("begin", False)] * 3]


def test_a_target_that_ends_its_process_well_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "ask", lambda job, *_, **__: {"error": f"asked to {job.kind}"})

    found = surveyed(tmp_path, "programs:leaves_well", "programs:two_floats")

    assert found["error"] == "asked to look"


def test_a_sparse_result_is_compared(tmp_path):
    found = surveyed(tmp_path, "programs:sparse", "programs:two_floats")

    assert len(by_path(found)["s"]["values"]) == 4


def test_a_target_that_ends_its_process_is_told(tmp_path):
    error = surveyed(tmp_path, "programs:leaves", "programs:two_floats")["error"]

    assert "the process that ran the eager function ended with code 9" in error


def test_the_audit_imports_where_torch_has_no_grouped_product():
    # As before torch 2.10: everything else of samebits may need it, the audit does not.
    code = "import torch; del torch.nn.functional.grouped_mm; import samebits.checks.compile.worker"

    environment = process.environment(Path())
    run = subprocess.run([sys.executable, "-c", code], env=environment, check=False)

    assert run.returncode == 0

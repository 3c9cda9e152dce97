"""A run of the battery: what has no verdict says why, is done again, and ends a run in vain."""

import json
import sys

import pytest
import stale_battery
import stale_rows
import stale_table

from samebits.checks.compile.job import StepRecord
from samebits.checks.compile.process import Deadline
from samebits.checks.compile.record import Audit
from samebits.checks.compile.sequence import PHASES, Option, plan
from samebits.checks.compile.target import TargetError

pytestmark = pytest.mark.reference


def audited(change=lambda step: None, *, gradients=(False, True)):
    """Return the audit of a program that was right at every call, each changed."""
    options = [Option("s", (0.5, 0.25, 0.75, 2.0))]
    found = Audit(
        "stale_programs:multiply", {}, scenarios=plan(options, gradients=gradients, shapes=1)[0]
    )
    for scenario in found.scenarios:
        for phase in PHASES:
            for index, step in enumerate(scenario.steps(phase)):
                record = StepRecord(scenario.name, phase, index, values=dict(step.values))
                change(record)
                found.steps.append(record)
    return found


def verdicts(program, found):
    return [row["verdict"] for row in stale_rows.rows_of("battery", program, found)]


def raises(step):
    if "with gradient" in step.scenario:
        step.error = "InductorError: no compiler"


def is_wrong(step):
    step.wrong = step.index == 2


def test_what_does_not_compile_has_no_verdict():
    program = stale_table.Program("multiply")

    assert verdicts(program, audited()) == ["silent", "silent"]
    assert verdicts(program, audited(is_wrong)) == ["beyond", "beyond"]
    assert verdicts(program, audited(raises)) == ["silent", "not_run"]
    *_, row = stale_rows.rows_of("battery", program, audited(raises))
    assert "InductorError: no compiler" in stale_rows.summary(row | {"seconds": 1.0})


def test_what_this_torch_is_known_to_refuse_is_refused():
    program = stale_table.Program("power", refused=(stale_rows.VERSION,))

    assert verdicts(program, audited(raises)) == ["silent", "refused"]


def test_a_sequence_that_was_cut_is_no_pass():
    found = audited()
    found.steps = [step for step in found.steps if step.phase == "fresh"]

    assert verdicts(stale_table.Program("multiply"), found) == ["not_run", "not_run"]


def test_kernels_without_a_gradient_have_one_row():
    program = stale_table.Program("triton:launch_bare", gradients=(False,))

    assert verdicts(program, audited(gradients=(False,))) == ["silent"]


def record(tmp_path):
    return stale_rows.Record(tmp_path / "rows.json", device="cuda", again=False)


def test_a_row_without_a_verdict_is_done_again(tmp_path):
    kept = record(tmp_path)
    row = {"group": "battery", "program": "multiply", "gradient": None, "seconds": 1.0}

    kept.add([row | {"verdict": "not_run", "note": "no GPU"}])
    assert not record(tmp_path).has("battery", "multiply")
    kept.add([row | {"verdict": "silent"}])
    assert record(tmp_path).has("battery", "multiply")
    assert [r["verdict"] for r in json.loads(kept.path.read_text())["rows"]] == ["silent"]


def test_the_command_names_no_folder_of_this_machine(monkeypatch):
    words = ["/a/stale_battery.py", "--megatron", "/a/b", "--out", "/a/c.json", "--megatron=/a"]
    monkeypatch.setattr(sys, "argv", [*words, "--out=/a/d", "--first"])

    expected = "python benchmarks/stale_battery.py --megatron FOLDER --megatron=FOLDER --first"
    assert stale_rows.command() == expected


def run(tmp_path, actions, jobs):
    deadline = Deadline(None)
    begun = stale_battery.Run(record(tmp_path), deadline, jobs)
    for index, action in enumerate(actions):
        begun.measure(stale_battery.Work("battery", f"program {index}", action))
    return begun


def refuses():
    raise TargetError("CUDA cannot be used here")


def judged():
    return [{"group": "battery", "program": "good", "gradient": False, "verdict": "silent"}]


def test_a_run_in_vain_ends_with_its_reasons(tmp_path, capsys):
    assert run(tmp_path, [refuses] * 5, jobs=2).left_out == 3
    said = capsys.readouterr().out.splitlines()
    assert ["CUDA cannot be used here" in line for line in said] == [True, True, False]
    assert said[2] == "no program gets a verdict: the run ends here"


def test_a_run_with_a_verdict_goes_on(tmp_path):
    assert run(tmp_path, [judged, refuses, refuses, refuses], jobs=2).left_out == 0

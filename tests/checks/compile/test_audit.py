"""Whole audits, in processes of their own: of planted compilers, of two programs by inductor."""

import json
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samebits import cli
from samebits.checks.compile import TargetError, audit_compile, command, process, report
from samebits.checks.compile import audit as audit_module
from samebits.checks.compile.audit import audit, silence
from samebits.checks.compile.job import OUT_OF_BUDGET, Job
from samebits.checks.compile.process import Deadline
from samebits.checks.compile.self_test import judge
from samebits.checks.compile.sequence import Option, Scenario
from samebits.checks.compile.target import Target

pytestmark = pytest.mark.reference

KNOWN_BAD = "samebits.checks.compile.known_bad"
RIGHT = "planted_compilers:right"


def verdicts(found):
    return {result.case: result.verdict for result in report.results(found)}


def test_a_planted_fault_is_found_and_shown(capsys):
    code = cli.main(["check", "compile", f"{KNOWN_BAD}:planted", "--json", "--no-remedies"])

    found = json.loads(capsys.readouterr().out)

    assert code == 1
    assert found["faults"][0]["paths"] == ["scale"]
    wrong = found["faults"][0]["wrong_calls"][0]
    assert wrong["values"] != {"scale": 0.5}
    assert wrong["actual"] != wrong["expected"]


def run(folder, name, deadline=None):
    """Return what the fresh process of one sequence says."""
    scenario = Scenario("sequence", (Option("limit", (0.5, 0.25, 0.75, 2.0)),), False, None, 1)
    job = Job(
        kind="run",
        target=Target(f"planted_compilers:{name}"),
        folder=str(folder),
        output=str(folder / name),
        scenarios=(scenario, replace(scenario, name="next")),
        compiled=True,
    )
    return process.run(job, deadline or Deadline(None))


def test_after_a_process_that_died_another_goes_on(tmp_path):
    answer = run(tmp_path, "dies")

    assert set(answer.unfinished) == {"sequence", "next"}
    assert "the process ended with code 7" in answer.unfinished["next"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("raises", "this compiler cannot"), ("nothing_to_compile", "nothing was compiled")],
)
def test_what_was_not_compiled_says_why(tmp_path, name, reason):
    answer = run(tmp_path, name)

    assert [reason in step.error for step in answer.steps] == [True, True]


def test_a_target_that_does_not_load_is_tried_once(tmp_path, monkeypatch):
    starts = tmp_path / "starts"
    worker = f"import sys; open({str(starts)!r}, 'a').write('.'); sys.exit('no such weights')"
    (tmp_path / "dying.py").write_text(worker)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_WORKER", "dying")

    answer = run(tmp_path, "right")

    assert starts.read_text() == "."
    assert set(answer.unfinished) == {"sequence", "next"}
    assert all("code 1: no such weights" in reason for reason in answer.unfinished.values())


def test_the_budget_ends_what_the_target_started_too(tmp_path, monkeypatch):
    started = tmp_path / "started"
    (tmp_path / "starter.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"part = pathlib.Path({str(started)!r} + '.part')\n"
        "part.write_text(str(child.pid))\n"
        f"part.rename({str(started)!r})\n"
        "time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_WORKER", "starter")
    deadline = Deadline(None)
    job = Job(kind="look", target=Target("m:f"), folder=str(tmp_path), output=str(tmp_path / "out"))

    asked = threading.Thread(target=process.ask, args=(job, deadline))
    asked.start()
    until = time.monotonic() + 30
    while not started.exists() and time.monotonic() < until:
        time.sleep(0.01)
    deadline.be_now()
    asked.join(30)

    pid, until = int(started.read_text()), time.monotonic() + 30
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Return whether the process has not ended; whoever adopted it may not have looked yet."""
    try:
        state = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "Z" not in state.split(")")[1]


def test_an_interrupt_ends_the_other_lane(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    sleeper = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(60)"
    (tmp_path / "sleeper.py").write_text(sleeper)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_WORKER", "sleeper")
    scenario = Scenario("a", (Option("limit", (0.5, 0.25)),), False, None, 1)
    lanes = [[scenario], [replace(scenario, dynamic=True)]]
    job = Job(kind="run", target=Target("m:f"), folder=str(tmp_path), output=str(tmp_path / "out"))

    def tell(line):
        if "dynamic=None" in line:
            while not begun.exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.run_lanes(lanes, job, Deadline(None), tell=tell)
    assert time.monotonic() - start < 30


def test_a_time_limit_from_outside_is_an_interrupt(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    tidied = []

    def stopped_twice(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # `timeout` sends it to the process and its group
            tidied.append(True)

    monkeypatch.setattr(command, "audit", stopped_twice)

    assert cli.main(["check", "compile", RIGHT]) == 130
    assert tidied
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_budget_ends_a_compiler_that_hangs(tmp_path):
    deadline = Deadline(None)

    def end_once_it_hangs():
        until = time.monotonic() + 60
        while not list(tmp_path.glob("cache/*/hangs")) and time.monotonic() < until:
            time.sleep(0.01)
        deadline.be_now()

    threading.Thread(target=end_once_it_hangs).start()
    answer = run(tmp_path, "hangs", deadline)

    assert list(tmp_path.glob("cache/*/hangs"))
    assert answer.unfinished == dict.fromkeys(("sequence", "next"), OUT_OF_BUDGET)


def test_a_cache_that_poisons_another_process_is_seen(tmp_path):
    scenario = Scenario("sequence", (Option("limit", (0.5, 0.25, 0.75, 2.0)),), False, True, 1)
    job = Job(
        kind="run",
        target=Target("planted_compilers:poisoned"),
        folder=str(tmp_path),
        output=str(tmp_path / "out"),
        compiled=True,
    )

    answers = process.run_lanes([[scenario]], job, Deadline(None), tell=silence)

    wrong = {step.phase for answer in answers for step in answer.steps if step.wrong}
    assert [len(answer.steps) for answer in answers] == [5, 5]
    assert wrong == {"warm"}


def test_a_fault_from_the_first_call_on_is_told_apart(tmp_path):
    answer = run(tmp_path, "wrong_at_once")

    assert [step.wrong for step in answer.steps[:5]] == [True, False, False, False, False]
    assert answer.steps[0].actual == 1.5 * answer.steps[0].expected


def test_a_launcher_that_remembers_fails_whatever_the_compiler_does(monkeypatch):
    monkeypatch.setattr(audit_module, "run_lanes", lambda *_, **__: [])

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
    ("arguments", "message"),
    [
        ([], "give either TARGET or --self-test"),
        (["--self-test", RIGHT], "give either TARGET or --self-test"),
        (["--self-test", "--first"], "--first has no effect with --self-test"),
        ([RIGHT, "--budget", "0"], "must be greater than 0, got 0"),
        ([RIGHT, "--budget", "soon"], "invalid seconds value: 'soon'"),
        ([RIGHT, "--remedies", "all"], "unrecognized arguments: --remedies all"),
        (
            [RIGHT, "--reproducer", "no/such/folder/r.py"],
            "must name a file in a folder that exists",
        ),
        ([RIGHT, "--reproducer", "r.py", "--no-remedies"], "has no effect with --no-remedies"),
        ([RIGHT, "--number", "nothing"], "unknown number 'nothing'; expected one of 'limit'"),
        (["programs:clamped_swiglu", "--inputs", "programs:failing_inputs"], "raises KeyError"),
    ],
)
def test_usage_errors_exit_with_2(arguments, message, capsys):
    assert cli.main(["check", "compile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_compile_cache_that_cannot_be_written_to_is_a_usage_error(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))

    assert cli.main(["check", "compile", RIGHT]) == 2
    assert "must be a folder that can be written to" in capsys.readouterr().err


def test_no_folder_for_temporary_files_is_a_usage_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))

    assert cli.main(["check", "compile", RIGHT]) == 2
    assert "no folder for the caches of the audit" in capsys.readouterr().err


def test_the_clamped_swiglu_is_found_with_this_torch_or_mended_by_it():
    found = audit(Target(f"{KNOWN_BAD}:clamped_swiglu"), stop_at_first=True, remedies=False)

    mended = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
    assert bool(found.wrong) is not mended
    assert judge("clamped_swiglu", found)[0] == "pass"
    if found.wrong:
        assert any("limit" in guard for step in found.steps for guard in found.forgotten(step))


def test_inductor_is_right_where_a_float_is_only_multiplied():
    found = audit(Target("programs:multiply_compiled", "programs:two_floats"))

    assert len(verdicts(found)) == 4
    assert set(verdicts(found).values()) == {"pass"}
    assert not found.latent
    assert found.reproducer is None

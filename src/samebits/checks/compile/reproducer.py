"""Write a script that shows one wrong call with nothing but torch."""

import platform
from typing import Any

import torch

from samebits.checks.compile import survey
from samebits.checks.compile.discover import argument_name, leaves, original
from samebits.checks.compile.job import Job, StepRecord
from samebits.checks.compile.sequence import Scenario, Step
from samebits.checks.compile.source import copied, imported, literal
from samebits.checks.compile.target import load

_SCRIPT = '''\
"""{title}

Written by `samebits check compile` with torch {torch}, Python {python}, {system}. Exit code 1
and a line with STALE: the compiled function kept an old value. Processes: {processes}, with one new
cache directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())

{imports}

{function}


def inputs(shape):
    torch.manual_seed(0)
{inputs}


# For each process: (values, shape) of its calls.
CALLS = {calls}
GRADIENT = {gradient}


def set_values(args, kwargs, values):
{setters}


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def call(run, values, shape):
    args, kwargs = inputs(shape)
    set_values(args, kwargs, values)
    leaves = [t for t in tensors([args, kwargs]) if GRADIENT and t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.set_grad_enabled(GRADIENT):
        outputs = tensors([run(*args, **kwargs)])
    if GRADIENT:
        sum(t.sum() for t in outputs if t.requires_grad).backward()
    found = outputs + [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [t.detach().double() for t in found]


def distance(a, b):
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp_min(1e-30))


def main(process):
    compiled = {compiled}
    wrong = False
    for values, shape in CALLS[process]:
        with torch.compiler.set_stance("force_eager"):
            expected = call(target, values, shape)
        actual = call(compiled, values, shape)
        off = max(distance(a, e) for a, e in zip(actual, expected))
        stale = "  STALE" if off > {limit:.1e} else ""
        print(f"process {{process + 1}}, {{values}}: off by {{off:.1e}}{{stale}}")
        wrong |= bool(stale)
    return int(wrong)


if __name__ == "__main__":
    if len(sys.argv) > 1 or len(CALLS) == 1:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
    commands = [[sys.executable, __file__, str(index)] for index in range(len(CALLS))]
    sys.exit(max([subprocess.run(command).returncode for command in commands]))
'''


def write(job: Job) -> dict[str, Any]:
    """Return ``{"source": script}`` for the job's fault.

    Raises:
        ValueError: The function or its inputs cannot be written down.
    """
    scenario, fault = job.scenarios[0], job.fault
    if fault is None:
        raise ValueError("there is no wrong call")
    function, factory = load(job.target)
    call = survey.prepare(function, factory)
    calls = [call]
    if fault.shape:
        calls.append(survey.second(call, factory))
    made: list[str] = []
    code = imported(job.target, function)
    if job.inline:
        code = copied(function)
        made = [f"{literal(list(c.args))}, {literal(c.kwargs)}" for c in calls]
    paths = [option.path for option in scenario.options]
    processes = _calls(scenario, fault)
    compiled, switches = "target", ""
    # A copy leaves decorators out: what they compile is compiled here.
    behind_decorator = job.inline and "torch.compile(" not in code.text
    if behind_decorator or not job.compiled:
        compiled = f"torch.compile(target, dynamic={scenario.dynamic})"
    elif scenario.dynamic:
        # What dynamic=True sets, for functions that are compiled inside the target.
        switches = "\n\ntorch._dynamo.config.assume_static_by_default = False"
    return {
        "source": _SCRIPT.format(
            title=f"A number of {job.target.name} goes stale: {', '.join(paths)}.",
            torch=torch.__version__,
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            processes=len(processes),
            imports=code.imports + switches,
            function=code.text,
            inputs=_inputs(made) if made else _imported_inputs(),
            calls=_lines(processes),
            gradient=scenario.gradient,
            setters="\n".join(f"    {line}" for line in _setters(job, call, paths)),
            compiled=compiled,
            limit=max(fault.allowed, fault.distance / 4 if fault.distance < fault.allowed else 0.0),
        )
    }


def _calls(scenario: Scenario, fault: StepRecord) -> list[list[Step]]:
    """Return the fewest calls that can show the fault: what made the code, then what reused it."""
    fresh = scenario.steps("fresh")
    if fault.phase == "warm":
        return [fresh, scenario.steps("warm")[: fault.index + 1]]
    same = [s for s in fresh[: fault.index] if s.shape == fault.shape]
    needed = 1 if scenario.dynamic else 2
    own = fresh[fault.index]
    before = [s for s in same if s.values != own.values][-needed:]
    enough = len(before) == needed and fault.shape == 0
    return [[*(before if enough else fresh[: fault.index]), own]]


def _lines(processes: list[list[Step]]) -> str:
    rows = ["["]
    for steps in processes:
        rows.append("    [")
        rows += [f"        ({literal(dict(step.values))}, {step.shape})," for step in steps]
        rows.append("    ],")
    return "\n".join([*rows, "]"])


def _inputs(made: list[str]) -> str:
    lines = [f"    if shape == {i}:\n        return {text}" for i, text in enumerate(made)]
    return "\n".join(lines)


def _imported_inputs() -> str:
    return "    args, kwargs = made_inputs(shape)\n    return list(args), dict(kwargs)"


def _setters(job: Job, call: Any, paths: list[str]) -> list[str]:
    lines = []
    names = [argument_name(call, index) for index in range(len(call.args))]
    places = {place.path: place for place in leaves(call)}
    for path in paths:
        value = f"values[{path!r}]"
        if path in names:
            lines.append(f"args[{names.index(path)}] = {value}")
        elif path in call.kwargs:
            lines.append(f"kwargs[{path!r}] = {value}")
        elif job.inline:
            lines.append(f"globals()[{_global_name(path, original(call.function))!r}] = {value}")
        elif path in places:
            lines.append(f"set_number({path!r}, args, kwargs, {value})")
    return lines


def _global_name(path: str, function: Any) -> str:
    """Return the name that a closure cell or global has in the copied source."""
    name = path.removeprefix("target:").rpartition(".")[2]
    if any(mark in name for mark in "[]'") or hasattr(function, "forward"):
        raise ValueError(f"{path} has no name of its own in the source")
    return name

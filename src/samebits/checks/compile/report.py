"""What an audit says: verdicts, the facts that a bug report needs, and all of it in words."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from samebits.checks.compile.job import StepRecord
from samebits.checks.compile.record import Audit
from samebits.checks.compile.remedies import REMEDIES
from samebits.checks.compile.sequence import PHASES, Scenario
from samebits.checks.result import Result, Verdict, plain_table


def results(audit: Audit) -> list[Result]:
    """Return one verdict for each sequence, number without one, and thing that was not tried.

    Determinism: pure function of the audit.
    """
    found = [_of_scenario(audit, scenario) for scenario in audit.scenarios]
    for path, facts in audit.remembers.items():
        note = (
            f"the eager function itself remembers: after {facts['first']!r} it gives another result"
        )
        found.append(_result(audit, path, path, "fail", note, facts["effect"]))
    found += [
        _result(audit, number.path, number.path, "not_run", number.note)
        for number in audit.numbers
        if number.note and number.path not in audit.remembers
    ]
    named = {scenario.name for scenario in audit.scenarios}
    for name, reason in audit.unfinished.items():
        if name not in named:
            found.append(_result(audit, name, "", "not_run", reason))
    for detector, reason in audit.missing.items():
        found.append(_result(audit, detector, "", "not_run", f"not checked: {reason}"))
    return found


def _result(
    audit: Audit,
    case: str,
    problem: str,
    verdict: Verdict,
    note: str,
    measured: float | None = None,
) -> Result:
    return Result(
        check="compile",
        case=case,
        problem=problem,
        backend=audit.target,
        verdict=verdict,
        measured=measured,
        note=note,
    )


def _of_scenario(audit: Audit, scenario: Scenario) -> Result:
    steps = audit.of(scenario.name)
    wrong = [step for step in steps if step.wrong]
    latent = [step for step in audit.latent if step.scenario == scenario.name]
    errors = [step.error for step in steps if step.error]
    worst = max(wrong or steps, key=lambda step: step.distance, default=None)
    verdict: Verdict = "pass"
    if wrong:
        verdict, note = "fail", _describe(wrong[0])
    elif latent:
        verdict, note = "fail", _describe_latent(audit.forgotten(latent[0]))
    elif errors:
        verdict, note = "not_run", f"the compiled call raises {errors[0]}"
    elif scenario.name in audit.unfinished:
        verdict, note = "not_run", audit.unfinished[scenario.name]
    elif len(steps) < sum(len(scenario.steps(phase)) for phase in PHASES):
        verdict, note = "not_run", "it was stopped before" + (" its end" if steps else "")
    else:
        note = storm(steps)
    return Result(
        check="compile",
        case=scenario.name,
        problem=", ".join(option.path for option in scenario.options),
        backend=audit.target,
        verdict=verdict,
        measured=None if worst is None or verdict == "not_run" else worst.distance,
        allowed=None if worst is None or verdict == "not_run" else worst.allowed,
        note=note,
    )


def storm(steps: list[StepRecord]) -> str:
    """Return a note on recompilations: one graph for each value is right, and slow."""
    fresh = [step for step in steps if step.phase == "fresh" and step.shape == 0]
    values = {tuple(step.values.items()) for step in fresh}
    graphs = sum(step.graphs for step in fresh)
    per_call = max(1, fresh[0].graphs) if fresh else 1
    if len(values) > 2 and graphs >= len(values) * per_call:
        return f"recompiles for every value: {graphs} graphs for {len(values)} values"
    return f"{graphs} graphs for {len(values)} values"


def _describe(step: StepRecord) -> str:
    values = ", ".join(f"{path}={value!r}" for path, value in step.values.items())
    if step.index == 0 and step.phase == "fresh":
        return f"differs on the very first call ({values}): not a stale number; {step.tensor}"
    where = "second process, warm cache" if step.phase == "warm" else "same process"
    return f"{step.tensor} is wrong at call {step.index + 1} ({values}), {where}"


def _describe_latent(forgotten: list[str]) -> str:
    if forgotten:
        return f"right on these inputs, but the cache forgets the guard {forgotten[0]}"
    return "right on these inputs, but code for another value was taken from the cache"


def faults(audit: Audit) -> Iterator[dict[str, Any]]:
    """Yield the facts of each failing sequence, as JSON values."""
    for scenario in audit.scenarios:
        steps = audit.of(scenario.name)
        wrong = [step for step in steps if step.wrong]
        guards = sorted({guard for step in steps for guard in audit.forgotten(step)})
        if not wrong and not guards:
            continue
        yield {
            "paths": [option.path for option in scenario.options],
            "gradient": scenario.gradient,
            "dynamic": scenario.dynamic,
            "values": [step.values for step in steps if step.phase == "fresh"],
            "guards": guards,
            "wrong_calls": [_facts(step) for step in wrong],
            "graphs": sum(step.graphs for step in steps if step.phase == "fresh"),
            "reused": sum(step.reused for step in steps),
            "other_process": any(step.phase == "warm" for step in wrong),
        }


def _facts(step: StepRecord) -> dict[str, Any]:
    return {
        "process": step.phase,
        "call": step.index + 1,
        "values": step.values,
        "shape": step.shape,
        "tensor": step.tensor,
        "distance": step.distance,
        "allowed": step.allowed,
        "expected": step.expected,
        "actual": step.actual,
    }


def remedy_rows(audit: Audit) -> list[dict[str, Any]]:
    """Return for each remedy tried whether it was right, and what it cost."""
    rows = []
    for name, steps in audit.remedies.items():
        errors = [step.error for step in steps if step.error]
        calls = [step for step in steps if step.microseconds is None and not step.error]
        times = [step.microseconds for step in steps if step.microseconds is not None]
        fresh = [step for step in calls if step.phase == "fresh"]
        rows.append(
            {
                "remedy": name,
                "verdict": "not applicable" if errors else _right(calls),
                "graphs": sum(step.graphs for step in fresh),
                "compile_seconds": round(sum(s.seconds for s in fresh if s.graphs), 2),
                "microseconds": round(times[0], 1) if times else None,
                "note": errors[0] if errors else "",
            }
        )
    return rows


def _right(calls: list[StepRecord]) -> str:
    if not calls:
        return "not run"
    if any(step.wrong for step in calls):
        return "wrong"
    return "right"


def to_json(audit: Audit) -> Mapping[str, Any]:
    """Return everything as JSON values; a number that is not finite, which JSON lacks, is text.

    Determinism: pure function of the audit.
    """
    values: Mapping[str, Any] = _spelled(_values(audit))
    return values


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return value


def _values(audit: Audit) -> Mapping[str, Any]:
    return {
        "target": audit.target,
        "versions": dict(audit.versions),
        "numbers": [
            {"path": n.path, "kind": n.kind, "values": list(n.values), "note": n.note}
            for n in audit.numbers
        ],
        "results": [
            {
                name: value
                for name, value in json.loads(r.to_json()).items()
                if name in ("case", "verdict", "measured", "allowed", "note")
            }
            for r in results(audit)
        ],
        "faults": list(faults(audit)),
        "not_checked": dict(audit.missing),
        "remedies": remedy_rows(audit),
        "remedies_not_tried": dict(audit.remedies_not_tried),
        "reproducer": audit.reproducer,
    }


def text(audit: Audit, *, reproducer: str | None = None) -> str:
    """Return what there is to say beside the verdicts; empty where nothing is stale.

    Args:
        audit: Finished.
        reproducer: File that the reproducer was written to; None prints it in full.

    Determinism: pure function of its arguments.
    """
    parts = [*_faults(audit), *_remedies(audit), *_reproducer(audit, reproducer)]
    if parts:
        versions = ", ".join(f"{k} {v}" for k, v in audit.versions.items() if v)
        parts.append(f"versions: {versions}")
    return "\n\n".join(parts)


def _faults(audit: Audit) -> list[str]:
    parts = []
    for fault in faults(audit):
        gradient = "with" if fault["gradient"] else "without"
        lines = [f"{', '.join(fault['paths'])} {gradient} gradient, dynamic={fault['dynamic']}"]
        lines += [f"  guard that the cache forgets: {guard}" for guard in fault["guards"]]
        lines.append(f"  {fault['graphs']} graphs, {fault['reused']} of other values reused")
        wrong = fault["wrong_calls"]
        for call in wrong[:3]:
            values = ", ".join(f"{path}={value!r}" for path, value in call["values"].items())
            process = "second process" if call["process"] == "warm" else "first process"
            figures = f"{call['tensor']} off by {call['distance']:.1e}"
            if call["actual"] is not None:
                figures += f", {call['actual']:.6g} instead of {call['expected']:.6g}"
            lines.append(f"  {process}, call {call['call']}, {values}: {figures}")
        if len(wrong) > 3:
            lines.append(f"  and {len(wrong) - 3} more wrong calls")
        parts.append("\n".join(lines))
    return parts


def _remedies(audit: Audit) -> list[str]:
    rows = []
    for row in remedy_rows(audit):
        cost = "" if row["microseconds"] is None else f"{row['microseconds']:.0f}"
        figures = [str(row["graphs"]), f"{row['compile_seconds']:.1f}", cost]
        if row["verdict"] in ("not applicable", "not run"):
            figures = ["", "", ""]
        note = row["note"] or REMEDIES[row["remedy"]].code
        rows.append([row["remedy"], row["verdict"], *figures, note])
    if not rows:
        return []
    return [plain_table(["remedy", "result", "graphs", "compile s", "call µs", "how"], rows)]


def _reproducer(audit: Audit, path: str | None) -> list[str]:
    found = audit.reproducer
    if found is None:
        return []
    if found.get("source") is None:
        return ["no reproducer: " + "; ".join(found["reasons"])]
    kind = "self-contained" if found["self_contained"] else "importing the target"
    head = f"reproducer, {kind}, was run and shows the fault"
    return [f"{head}: {path}" if path else f"{head}:\n\n{found['source']}"]

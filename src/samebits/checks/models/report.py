"""Show findings to people: a table, the failures, and a paste-ready report."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from samebits.checks.models.finding import Finding, worst
from samebits.checks.result import VERDICTS, Verdict, plain_table

# Cases whose failure needs no further word in the table.
_WHOLE = ("default", "oracle", "language_model")
_ABOUT_ERRORS = (
    "Error is the root mean square of the difference divided by the largest exact value; exact is "
    "the class's own code run in fp64. Allowed is twice the error of a plain loop in the same "
    "dtype, plus two roundings."
)
_ABOUT_ARGUMENTS = (
    "Evidence `arguments`: the kernel cannot run on this machine; a torch function computed what "
    "the arguments that the adapter passes to it ask for."
)


class Cell(NamedTuple):
    """What one implementation does with one model, over every case and dtype."""

    verdict: Verdict
    text: str


def cell(findings: Sequence[Finding]) -> Cell:
    """Return the verdict over all cases: fail if any fails, else pass if any passes, else not_run.

    Args:
        findings: Every finding of one model and implementation; at least one.
    """
    verdicts = {finding.verdict for finding in findings}
    if "fail" in verdicts:
        bad = worst(findings)
        size = "raises" if bad.measured is None else f"WRONG {_size(bad.measured)}".rstrip()
        return Cell("fail", size if bad.case in _WHOLE else f"{size} ({bad.case})")
    if "pass" in verdicts:
        refused = {f.case for f in findings if f.verdict == "unsupported"}
        whole = {f.case for f in findings if f.verdict == "pass"}
        only = "+".join(sorted(refused - whole))
        return Cell("pass", f"ok, refuses {only}" if only else "ok")
    if "not_run" in verdicts:
        return Cell("not_run", "not run")
    return Cell("unsupported", "refused")


def table(findings: Iterable[Finding]) -> str:
    """Return one column per implementation, one line per model; models that are alike share a line.

    Determinism: in order of first appearance.
    """
    groups: dict[str, dict[str, list[Finding]]] = {}
    for finding in findings:
        groups.setdefault(finding.model, {}).setdefault(finding.implementation, []).append(finding)
    columns = list(dict.fromkeys(name for row in groups.values() for name in row))
    alike: dict[tuple[str, ...], list[str]] = {}
    for model, row in groups.items():
        cells = tuple(cell(row[c]).text if c in row else "" for c in columns)
        alike.setdefault(cells, []).append(model)
    lines = [(_together(models), *cells) for cells, models in alike.items()]
    return plain_table(("model", *columns), lines)


def _together(models: Sequence[str]) -> str:
    return models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more like it"


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Return the worst failure of each model and implementation."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.verdict == "fail":
            groups.setdefault((finding.model, finding.implementation), []).append(finding)
    return [worst(group) for group in groups.values()]


def summary(findings: Sequence[Finding]) -> str:
    """Return the table, what is wrong, the reasons of refusals, and the counts of verdicts."""
    parts = [table(findings)]
    groups: dict[tuple[str, str, bool], list[Finding]] = {}
    for finding in failures(findings):
        key = (finding.implementation, finding.case, finding.measured is None)
        groups.setdefault(key, []).append(finding)
    if groups:
        parts.append("\n".join(["wrong:", *map(_together_wrong, groups.values())]))
    parts += _refusals(findings)
    counts = dict.fromkeys(VERDICTS, 0)
    for finding in findings:
        counts[finding.verdict] += 1
    parts.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return "\n\n".join(parts)


def _together_wrong(group: Sequence[Finding]) -> str:
    """Return the worst of failures that are alike in a sentence, and the names of the others."""
    first = worst(group)
    others = [finding.model.rpartition(".")[2] for finding in group if finding is not first]
    return f"  {sentence(first)}" + (f"\n    also {', '.join(others)}" if others else "")


def _refusals(findings: Sequence[Finding]) -> list[str]:
    """Return the reasons of what was refused or could not run, each with how often it was given."""
    reasons: dict[tuple[str, str, str], set[str]] = {}
    for finding in findings:
        if finding.measured is None and finding.verdict in ("unsupported", "not_run"):
            key = (finding.verdict, finding.implementation, finding.note)
            reasons.setdefault(key, set()).add(finding.model)
    lines = []
    for (verdict, implementation, note), models in sorted(reasons.items()):
        where = next(iter(models)) if len(models) == 1 else f"{len(models)} models"
        lines.append(f"  {verdict} · {implementation} · {where}: {note}")
    return ["\n".join(["reasons:", *lines])] if lines else []


def sentence(finding: Finding) -> str:
    """Return what is wrong, in one line."""
    where = f"{finding.model} · {finding.implementation} · {finding.dtype} · {finding.case}"
    if finding.measured is None or finding.allowed is None:
        return f"{where}: {finding.note}"
    by_arguments = " (by its arguments)" if finding.evidence == "arguments" else ""
    row = "" if finding.worst_row is None else f", worst row {finding.worst_row}"
    if "mean" in finding.figures:
        row += f", mean |Δ log p| {finding.figures['mean']:.2g} nats"
    size = _size(finding.measured)
    off = (
        f"off by {size}, allowed {finding.allowed:.1e}"
        if size
        else "not 0 where it must be, or not finite"
    )
    return f"{where}: {finding.quantity} {off}{row}{by_arguments}"


def _size(measured: float) -> str:
    """Return the error, or "" where it has no size: a row that must be 0, or NaN."""
    return f"{measured:.1e}" if math.isfinite(measured) else ""


def issue_text(findings: Sequence[Finding]) -> str:
    """Return a report of every failure, to paste into an issue; "" where nothing failed."""
    bad = failures(findings)
    if not bad:
        return ""
    versions = ", ".join(f"{name} {value}" for name, value in bad[0].versions.items())
    pairs = ", ".join(sorted({f"`{f.implementation}`" for f in bad}))
    lines = [
        f"### Experts implementations compute another function than the model: {pairs}",
        "",
        f"Versions: {versions}.",
        "",
        _ABOUT_ERRORS,
        "",
        "| model | implementation | dtype | case | quantity | error | allowed | evidence |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in bad:
        error, allowed = (f"{v:.1e}" if v is not None else "—" for v in (f.measured, f.allowed))
        quantity = f.quantity if f.measured is not None else f.note.replace("|", "\\|")
        lines.append(
            f"| {f.model} | {f.implementation} | {f.dtype} | {f.case} | {quantity} | {error} "
            f"| {allowed} | {f.evidence or 'none'} |"
        )
    names = " ".join(f"--model {name}" for name in dict.fromkeys(f.model for f in bad))
    chosen = " ".join(f"--implementation {n}" for n in dict.fromkeys(f.implementation for f in bad))
    lines += ["", "To see it again:", "", "```", f"samebits check models {names} {chosen}", "```"]
    if any(f.evidence == "arguments" for f in bad):
        lines += [
            "",
            _ABOUT_ARGUMENTS,
        ]
    return "\n".join(lines)

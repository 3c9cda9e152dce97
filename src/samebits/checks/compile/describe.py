"""An audit in words: what goes stale, why, what helps, and the script that shows it."""

from samebits.checks.compile import report
from samebits.checks.compile.record import Audit
from samebits.checks.compile.remedies import REMEDIES
from samebits.checks.result import plain_table


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
    for fault in report.faults(audit):
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
    for row in report.remedy_rows(audit):
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

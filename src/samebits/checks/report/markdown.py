"""The same page as Markdown, for summaries of CI jobs."""

import re
from collections.abc import Iterable, Iterator, Sequence

from samebits.checks.report.load import Machine
from samebits.checks.report.page import figure, verdict
from samebits.checks.report.summary import Matrix, Summary, Worst
from samebits.checks.result import VERDICTS

# What Markdown, or the HTML in it, would take for markup.
_MARKUP = re.compile(r"([\\`*_\[\]|~$])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
# What becomes a link by itself.
_LINKS = {"://": "&#58;//", "www.": "www&#46;"}
# A table of more rows is folded away.
_FOLDED = 12


def markdown(summary: Summary) -> str:
    """Return the page.

    Determinism: pure function of the summary.
    """
    return "\n\n".join(_page(summary)) + "\n"


def _page(summary: Summary) -> Iterator[str]:
    yield f"# Samebits report\n\n{_text(verdict(summary))}"
    rows = [
        [_text(check), *(str(counts[v] or "") for v in VERDICTS)]
        for check, counts in summary.counts.items()
    ]
    yield _table(["check", *map(_text, VERDICTS)], rows)
    yield "## Worst cases"
    if summary.hidden:
        yield f"{summary.hidden} more rows with failures are not shown."
    rows = [_worst_row(worst) for worst in summary.worst]
    columns = ["verdict", "check", "case", "of", "measured", "allowed", "where"]
    yield _table(columns, rows) if rows else "Nothing was measured."
    yield "## Every case"
    for matrix in summary.matrices:
        yield _matrix(matrix)
    yield "## Refused and not run"
    rows = [
        [*map(_text, (check, column, said)), str(count), _text(note)]
        for check, column, said, note, count in summary.reasons
    ]
    yield _table(["check", "of", "verdict", "how many", "reason"], rows) if rows else "None."
    yield "## Support matrix"
    for matrix in summary.support:
        yield _matrix(matrix)
    yield "## Versions and commands"
    for machine in summary.machines:
        yield _machine(machine)


def _worst_row(worst: Worst) -> list[str]:
    record = worst.record
    said = f"**{record.verdict}**" if record.verdict == "fail" else record.verdict
    figures = (figure(record.measured), figure(record.allowed))
    return [said, *map(_text, (record.check, record.row, record.column, *figures, worst.where))]


def _matrix(matrix: Matrix) -> str:
    rows = [
        [_text(row), *("" if cell is None else _text(cell.text) for cell in cells)]
        for row, cells in matrix.rows
    ]
    table = _table(["", *map(_text, matrix.columns)], rows)
    if len(rows) <= _FOLDED:
        return f"### {_text(matrix.title)}\n\n{table}"
    title = f"<summary>{_text(matrix.title)}, {len(rows)} rows</summary>"
    return f"<details>{title}\n\n{table}\n\n</details>"


def _machine(machine: Machine) -> str:
    lines = [f"### {_text(machine.source)}", ""]
    lines += [f"* {_text(name)} {_text(found)}" for name, found in machine.versions.items()]
    extra = [machine.system, *machine.devices, machine.bits_key]
    lines += [f"* {_text(found)}" for found in extra if found]
    lines += [f"* command: {_text(command)}" for command in machine.commands]
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """Return ``text`` on one line, with nothing in it that is markup."""
    plain = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
    marked = _MARKUP.sub(r"\\\1", plain)
    text = "".join(_ENTITIES.get(c, c) for c in marked)
    for link, broken in _LINKS.items():
        text = text.replace(link, broken)
    return text

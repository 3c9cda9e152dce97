"""The page: one HTML file without scripts, without anything from outside, in light and dark."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from samebits.checks.report.load import Machine
from samebits.checks.report.summary import Cell, Matrix, Summary, Worst
from samebits.checks.result import VERDICTS

# Nothing is loaded and nothing runs, whatever a name in the results says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --soft: #57606a; --page: #fff; --line: #d5dae0;
  --h0: #f4f8f5; --h1: #e3f1e6; --h2: #d3e9c8; --h3: #ecedb0; --h4: #fae3a2;
  --h5: #ffc9b8; --h6: #ffaa98; --h7: #ff8d80; --none: #f0f1f3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b1; --page: #14181c;
  --line: #353d46; --h0: #17211b; --h1: #183020; --h2: #254019; --h3: #454414; --h4: #57430f;
  --h5: #64281c; --h6: #7c241c; --h7: #94211f; --none: #22272d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0 auto; max-width: 76rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; } p, ul { margin: .4rem 0; }
.soft { color: var(--soft); } nav a { margin-right: 1rem; } a { color: inherit; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; }
table { border-collapse: collapse; font-size: .85rem; min-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem; overflow-wrap: normal;
  border-bottom: 1px solid var(--line); }
thead th { white-space: nowrap; } tbody th { font-weight: 600; min-width: 9rem;
  max-width: 24rem; overflow-wrap: anywhere; } tr:last-child > * { border-bottom: 0; }
.figure { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.note { min-width: 18rem; overflow-wrap: anywhere; }
td.cell { white-space: nowrap; } .fail { font-weight: 600; }
.unsupported, .not_run { background: var(--none); color: var(--soft); }
.h0 { background: var(--h0); } .h1 { background: var(--h1); } .h2 { background: var(--h2); }
.h3 { background: var(--h3); } .h4 { background: var(--h4); } .h5 { background: var(--h5); }
.h6 { background: var(--h6); } .h7 { background: var(--h7); }
code { font: .85rem/1.4 ui-monospace, monospace; } pre { margin: 0; padding: .6rem; }
"""


def html(summary: Summary) -> str:
    """Return the page.

    Determinism: pure function of the summary.
    """
    return "\n".join(_page(summary)) + "\n"


def _page(summary: Summary) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Samebits report</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>Samebits report</h1><p>{_text(verdict(summary))}</p>"
    yield f"<nav>{''.join(f'<a href=#{anchor}>{title}</a>' for anchor, title in _SECTIONS)}</nav>"
    yield _heading("verdicts")
    rows = [
        [_th(check), *(_figure(str(counts[verdict] or "")) for verdict in VERDICTS)]
        for check, counts in summary.counts.items()
    ]
    yield _table("verdicts", ["check", *VERDICTS], rows)
    yield _heading("worst")
    if summary.hidden:
        yield f"<p>{summary.hidden} more rows with failures are not shown.</p>"
    yield _worst(summary)
    yield _heading("matrices")
    yield (
        '<p class="soft">ok 43%: the largest error is 43% of what is allowed. '
        "WRONG ×12: it is 12 times as large. refused: a clear refusal. not run: never a pass.</p>"
    )
    for matrix in summary.matrices:
        yield f"<h3>{_text(matrix.title)}</h3>{_matrix(matrix)}"
    yield _heading("reasons")
    columns = ["check", "of", "verdict", "how many", "reason"]
    rows = [
        [_td(check), _td(column), _td(said), _figure(str(count)), _td(note, "note")]
        for check, column, said, note, count in summary.reasons
    ]
    yield _table("reasons", columns, rows) if rows else "<p>None.</p>"
    yield _heading("support")
    for matrix in summary.support:
        yield f"<h3>{_text(matrix.title)}</h3>{_matrix(matrix)}"
    yield _heading("machines")
    for machine in summary.machines:
        yield _machine(machine)
    yield "</body></html>"


# Columns of numbers.
_FIGURES = frozenset({*VERDICTS, "measured", "allowed", "how many"})
_SECTIONS = (
    ("verdicts", "Verdicts"),
    ("worst", "Worst cases"),
    ("matrices", "Every case"),
    ("reasons", "Refused and not run"),
    ("support", "Support matrix"),
    ("machines", "Versions and commands"),
)


def verdict(summary: Summary) -> str:
    """Return the page's one sentence."""
    totals = {v: sum(counts[v] for counts in summary.counts.values()) for v in VERDICTS}
    counted = ", ".join(f"{count} {name}" for name, count in totals.items() if count)
    if totals["fail"]:
        return f"Something failed: {counted}."
    return f"Nothing failed: {counted}." if totals["pass"] else f"Nothing was proved: {counted}."


def figure(value: float | None) -> str:
    """Return a measured or allowed figure as text."""
    return "" if value is None else f"{value:.2e}" if math.isfinite(value) else str(value)


def _heading(anchor: str) -> str:
    return f'<h2 id="{anchor}">{dict(_SECTIONS)[anchor]}</h2>'


def _worst(summary: Summary) -> str:
    several = len(summary.machines) > 1
    columns = ["verdict", "check", "case", "of", "measured", "allowed", "where"]
    rows = [
        [*_worst_row(worst), *([_td(summary.machines[worst.machine].source)] if several else [])]
        for worst in summary.worst
    ]
    if not rows:
        return "<p>Nothing was measured.</p>"
    return _table("worst cases", [*columns, *(["from"] if several else [])], rows)


def _worst_row(worst: Worst) -> list[str]:
    record = worst.record
    heat = "h7" if record.verdict == "fail" else "h4"
    return [
        _td(record.verdict, f"cell {record.verdict} {heat}"),
        _td(record.check),
        _th(record.row),
        _td(record.column),
        _figure(figure(record.measured)),
        _figure(figure(record.allowed)),
        _td(worst.where, "note"),
    ]


def _matrix(matrix: Matrix) -> str:
    rows = [[_th(row), *map(_cell, cells)] for row, cells in matrix.rows]
    return _table(matrix.title, ["", *matrix.columns], rows)


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    heat = f"h{cell.heat}" if cell.heat is not None else "h1" if cell.verdict == "pass" else ""
    if cell.verdict == "fail" and cell.heat is None:
        heat = "h6"
    return _td(cell.text, f"cell {cell.verdict} {heat}".strip())


def _machine(machine: Machine) -> str:
    rows = [[_th(name), _td(version)] for name, version in machine.versions.items()]
    rows += [[_th("system"), _td(machine.system)]] if machine.system else []
    rows += [[_th("device"), _td(device)] for device in machine.devices]
    rows += [[_th("bits key"), _td(machine.bits_key)]] if machine.bits_key else []
    parts = [f"<h3>{_text(machine.source)}</h3>"]
    if rows:
        parts.append(_table(machine.source, ["what", "which"], rows))
    if machine.commands:
        lines = "\n".join(map(_text, machine.commands))
        parts.append(f'<div class="scroll"><pre><code>{lines}</code></pre></div>')
    return "".join(parts)


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(
        f"<th scope=col{' class=figure' * (column in _FIGURES)}>{_text(column)}</th>"
        for column in columns
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    # Focusable, so that it can be scrolled by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(name)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _th(text: str) -> str:
    return f"<th scope=row>{_text(text)}</th>"


def _td(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"


def _figure(text: str) -> str:
    return _td(text, "figure")


def _text(text: str) -> str:
    """Return ``text`` as HTML: nothing in it is markup, and nothing is unprintable."""
    return escape("".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text))

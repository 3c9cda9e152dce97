"""What a check says: a frozen record for each thing judged, its table, its JSON, the exit code."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Literal, TypeVar

from samebits import env

Verdict = Literal["pass", "fail", "unsupported", "not_run"]
VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "unsupported", "not_run")

# What foreign code raises: exceptions of its own making too, and ``sys.exit``, which would end the
# check with the exit code of a pass. An interrupt stops the check.
FOREIGN_ERRORS: tuple[type[BaseException], ...] = (Exception, SystemExit)

_Item = TypeVar("_Item")

PASSED, FAILED, USAGE, NOTHING_RUN = 0, 1, 2, 3
EXIT_CODES = "exit codes: 0 all passed, 1 something failed, 2 usage, 3 nothing could be run"

_STYLES = {"pass": "green", "fail": "bold red", "unsupported": "yellow", "not_run": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The verdict of one check on one backend (or someone else's function) and one problem."""

    # The check's name on the command line.
    check: str
    # Name of the case.
    case: str
    # ``str(problem)``.
    problem: str
    # Name of the backend, or "module:function".
    backend: str
    # unsupported: a clear refusal. not_run: it could not be tried here.
    verdict: Verdict
    # What was measured and what was allowed, in the unit of the check; None where nothing ran.
    measured: float | None = None
    allowed: float | None = None
    # Where it was measured, or the reason of the verdict.
    note: str = ""

    def to_json(self) -> str:
        """Return one line of JSON, keys in the order of the fields; a figure not finite is null.

        Determinism: pure function of the result.
        """
        values = asdict(self)
        for name in ("measured", "allowed"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = None
                values["note"] = f"{name} is not finite; {values['note']}".removesuffix("; ")
        return json.dumps(values, ensure_ascii=False)


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return 1 where something failed, 0 where something passed and nothing failed, else 3."""
    seen = set(verdicts)
    if "fail" in seen:
        return FAILED
    return PASSED if "pass" in seen else NOTHING_RUN


def print_results(results: Sequence[Result], *, as_json: bool) -> None:
    """Print results to stdout, as a table or as JSON lines, and their counts to stderr.

    Results without a measurement that say the same of one backend share a line of the table.
    """
    if as_json:
        for result in results:
            print(result.to_json())
        return
    rows = []
    for same in _groups(results):
        first = same[0]
        case = first.case if len(same) == 1 else f"{first.case} and {len(same) - 1} more"
        figures = [_figure(first.measured), _figure(first.allowed)]
        rows.append([first.backend, case, first.verdict, *figures, first.note])
    print_table(["backend", "case", "verdict", "measured", "allowed", "note"], rows)
    counts = ((verdict, sum(r.verdict == verdict for r in results)) for verdict in VERDICTS)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts if count), file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout: drawn by rich on a terminal where it is installed, else plain.

    A plain table has columns two spaces apart and no padding after the last.
    """
    if not _draw(columns, rows):
        print(plain_table(columns, rows))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as text.

    Determinism: pure function of its arguments.
    """
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = (
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def tracked(items: Sequence[_Item], what: str) -> Iterator[_Item]:
    """Yield ``items`` behind a progress bar on stderr, if that is a terminal and rich is here."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=what, console=Console(stderr=True), transient=True)


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Draw with rich and return True; False where stdout is no terminal, or rich is absent."""
    if not sys.stdout.isatty() or env.no_color() or find_spec("rich") is None:
        return False
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)
    return True


def _groups(results: Sequence[Result]) -> list[list[Result]]:
    groups: dict[tuple[object, ...], list[Result]] = {}
    for index, result in enumerate(results):
        said = (result.backend, result.verdict, result.note)
        key = said if result.measured is None else (index, *said)
        groups.setdefault(key, []).append(result)
    return list(groups.values())


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"

"""Put results together: what failed, what was nearest to its limit, where, and why not."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from samebits.checks.report.load import Machine, Record
from samebits.checks.result import VERDICTS, Verdict

# Failures and near misses that are shown, and reasons.
_FAILURES, _NEAREST, _REASONS = 40, 10, 60


class Cell(NamedTuple):
    """Several results that share a row and a column."""

    verdict: Verdict
    text: str
    # How much of what is allowed: 0 nothing … 4 all of it, 5 … 7 more; None: nothing measured.
    heat: int | None


class Matrix(NamedTuple):
    """A table of cells; None where there is no result."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell | None]]]


class Worst(NamedTuple):
    """The worst of several results that share a check, a row and a column."""

    record: Record
    # Index of the machine that it is from.
    machine: int
    # How many more of them have its verdict.
    more: int

    @property
    def where(self) -> str:
        """What was judged, what is said of it, and how many more there are."""
        parts = (self.record.detail, self.record.note, f"and {self.more} more" * (self.more > 0))
        return " — ".join(part for part in parts if part)


class Summary(NamedTuple):
    """Everything that the page shows."""

    machines: list[Machine]
    # Check -> how often each verdict.
    counts: dict[str, Counter[Verdict]]
    matrices: list[Matrix]
    # Failures first, then what was nearest to its limit.
    worst: list[Worst]
    # Rows and columns with failures that are not among them.
    hidden: int
    # (check, column, verdict, note, how many).
    reasons: list[tuple[str, str, Verdict, str, int]]
    # One for each operating system: torch down, transformers across.
    support: list[Matrix]


def summarise(machines: Sequence[Machine]) -> Summary:
    """Return what the page shows of the results of one or more machines.

    Determinism: pure function of its arguments; in order of first appearance.
    """
    records = [(record, i) for i, machine in enumerate(machines) for record in machine.records]
    counts: dict[str, Counter[Verdict]] = {}
    for record, _ in records:
        counts.setdefault(record.check, Counter())[record.verdict] += 1
    failures = _worst(pair for pair in records if pair[0].verdict == "fail")
    near = _worst(pair for pair in records if pair[0].verdict == "pass" and pair[0].share)
    return Summary(
        machines=list(machines),
        counts=counts,
        matrices=[_matrix(check, [r for r, _ in records if r.check == check]) for check in counts],
        worst=failures[:_FAILURES] + near[:_NEAREST],
        hidden=max(0, len(failures) - _FAILURES),
        reasons=_reasons(record for record, _ in records),
        support=_support(machines),
    )


def _worst(records: Iterable[tuple[Record, int]]) -> list[Worst]:
    """Return the worst of each check, row and column, the furthest over its limit first."""
    groups: dict[tuple[str, str, str], list[tuple[Record, int]]] = {}
    for record, machine in records:
        key = (record.check, record.row, record.column)
        groups.setdefault(key, []).append((record, machine))
    found = [Worst(*max(group, key=_share), len(group) - 1) for group in groups.values()]
    return sorted(found, key=_share, reverse=True)


def _share(found: Sequence[Any]) -> float:
    share: float | None = found[0].share
    return -math.inf if share is None or math.isnan(share) else share


def cell(records: Sequence[Record]) -> Cell:
    """Return what several results say together: fail wins, then pass, then not_run.

    Args:
        records: At least one.
    """
    verdicts = {record.verdict for record in records}
    shares = [share for r in records if (share := r.share) is not None and not math.isnan(share)]
    most = max(shares, default=None)
    if "fail" in verdicts:
        failed = [record for record in records if record.verdict == "fail"]
        most = max((share for r in failed if (share := r.share) is not None), default=math.inf)
        size = "" if most <= 1 or not math.isfinite(most) else f" ×{most:.3g}"
        count = f" ({len(failed)} of {len(records)})" if len(records) > 1 else ""
        return Cell("fail", f"WRONG{size}{count}", _heat(most, failed=True))
    if "pass" in verdicts:
        known = most is not None and math.isfinite(most)
        return Cell("pass", f"ok {most:.0%}" if known else "ok", _heat(most, failed=False))
    if "not_run" in verdicts:
        return Cell("not_run", "not run", None)
    return Cell("unsupported", "refused", None)


def _heat(share: float | None, *, failed: bool) -> int | None:
    if failed:
        return 5 if share is None or share <= 2 else 6 if share <= 10 else 7
    return None if share is None else math.ceil(4 * min(share, 1.0))


def _matrix(check: str, records: Sequence[Record]) -> Matrix:
    columns = list(dict.fromkeys(record.column for record in records))
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        groups.setdefault(record.row, {}).setdefault(record.column, []).append(record)
    rows = [
        (row, [cell(found[column]) if column in found else None for column in columns])
        for row, found in groups.items()
    ]
    return Matrix(check, columns, rows)


def _reasons(records: Iterable[Record]) -> list[tuple[str, str, Verdict, str, int]]:
    said: Counter[tuple[str, str, Verdict, str]] = Counter(
        (record.check, record.column, record.verdict, record.note)
        for record in records
        if record.verdict in ("unsupported", "not_run")
    )
    return [(*key, count) for key, count in said.most_common(_REASONS)]


def _support(machines: Sequence[Machine]) -> list[Matrix]:
    """Return for each operating system a matrix of torch and transformers versions."""
    places: dict[str, dict[tuple[str, str], list[Record]]] = {}
    for machine in machines:
        versions = machine.versions
        key = (versions.get("torch", "unknown"), versions.get("transformers", "none"))
        of_system = places.setdefault(machine.system or "unknown system", {})
        of_system.setdefault(key, []).extend(machine.records)
    return [_versions(system, found) for system, found in places.items()]


def _versions(system: str, found: dict[tuple[str, str], list[Record]]) -> Matrix:
    columns = sorted({key[1] for key in found}, key=_order)
    rows = []
    for torch_version in sorted({key[0] for key in found}, key=_order):
        cells = [_counted(found.get((torch_version, column))) for column in columns]
        rows.append((f"torch {torch_version}", cells))
    return Matrix(system, [f"transformers {column}" for column in columns], rows)


def _counted(records: Sequence[Record] | None) -> Cell | None:
    if not records:
        return None
    counts = Counter(record.verdict for record in records)
    text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return cell(records)._replace(text=text, heat=None)


def _order(version: str) -> list[tuple[int, int, str]]:
    """Sort "2.9" before "2.10"."""
    parts = version.replace("+", ".").split(".")
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]

"""Compare rows with the targets of a TOML file; a target without its rows is a miss.

A target is a table of ``[[target]]``: ``name``, ``op``, ``where`` (column → list of values; every
combination needs a row of ours) and one measure:

* ``fraction_at_least``: of the floor, in each cell; ``mean_fraction_at_least``: geometric mean;
* ``ms_at_most``;
* ``speedup_at_least`` with ``peer``; with ``or_fraction`` that part of the floor is enough, too;
* ``at_most`` with ``column``: any other number of the rows.

``above_mb`` and ``up_to_mb`` leave other rows out.
"""

import itertools
import statistics
import tomllib
from pathlib import Path
from typing import Any

from case import OURS

Row = dict[str, Any]
_MEASURES = (
    "fraction_at_least", "mean_fraction_at_least", "ms_at_most", "speedup_at_least", "at_most",
)  # fmt: skip
_KNOWN = {"name", "op", "where", "peer", "or_fraction", "column", "above_mb", "up_to_mb"}
# Keys that belong to one measure.
_PAIRS = {"peer": "speedup_at_least", "column": "at_most"}


def read(path: Path) -> list[Row]:
    """Return the targets of a file.

    Raises:
        ValueError: A target has an unknown key, or not exactly one measure.
    """
    targets: list[Row] = tomllib.loads(path.read_text())["target"]
    for target in targets:
        unknown = target.keys() - _KNOWN - set(_MEASURES)
        measures = [key for key in _MEASURES if key in target]
        if unknown or len(measures) != 1:
            what = f"unknown {sorted(unknown)}" if unknown else f"measures {measures}"
            raise ValueError(f"target {target.get('name')!r} must have one of {_MEASURES}; {what}")
        for key, measure in _PAIRS.items():
            if (measure in target) != (key in target):
                raise ValueError(f"target {target['name']!r}: {key} belongs to {measure}")
    return targets


def misses(targets: list[Row], rows: list[Row]) -> list[str]:
    """Return one line for each combination of a target that has no row, or a row that misses it."""
    found = []
    for target in targets:
        where, fractions = target["where"], []
        for values in itertools.product(*where.values()):
            wanted = {"op": target["op"], **dict(zip(where, values, strict=True))}
            matching = [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]
            label = f"{target['name']}: {' '.join(str(v) for v in wanted.values())}"
            found += _misses_of(target, label, matching)
            fractions += [r["fraction"] for r in matching if r["candidate"] == OURS and "ms" in r]
        least = target.get("mean_fraction_at_least")
        if least is not None and fractions and statistics.geometric_mean(fractions) < least:
            mean = statistics.geometric_mean(fractions)
            found.append(f"{target['name']}: {mean:.3f} of the floor on average, {least} asked")
    return found


def _misses_of(target: Row, label: str, rows: list[Row]) -> list[str]:
    ours = [row for row in rows if row["candidate"] == OURS]
    if not ours:
        return [f"{label}: no row"]
    found = []
    for row in ours:
        size = row.get("moved", 0) / 1e6
        if size <= target.get("above_mb", -1) or size > target.get("up_to_mb", float("inf")):
            continue
        if "ms" not in row:
            found.append(f"{label}: wrong result")
        elif "peer" in target:
            found += _slower(target, label, row, rows)
        else:
            found += _beyond(target, label, row)
    return found


def _beyond(target: Row, label: str, row: Row) -> list[str]:
    least = target.get("fraction_at_least")
    if least is not None and row["fraction"] < least:
        return [f"{label}: {row['fraction']:.3f} of the floor, {least} asked"]
    most = target.get("ms_at_most")
    if most is not None and row["ms"] > most:
        return [f"{label}: {row['ms']:.4f} ms, {most} allowed"]
    column, most = target.get("column"), target.get("at_most")
    if column is not None and column not in row:
        return [f"{label}: no {column} in its row"]
    if column is not None and row[column] > most:
        return [f"{label}: {column} {row[column]:.3f}, {most} allowed"]
    return []


def _slower(target: Row, label: str, row: Row, rows: list[Row]) -> list[str]:
    peers = [peer for peer in rows if peer["candidate"] == target["peer"] and "ms" in peer]
    if row.get("fraction", 0.0) >= target.get("or_fraction", float("inf")):
        return []
    if not peers:
        return [f"{label}: no row of {target['peer']}"]
    speedup = min(peer["ms"] for peer in peers) / row["ms"]
    if speedup >= target["speedup_at_least"]:
        return []
    return [f"{label}: {speedup:.2f}x {target['peer']}, {target['speedup_at_least']}x asked"]

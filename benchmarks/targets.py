"""Compare rows with the targets of a TOML file; a target without its rows is a miss.

A target is a table of ``[[target]]``: ``name``, ``op``, ``where`` (column → list of values; every
combination needs a row of ours), one of ``fraction_at_least``, ``ms_at_most``, or
``speedup_at_least`` with ``peer``; and optionally ``above_mb`` or ``up_to_mb``, which leave the
other rows out.
"""

import itertools
import tomllib
from pathlib import Path
from typing import Any

from case import OURS

Row = dict[str, Any]
_MEASURES = ("fraction_at_least", "ms_at_most", "speedup_at_least")
_KNOWN = {"name", "op", "where", "peer", "above_mb", "up_to_mb", *_MEASURES}


def read(path: Path) -> list[Row]:
    """Return the targets of a file.

    Raises:
        ValueError: A target has an unknown key, or not exactly one measure.
    """
    targets: list[Row] = tomllib.loads(path.read_text())["target"]
    for target in targets:
        unknown = target.keys() - _KNOWN
        measures = [key for key in _MEASURES if key in target]
        if unknown or len(measures) != 1:
            what = f"unknown {sorted(unknown)}" if unknown else f"measures {measures}"
            raise ValueError(f"target {target.get('name')!r} must have one of {_MEASURES}; {what}")
        if ("speedup_at_least" in target) != ("peer" in target):
            raise ValueError(f"target {target['name']!r}: peer belongs to speedup_at_least")
    return targets


def misses(targets: list[Row], rows: list[Row]) -> list[str]:
    """Return one line for each combination of a target that has no row, or a row that misses it."""
    found = []
    for target in targets:
        where = target["where"]
        for values in itertools.product(*where.values()):
            wanted = {"op": target["op"], **dict(zip(where, values, strict=True))}
            matching = [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]
            found += _misses_of(target, wanted, matching)
    return found


def _misses_of(target: Row, wanted: Row, rows: list[Row]) -> list[str]:
    label = f"{target['name']}: {' '.join(str(v) for v in wanted.values())}"
    ours = [row for row in rows if row["candidate"] == OURS]
    if not ours:
        return [f"{label}: no row"]
    found = []
    for row in ours:
        size = row["moved"] / 1e6
        if size <= target.get("above_mb", -1) or size > target.get("up_to_mb", float("inf")):
            continue
        if "ms" not in row:
            found.append(f"{label}: wrong result")
        elif "fraction_at_least" in target and row["fraction"] < target["fraction_at_least"]:
            found.append(
                f"{label}: {row['fraction']:.3f} of the floor, {target['fraction_at_least']} asked"
            )
        elif "ms_at_most" in target and row["ms"] > target["ms_at_most"]:
            found.append(f"{label}: {row['ms']:.4f} ms, {target['ms_at_most']} allowed")
        elif "peer" in target:
            found += _slower(target, label, row, rows)
    return found


def _slower(target: Row, label: str, row: Row, rows: list[Row]) -> list[str]:
    peers = [peer for peer in rows if peer["candidate"] == target["peer"] and "ms" in peer]
    if not peers:
        return [f"{label}: no row of {target['peer']}"]
    speedup = min(peer["ms"] for peer in peers) / row["ms"]
    if speedup >= target["speedup_at_least"]:
        return []
    return [f"{label}: {speedup:.2f}x {target['peer']}, {target['speedup_at_least']}x asked"]

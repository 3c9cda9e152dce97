"""Rows of ``stale_battery.py``: what an audit says of a program, kept in a file from row to row."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from stale_table import Program

from samebits import env
from samebits.checks.compile.record import Audit
from samebits.checks.compile.report import results
from samebits.checks.result import Result

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_LONGEST_REASON = 300


class Record:
    """The JSON file of one device and torch, kept up to date row by row."""

    def __init__(self, path: Path, *, device: str, again: bool) -> None:
        self.path, self._lock = path, Lock()
        self.values: dict[str, Any] = {"device": device, "versions": env.versions(), "rows": []}
        if device == "cuda" and torch.cuda.is_available():
            self.values["gpu"] = torch.cuda.get_device_name()
        if path.exists() and not again:
            self.values |= json.loads(path.read_text())

    def has(self, group: str, name: str, *, first: bool = False) -> bool:
        """Return whether the program was judged; wholly, unless ``first`` is enough."""
        rows = [r for r in self.values["rows"] if (r["group"], r["program"]) == (group, name)]
        if any(row["verdict"] == "not_run" and not stopped(row, rows) for row in rows):
            return False
        cut = any(r.get("first") and r.get("stale") for r in rows)
        return bool(rows) and (first or not cut)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        with self._lock:
            done = {(row["group"], row["program"]) for row in rows}
            old = [r for r in self.values["rows"] if (r["group"], r["program"]) not in done]
            self.values["rows"] = old + [row | {"command": command()} for row in rows]
            # In one step: a run may be killed at any moment.
            written = self.path.with_suffix(".part")
            written.write_text(json.dumps(self.values, indent=1) + "\n")
            written.replace(self.path)
            for row in rows:
                print(summary(row), flush=True)


def command() -> str:
    """Return the command line of this run, without the folders of this machine."""
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    hidden = ""
    for word in sys.argv[1:]:
        option, _, value = word.partition("=")
        if hidden != "--out" and option != "--out":
            folder = hidden == "--megatron" or (option == "--megatron" and value)
            words.append(("--megatron=" if value else "") + "FOLDER" if folder else word)
        hidden = word
    return " ".join(words)


def summary(row: dict[str, Any]) -> str:
    where = {None: "", False: "no gradient", True: "gradient"}[row.get("gradient")]
    what = f"{row['group']:9} {row['program']:40} {where:11}"
    said = f"{what} {row['verdict']:11} {row['seconds']:6.1f} s"
    return said if row["verdict"] not in ("not_run", "refused") else f"{said}  {reason(row)}"


def reason(row: dict[str, Any]) -> str:
    """Return why a row has no verdict, in one line."""
    reasons = [row.get("note", ""), *row.get("errors", ()), *row.get("not_run", {}).values()]
    said = " ".join(next((r for r in reasons if r), "nothing was called").split())
    return said if len(said) <= _LONGEST_REASON else f"…{said[-_LONGEST_REASON:]}"


def rows_of(group: str, program: Program, found: Audit) -> Iterator[dict[str, Any]]:
    """Yield what an audit says of a program without a gradient, and with one."""
    verdicts = {result.case: result for result in results(found)}
    for gradient in program.gradients:
        chosen = {s.name for s in found.scenarios if s.gradient is gradient}
        steps = [s for s in found.steps if s.scenario in chosen]
        wrong = [s for s in steps if s.wrong]
        alarm = any(verdicts[name].verdict == "fail" for name in chosen)
        alarm |= not gradient and bool(found.remembers)
        row = {
            "group": group,
            "program": program.name,
            "gradient": gradient,
            "expected": program.stale(VERSION, gradient),
            "stale": bool(wrong) or (not gradient and bool(found.remembers)),
            "stale_automatic": any(
                s.phase == "fresh" and "dynamic=None" in s.scenario for s in wrong
            ),
            "stale_second_process": any(s.phase == "warm" for s in wrong),
            "remembers": sorted(found.remembers),
            "guard_dropped": any(found.forgotten(s) for s in steps),
            "code_reused": any(s.reused for s in steps if s.phase == "fresh"),
            "errors": sorted({s.error for s in steps if s.error}),
            "not_run": unfinished(found, verdicts, chosen),
            "not_checked": sorted(found.missing),
            "calls": len(steps),
            "worst_right": max((s.distance for s in steps if not s.wrong), default=0.0),
            "least_wrong": min((s.distance for s in wrong), default=None),
        }
        yield row | {"verdict": verdict(row, program, alarm)}


def unfinished(found: Audit, verdicts: Mapping[str, Result], chosen: set[str]) -> dict[str, str]:
    """Return which of the sequences were not run, and why; why there are none."""
    if not chosen:
        return dict(found.unfinished) | {n.path: n.note for n in found.numbers if n.note}
    return {n: verdicts[n].note for n in sorted(chosen) if verdicts[n].verdict == "not_run"}


def verdict(row: dict[str, Any], program: Program, alarm: bool) -> str:
    """Return "found", "missed", "silent" (rightly), "beyond" (measured wrong, not in the table)…"""
    if not alarm and (row["not_run"] or not row["calls"]):
        known = bool(row["errors"]) and row["gradient"] and VERSION in program.refused
        return "refused" if known else "not_run"
    if row["expected"]:
        return "found" if alarm else "missed"
    if row["stale"]:
        return "beyond"
    return "false alarm" if alarm else "silent"


def stopped(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether ``--first`` left a row out because the program's other row was enough."""
    key = (row["group"], row["program"])
    others = [r for r in rows if (r["group"], r["program"]) == key and r is not row]
    return row["verdict"] == "not_run" and any(r.get("first") and r.get("stale") for r in others)

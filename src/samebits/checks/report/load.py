"""Read what checks print with ``--json``: verdicts, and the machine that they were reached on."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.checks.result import VERDICTS, Verdict
from samebits.errors import must

_EXPECTED = "be what samebits check … --json, samebits env --json or samebits report --save wrote"


class ResultsError(ValueError):
    """A file that holds no results; the message says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One verdict, in the words that all checks share."""

    check: str
    # Case, or model.
    row: str
    # Backend, implementation, or someone else's function.
    column: str
    # What was judged there.
    detail: str
    verdict: Verdict
    measured: float | None
    allowed: float | None
    note: str

    @property
    def share(self) -> float | None:
        """``measured / allowed``; inf for a failure without a figure, None where there is none."""
        if self.measured is None or self.allowed is None:
            return math.inf if self.verdict == "fail" else None
        if self.allowed > 0:
            return self.measured / self.allowed
        return 0.0 if self.measured == 0 else math.inf


@dataclass(slots=True, kw_only=True)
class Machine:
    """Where results come from: one file, or this process."""

    source: str
    versions: dict[str, str] = field(default_factory=dict)
    system: str = ""
    devices: list[str] = field(default_factory=list)
    bits_key: str = ""
    commands: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


def read(path: Path) -> Machine:
    """Return the results in a file of JSON lines.

    Raises:
        ResultsError: The file holds no results, or a line is something else.
        OSError: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ResultsError(must(str(path), "be UTF-8 text", error)) from None
    machine = Machine(source=path.name)
    add(machine, text.splitlines())
    if not machine.records:
        raise ResultsError(must(str(path), "hold at least one result", "none"))
    return machine


def add(machine: Machine, lines: Iterable[str]) -> None:
    """Add the results, versions and commands that JSON lines hold to ``machine``.

    Raises:
        ResultsError: A line is something else.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{machine.source}:{number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ResultsError(
                must(where, "be one JSON object", f"{line[:40]!r} ({error})")
            ) from None
        _add(machine, value, where)


def _add(machine: Machine, value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ResultsError(must(where, "be one JSON object", type(value).__name__))
    if "bits_key" in value:
        machine.versions |= _versions(value)
        machine.devices = [str(device) for device in value.get("devices") or []]
        machine.system = str(value.get("system") or "")
        machine.bits_key = str(value["bits_key"])
    elif "command" in value:
        machine.commands.append(str(value["command"]))
    elif "target" in value and isinstance(value.get("results"), list):
        shared = {"check": "compile", "backend": value["target"]}
        machine.versions = _versions(value) | machine.versions
        for result in value["results"]:
            if not isinstance(result, dict):
                raise ResultsError(must(where, _EXPECTED, type(result).__name__))
            machine.records.append(_record(shared | result, where))
    elif value.get("verdict") in VERDICTS and "check" in value:
        machine.versions = _versions(value) | machine.versions
        machine.records.append(_record(value, where))
    else:
        keys = ", ".join(sorted(map(str, value))[:6]) or "an empty object"
        raise ResultsError(must(where, _EXPECTED, keys))


def _record(value: Mapping[str, Any], where: str) -> Record:
    verdict = value.get("verdict")
    if verdict not in VERDICTS:
        raise ResultsError(must(where, f"have a verdict of {', '.join(VERDICTS)}", repr(verdict)))
    named = {"row": value.get("case"), "column": value.get("backend")}
    detail = [value.get("problem")]
    if "model" in value:
        named = {"row": value["model"], "column": value.get("implementation")}
        detail = [value.get("case"), value.get("dtype"), value.get("quantity")]
    return Record(
        check=str(value["check"]),
        **{name: str(found or "") for name, found in named.items()},
        detail=" · ".join(str(part) for part in detail if part),
        verdict=verdict,
        measured=_number(value.get("measured"), where),
        allowed=_number(value.get("allowed"), where),
        note=str(value.get("note") or ""),
    )


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ResultsError(must(where, "measure in numbers", repr(value)))
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _versions(value: Mapping[str, Any]) -> dict[str, str]:
    found = value.get("versions")
    return dict(_pairs(found)) if isinstance(found, dict) else {}


def _pairs(versions: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, version in versions.items():
        if version is not None:
            yield str(name), str(version)

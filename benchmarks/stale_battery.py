"""Audit small programs whose verdict is known: does `samebits check compile` find every stale one?

    python benchmarks/stale_battery.py                     # 16 programs, ± gradient
    python benchmarks/stale_battery.py --groups battery families clean remedies self-test --jobs 8
    python benchmarks/stale_battery.py --groups megatron --megatron FOLDER   # an unpacked wheel
    python benchmarks/stale_battery.py --device cuda --groups battery triton remedies --jobs 6

Rows are written as they come to ``benchmarks/results/stale-<device>-torch-<version>.json``; a
second run goes on where the first ended, and redoes what ``--first`` cut short. Exit code 1: a
program that this torch gets wrong was not found, a right one was reported, or one was not run. Two
cores take about a minute for each program.
"""

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import stale_megatron  # noqa: E402
import stale_programs  # noqa: E402
import stale_table  # noqa: E402

from samebits import env  # noqa: E402
from samebits.checks.compile.audit import audit, silence  # noqa: E402
from samebits.checks.compile.record import Audit  # noqa: E402
from samebits.checks.compile.report import remedy_rows  # noqa: E402
from samebits.checks.compile.self_test import self_test  # noqa: E402
from samebits.checks.compile.target import Target, TargetError  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
REMEDIED = ("clamped_swiglu", "rms_norm_scaled")
# What no run should end with; a program that was not run was not judged.
BAD = ("missed", "false alarm", "fail", "not_run")
OWN = ("remedies", "self-test")
# What stands before the colon of a program's name.
MODULES = {
    "": "stale_programs",
    "triton": "stale_triton",
    "swiglu": "megatron.core.fusions.fused_bias_swiglu",
    "geglu": "megatron.core.fusions.fused_bias_geglu",
}
ON_CUDA = {"battery", "triton", *OWN}


class Record:
    """The JSON file of one device and torch, kept up to date row by row."""

    def __init__(self, path: Path, *, device: str, again: bool) -> None:
        self.path, self._lock = path, Lock()
        self.values: dict[str, Any] = {"device": device, "versions": env.versions(), "rows": []}
        if path.exists() and not again:
            self.values |= json.loads(path.read_text())

    def has(self, group: str, name: str, *, first: bool = False) -> bool:
        """Return whether the program was measured; wholly, unless ``first`` is enough."""
        rows = [r for r in self.values["rows"] if (r["group"], r["program"]) == (group, name)]
        stopped = any(r.get("first") and r.get("stale") for r in rows)
        return bool(rows) and (first or not stopped)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        with self._lock:
            done = {(row["group"], row["program"]) for row in rows}
            old = [r for r in self.values["rows"] if (r["group"], r["program"]) not in done]
            self.values["rows"] = old + [row | {"command": command} for row in rows]
            self.path.write_text(json.dumps(self.values, indent=1) + "\n")
        for row in rows:
            print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    where = {None: "", False: "no gradient", True: "gradient"}[row.get("gradient")]
    what = f"{row['group']:9} {row['program']:40} {where:11}"
    return f"{what} {row['verdict']:11} {row['seconds']:6.1f} s"


def rows_of(group: str, program: stale_table.Program, found: Audit) -> Iterator[dict[str, Any]]:
    """Yield what an audit says of a program without a gradient, and with one."""
    for gradient in (False, True):
        chosen = {s.name for s in found.scenarios if s.gradient is gradient}
        steps = [s for s in found.steps if s.scenario in chosen]
        wrong = [s for s in steps if s.wrong]
        alarm = bool(wrong) or any(s.dropped for s in steps)
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
            "guard_dropped": any(s.dropped for s in steps),
            "code_reused": any(s.reused for s in steps if s.phase == "fresh"),
            "errors": sorted({s.error for s in steps if s.error}),
            "not_run": dict(found.unfinished) if not steps else {},
            "not_checked": sorted(found.missing),
            "calls": len(steps),
            "worst_right": max((s.distance for s in steps if not s.wrong), default=0.0),
            "least_wrong": min((s.distance for s in wrong), default=None),
        }
        yield row | {"verdict": verdict(row, alarm)}


def verdict(row: dict[str, Any], alarm: bool) -> str:
    """Return "found", "missed", "silent" (rightly), "beyond" (measured wrong, not in the table)…"""
    if not row["calls"] and not alarm:
        return "not_run"
    if row["expected"]:
        return "found" if alarm else "missed"
    if row["stale"]:
        return "beyond"
    return "false alarm" if alarm else "silent"


def measure(group: str, program: stale_table.Program, inputs: str, *, first: bool) -> list[Any]:
    module, _, function = program.name.rpartition(":")
    module = MODULES[module]
    # Behind the name may stand which of its paths the inputs take.
    function = function.partition(" ")[0]
    start = time.time()
    try:
        target = Target(f"{module}:{function}", inputs)
        found = audit(target, only=program.only, stop_at_first=first, remedies=False)
    except TargetError as error:
        row = {"group": group, "program": program.name, "verdict": "not_run", "note": str(error)}
        return [row | {"seconds": round(time.time() - start, 1)}]
    seconds = round(time.time() - start, 1)
    return [row | {"seconds": seconds, "first": first} for row in rows_of(group, program, found)]


def measure_remedies(name: str, device: str) -> list[Any]:
    start = time.time()
    target = Target(f"stale_programs:{name}", f"stale_programs:on_{device}")
    found = audit(target, stop_at_first=True)
    rows = remedy_rows(found)
    wrong = [r["remedy"] for r in rows if r["verdict"] == "wrong"]
    self_contained = bool(found.reproducer and found.reproducer.get("self_contained"))
    row = {"group": "remedies", "program": name, "remedies": rows, "wrong": wrong}
    said = "nothing stale" if not found.wrong else f"{len(wrong)} wrong"
    row |= {"reproducer_self_contained": self_contained, "verdict": said}
    return [row | {"seconds": round(time.time() - start, 1)}]


def measure_self_test() -> list[Any]:
    start = time.time()
    results = self_test(tell=silence)
    seconds = round(time.time() - start, 1)
    return [
        {
            "group": "self-test",
            "program": r.case,
            "verdict": r.verdict,
            "note": r.note,
            "seconds": seconds,
        }
        for r in results
    ]


def work(arguments: argparse.Namespace, record: Record) -> Iterator[Callable[[], list[Any]]]:
    """Yield what is still to be measured."""
    for group in arguments.groups:
        if group == "self-test" and not record.has(group, "self-test planted"):
            yield measure_self_test
        if group == "remedies":
            for name in REMEDIED:
                if not record.has(group, name):
                    yield lambda n=name: measure_remedies(n, arguments.device)
        programs = stale_table.GROUPS.get(group, ())
        label = group
        if group == "megatron":
            label, programs = f"{group} {stale_megatron.version()}", stale_megatron.PROGRAMS
        for program in programs:
            wanted = not arguments.programs or program.name in arguments.programs
            if wanted and not record.has(label, program.name, first=arguments.first):
                inputs = program.inputs
                if arguments.device == "cuda":
                    inputs = stale_programs.on_cuda
                where = f"{inputs.__module__}:{inputs.__name__}"
                yield lambda g=label, p=program, w=where: measure(g, p, w, first=arguments.first)


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    groups = [*stale_table.GROUPS, "megatron", *OWN]
    among = ", ".join(groups)
    add("--groups", nargs="+", choices=groups, default=["battery"], metavar="GROUP", help=among)
    add("--programs", nargs="+", metavar="NAME", help="only these; default: all of the groups")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--jobs", type=int, default=1, metavar="N", help="audits beside each other, two cores each")
    add("--first", action="store_true", help="stop each audit at its first wrong call")
    add("--megatron", metavar="FOLDER", help="holds the package megatron, for the group megatron")
    add("--again", action="store_true", help="begin a new file")
    add("--out", type=Path, metavar="FILE", help="default: beside the other results")
    arguments = parser.parse_args()
    if "megatron" in arguments.groups:
        if arguments.megatron:
            sys.path.insert(0, arguments.megatron)
        try:
            importlib.import_module("megatron.core")
        except ImportError as error:
            parser.error(f"megatron-core does not import ({error}); give --megatron FOLDER")
    can = ON_CUDA if arguments.device == "cuda" else set(groups) - {"triton"}
    if wrong := set(arguments.groups) - can:
        parser.error(f"--device {arguments.device} has no inputs for the group {min(wrong)}")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    return arguments


def main() -> int:
    arguments = parse()
    name = f"stale-{arguments.device}-torch-{torch.__version__.partition('+')[0]}.json"
    path = arguments.out or HERE / "results" / name
    record = Record(path, device=arguments.device, again=arguments.again)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda action: record.add(action()), work(arguments, record)))
    rows = [r for r in record.values["rows"] if r["group"].partition(" ")[0] in arguments.groups]
    counts = Counter("stopped" if stopped(row, rows) else row["verdict"] for row in rows)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()), "in", record.path)
    return int(not rows or any(counts[verdict] for verdict in BAD))


def stopped(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether ``--first`` left a row out because the program's other row was enough."""
    key = (row["group"], row["program"])
    others = [r for r in rows if (r["group"], r["program"]) == key and r is not row]
    return row["verdict"] == "not_run" and any(r.get("first") and r.get("stale") for r in others)


if __name__ == "__main__":
    sys.exit(main())

"""Audit small programs whose verdict is known: does `samebits check compile` find every stale one?

    python benchmarks/stale_battery.py                     # 16 programs, ± gradient
    python benchmarks/stale_battery.py --groups battery families clean remedies self-test --jobs 8
    python benchmarks/stale_battery.py --groups megatron --megatron FOLDER   # an unpacked wheel
    python benchmarks/stale_battery.py --device cuda --groups battery triton --jobs 16 --budget 280

Rows are written as they come to ``benchmarks/results/stale-<device>-torch-<version>.json``; a
second run goes on where the first ended, and redoes what was not run or what ``--first`` cut short.
Where as many programs as there are jobs end without a verdict before any has one, the run ends with
their reasons. Exit code 1: a program that this torch gets wrong was not found, a right one was
reported, or one was not run. Two cores take about a minute for each program.
"""

import argparse
import importlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import stale_megatron  # noqa: E402
import stale_programs  # noqa: E402
import stale_table  # noqa: E402
from stale_rows import Record, rows_of, stopped  # noqa: E402

from samebits.checks.compile.audit import audit, silence  # noqa: E402
from samebits.checks.compile.command import seconds  # noqa: E402
from samebits.checks.compile.job import OUT_OF_BUDGET  # noqa: E402
from samebits.checks.compile.process import Deadline  # noqa: E402
from samebits.checks.compile.report import remedy_rows  # noqa: E402
from samebits.checks.compile.self_test import self_test  # noqa: E402
from samebits.checks.compile.target import Target, TargetError  # noqa: E402

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


def measure(
    group: str,
    program: stale_table.Program,
    inputs: str,
    *,
    first: bool,
    deadline: Deadline | None = None,
) -> list[Any]:
    module, _, function = program.name.rpartition(":")
    # Behind the name may stand which of its paths the inputs take.
    target = Target(f"{MODULES[module]}:{function.partition(' ')[0]}", inputs)
    found = audit(target, only=program.only, deadline=deadline, stop_at_first=first, remedies=False)
    return [row | {"first": first} for row in rows_of(group, program, found)]


def measure_remedies(name: str, device: str, deadline: Deadline) -> list[Any]:
    target = Target(f"stale_programs:{name}", f"stale_programs:on_{device}")
    found = audit(target, deadline=deadline, stop_at_first=True)
    rows = remedy_rows(found)
    wrong = [r["remedy"] for r in rows if r["verdict"] == "wrong"]
    self_contained = bool(found.reproducer and found.reproducer.get("self_contained"))
    row = {"group": "remedies", "program": name, "remedies": rows, "wrong": wrong}
    said = "nothing stale" if not found.wrong else f"{len(wrong)} wrong"
    if found.late or deadline.left <= 0:
        said, row["note"] = "not_run", OUT_OF_BUDGET
    return [row | {"reproducer_self_contained": self_contained, "verdict": said}]


def measure_self_test() -> list[Any]:
    return [
        {"group": "self-test", "program": r.case, "verdict": r.verdict, "note": r.note}
        for r in self_test(tell=silence)
    ]


class Work(NamedTuple):
    """A program to measure."""

    group: str
    program: str
    run: Callable[[], list[Any]]


def work(arguments: argparse.Namespace, record: Record, deadline: Deadline) -> Iterator[Work]:
    """Yield what is still to be measured."""
    for group in arguments.groups:
        if group == "self-test" and not record.has(group, "self-test planted"):
            yield Work(group, "", measure_self_test)
        if group == "remedies":
            for name in REMEDIED:
                if not record.has(group, name):
                    action = partial(measure_remedies, name, arguments.device, deadline)
                    yield Work(group, name, action)
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
                action = partial(
                    measure, label, program, where, first=arguments.first, deadline=deadline
                )
                yield Work(label, program.name, action)


class Run:
    """Measures programs beside each other, and ends early where none gets a verdict."""

    def __init__(self, record: Record, deadline: Deadline, jobs: int) -> None:
        self._record, self._deadline, self._jobs = record, deadline, jobs
        self._lock, self._judged, self._in_vain = Lock(), False, 0
        self.left_out = 0

    def measure(self, item: Work) -> None:
        """Measure one program, and record it; leave it out where no time is left."""
        if self._deadline.left <= 0:
            self.left_out += 1
            return
        start = time.monotonic()
        try:
            rows = item.run()
        except TargetError as error:
            row = {"group": item.group, "program": item.program, "verdict": "not_run"}
            rows = [row | {"note": str(error)}]
        took = round(time.monotonic() - start, 1)
        self._record.add([row | {"seconds": took} for row in rows])
        with self._lock:
            self._judged |= any(row["verdict"] != "not_run" for row in rows)
            self._in_vain += 1
            if not self._judged and self._in_vain == self._jobs:
                print("no program gets a verdict: the run ends here", flush=True)
                self._deadline.be_now()


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
    add("--budget", type=seconds, metavar="SECONDS", help="of the whole run; rows keep what it did")
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
    known = {p.name for g in stale_table.GROUPS.values() for p in g}
    known |= {p.name for p in stale_megatron.PROGRAMS}
    if unknown := set(arguments.programs or ()) - known:
        parser.error(f"unknown program {min(unknown)}; known: {', '.join(sorted(known))}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no GPU")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    return arguments


def main() -> int:
    arguments = parse()
    name = f"stale-{arguments.device}-torch-{torch.__version__.partition('+')[0]}.json"
    path = arguments.out or HERE / "results" / name
    record = Record(path, device=arguments.device, again=arguments.again)
    deadline = Deadline(arguments.budget)
    # `timeout` and Ctrl-C end the audits, and what they have is recorded.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: deadline.be_now())
    run = Run(record, deadline, arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run.measure, work(arguments, record, deadline)))
    rows = [r for r in record.values["rows"] if r["group"].partition(" ")[0] in arguments.groups]
    counts = Counter("stopped" if stopped(row, rows) else row["verdict"] for row in rows)
    counts["programs left out"] = run.left_out
    said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    print(said or "nothing", "in", record.path)
    return int(not rows or bool(run.left_out) or any(counts[verdict] for verdict in BAD))


if __name__ == "__main__":
    sys.exit(main())

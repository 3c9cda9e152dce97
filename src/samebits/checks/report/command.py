"""`samebits report`: its arguments, the checks that it runs, and what it writes and returns."""

import argparse
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from samebits import env
from samebits.checks import CHECKS
from samebits.checks.report.load import Machine, add, read
from samebits.checks.report.markdown import markdown
from samebits.checks.report.page import html, verdict
from samebits.checks.report.summary import Summary, summarise
from samebits.checks.result import EXIT_CODES, NOTHING_RUN, USAGE, exit_code
from samebits.checks.writing import written_whole
from samebits.errors import must, unknown

FORMS: Mapping[str, Callable[[Summary], str]] = {".html": html, ".md": markdown}
# Checks that need no arguments: what --run runs where it is given none.
DEFAULT_RUNS = ("parity", "models", "determinism")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report`` to ``parser``."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="page to write: .html, or .md for CI summaries")
    add("results", metavar="RESULTS", nargs="*", type=Path, help="JSON lines, one file a machine")
    add(
        "--run",
        nargs="*",
        metavar="CHECK",
        help='run these first, here: names, or "name arguments" in quotes; '
        f"default: {', '.join(DEFAULT_RUNS)}",
    )
    add("--save", metavar="FILE", type=Path, help="keep what --run printed, as RESULTS for later")


def main(arguments: argparse.Namespace) -> int:
    """Run checks if asked to, write the page and return the exit code.

    Determinism: the page is a function of the results.
    """
    try:
        form = _form(arguments)
        machines = [read(path) for path in arguments.results]
        if arguments.run is not None:
            machines.append(_run(arguments.run or DEFAULT_RUNS, arguments.save))
        summary = summarise(machines)
        with written_whole(arguments.out) as beside:
            # A lone surrogate cannot be encoded; a name in the results may hold one.
            beside.write_bytes(form(summary).encode("utf-8", "replace"))
    except (ValueError, OSError) as error:
        print(f"samebits report: {error}", file=sys.stderr)
        return USAGE
    print(f"{arguments.out}: {verdict(summary)}", file=sys.stderr)
    return exit_code(record.verdict for machine in machines for record in machine.records)


def _form(arguments: argparse.Namespace) -> Callable[[Summary], str]:
    if arguments.out.suffix not in FORMS:
        rule = f"end in {' or '.join(FORMS)}"
        raise ValueError(must("OUT", rule, repr(str(arguments.out))))
    if arguments.run is None and not arguments.results:
        raise ValueError("give RESULTS, or --run to make them")
    if arguments.run is None and arguments.save is not None:
        raise ValueError("--save has no effect without --run")
    # Checks take minutes: what they say must not be lost at the end.
    for path in (arguments.out, arguments.save):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(must(str(path), "name a file in a folder that exists", "none"))
    for command in arguments.run or ():
        _words(command)
    return FORMS[arguments.out.suffix]


def _words(command: str) -> list[str]:
    words = shlex.split(command)
    if not words or words[0] not in CHECKS:
        raise ValueError(unknown("check", command, CHECKS))
    return words if "--json" in words else [*words, "--json"]


def _run(commands: Sequence[str], save: Path | None) -> Machine:
    """Run checks in processes of their own, and return what they said.

    Raises:
        ValueError: One of them was called wrongly, or crashed; its words are in the message.
        OSError: ``save`` cannot be written.
    """
    described = {"versions": env.versions(), "devices": env.devices(), "system": env.system()}
    lines = [json.dumps(described | {"bits_key": env.bits_key()})]
    try:
        for command in commands:
            lines += _said(command)
    finally:
        # Checks take minutes: one that is called wrongly does not cost what the others said.
        if save is not None:
            with written_whole(save) as beside:
                beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    machine = Machine(source=platform.node() or "this machine")
    add(machine, lines)
    return machine


def _said(command: str) -> list[str]:
    """Run one check, and return its command and what it printed."""
    words = ["check", *_words(command)]
    spelled = shlex.join(["samebits", *words])
    print(f"running {spelled}", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "samebits", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode not in (0, 1, NOTHING_RUN):
        raise ValueError(f"{spelled} ended with exit code {done.returncode}: {last}")
    lines = done.stdout.splitlines()
    if done.returncode == NOTHING_RUN and not done.stdout.strip():
        lines = [json.dumps(_not_run(words[1], last))]
    return [json.dumps({"command": spelled}), *lines]


def _not_run(check: str, reason: str) -> dict[str, str]:
    said = reason.removeprefix("not_run: ")
    return {"check": check, "case": "all", "backend": "", "verdict": "not_run", "note": said}

"""`samebits check determinism`: its arguments, and what it prints and returns."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from samebits import env
from samebits.checks.determinism.coverage import blind, coverage
from samebits.checks.determinism.evidence import (
    Debt,
    Evidence,
    joined,
    read,
    read_debts,
    write_debts,
)
from samebits.checks.determinism.planted import planted
from samebits.checks.determinism.variant import Registry, RegistryError, load
from samebits.checks.result import (
    EXIT_CODES,
    NOTHING_RUN,
    PASSED,
    USAGE,
    exit_code,
    print_results,
    print_table,
)
from samebits.checks.writing import written_whole
from samebits.errors import must

OURS = Path(__file__).parent / "ours.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check determinism`` to ``parser``."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add(
        "--registry",
        type=Path,
        default=OURS,
        metavar="FILE",
        help="a Python file with variants(); default: that of our kernels",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--replay", action="store_true", help="replay on this GPU, write evidence")
    what.add_argument("--list", action="store_true", help="list variants and kernels, and stop")
    what.add_argument(
        "--owe",
        metavar="REASON",
        help="list what lacks evidence as debt, until a run on a GPU renews it; drop paid debts",
    )
    add(
        "--only",
        action="append",
        metavar="PATTERN",
        help="with --replay: variants of that name, as in 'fused*'; may be given more than once",
    )
    add("--owed", action="store_true", help="with --replay: variants that lack evidence")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="with --replay: the evidence file to write, or to add to",
    )
    add("--replays", type=int, default=48, metavar="N", help="under load; default: 48")
    add(
        "--processes",
        type=int,
        default=8,
        metavar="N",
        help="with --replay: other processes, which share the variants; default: 8",
    )
    add(
        "--tree",
        metavar="REVISION",
        help="with --replay, where git is absent: what `git describe --always --dirty` says",
    )
    add("--budget", type=float, metavar="SECONDS", help="with --replay: start nothing after that")
    add("--json", action="store_true", help="one JSON object a line instead of the table")


def main(arguments: argparse.Namespace) -> int:
    """Run the check, print its results and return the exit code.

    Determinism: without --replay a function of files.
    """
    try:
        registry = load(arguments.registry, planted())
        if arguments.list:
            return _list(registry)
        if arguments.owe is not None:
            return _owe(registry, arguments.owe)
        _check_options(arguments)
        if arguments.replay:
            return _replay(registry, arguments)
        results = coverage(registry).results
    except RegistryError as error:
        print(f"samebits check determinism: {error}", file=sys.stderr)
        return USAGE
    print_results(results, as_json=arguments.json)
    return exit_code(result.verdict for result in results)


def _check_options(arguments: argparse.Namespace) -> None:
    for name in ("only", "owed", "out", "tree", "budget"):
        if getattr(arguments, name) not in (None, False) and not arguments.replay:
            raise RegistryError(must(f"--{name}", "come with --replay", "it alone"))
    if arguments.replay and arguments.out is None:
        raise RegistryError(must("--replay", "come with --out FILE", "it alone"))
    for name in ("replays", "processes"):
        if getattr(arguments, name) < 1:
            raise RegistryError(must(f"--{name}", "be >= 1", getattr(arguments, name)))


def _list(registry: Registry) -> int:
    rows = [[v.name, " ".join(v.kernels), v.expected] for v in registry.variants]
    print_table(["variant", "kernels", "expected"], rows)
    return PASSED


def _owe(registry: Registry, reason: str) -> int:
    if not reason.strip():
        raise RegistryError(must("--owe", "give the reason", repr(reason)))
    before = read_debts(registry.debts)
    lacking = coverage(registry).lacking
    debts = {}
    for name, current in lacking.items():
        debt = before.get(name)
        debts[name] = debt if debt and debt.hash == current else Debt(reason, current)
    write_debts(registry.debts, debts)
    for name, debt in debts.items():
        if debt != before.get(name):
            print(f"owed: {name}")
    for name in sorted(before.keys() - lacking.keys()):
        print(f"paid: {name}")
    return PASSED


def _replay(registry: Registry, arguments: argparse.Namespace) -> int:
    # Imported here: coverage needs none of it.
    from samebits.checks.determinism import record

    if env.default_device().type != "cuda" and "TRITON_INTERPRET" not in env.variables():
        print("not_run: there is no CUDA device here", file=sys.stderr)
        return NOTHING_RUN

    out = arguments.out
    plan = record.Plan(
        only=arguments.only or (),
        owed=arguments.owed,
        replays=arguments.replays,
        processes=arguments.processes,
        tree=arguments.tree,
        budget=arguments.budget,
    )
    # Before git is asked: what is misspelt is said first.
    record.chosen(registry, replace(plan, owed=False))
    about = record.begun(registry, plan)
    known = _known(out, about, registry)
    variants = record.chosen(registry, plan, known)
    if plan.owed and all(variant.expected == "different" for variant in variants):
        print("nothing to replay: every variant has evidence", file=sys.stderr)
        return PASSED

    faults = [v.name for v in registry.variants if v.expected == "different"]

    def keep(made: Evidence) -> None:
        whole = made if known is None else joined(known, made, faults)
        with written_whole(out) as file:
            file.write_text(whole.to_json(), encoding="utf-8")

    try:
        # Before anything is replayed: what was found must have a place.
        out.parent.mkdir(parents=True, exist_ok=True)
        keep(about)
        made = record.record(registry, variants, plan, about, keep)
    except OSError as error:
        raise RegistryError(f"{out} cannot be written: {error}") from error
    found = record.results(made, variants)
    print_results(found, as_json=arguments.json)
    said = f"{made.seconds:.0f} s on {made.where}, tree {made.tree}"
    print(f"{said}; {'written' if known is None else 'added'} to {out}", file=sys.stderr)
    return exit_code(result.verdict for result in found)


def _known(out: Path, about: Evidence, registry: Registry) -> Evidence | None:
    """Return the evidence that is there and will be added to."""
    if not out.exists():
        return None
    known = read(out)
    of_this = "be evidence of this machine and tree; other evidence goes to a file of its own"
    if (known.machine, known.tree) != (about.machine, about.tree):
        raise RegistryError(must(f"--out {out}", of_this, f"{known.where}, tree {known.tree}"))
    why = blind(known, registry.variants) if known.variants else None
    if why is not None and known.clean:
        raise RegistryError(f"--out {out} proves nothing: {why}\nhint: remove it")
    return known

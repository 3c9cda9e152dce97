"""`samebits check determinism`: its arguments, and what it prints and returns."""

import argparse
import sys
from pathlib import Path

from samebits import env
from samebits.checks.determinism.coverage import coverage
from samebits.checks.determinism.evidence import read_debts, write_debts
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
    add("--only", metavar="PATTERN", help="with --replay: variants of that name, as in 'fused*'")
    add("--out", type=Path, metavar="FILE", help="with --replay: the evidence file to write")
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
    for name in ("only", "out", "tree", "budget"):
        if getattr(arguments, name) is not None and not arguments.replay:
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
    write_debts(registry.debts, {kernel: before.get(kernel, reason) for kernel in lacking})
    for kernel in lacking:
        if kernel not in before:
            print(f"owed: {kernel}")
    for kernel in sorted(before.keys() - set(lacking)):
        print(f"paid: {kernel}")
    return PASSED


def _replay(registry: Registry, arguments: argparse.Namespace) -> int:
    # Imported here: coverage needs none of it.
    from samebits.checks.determinism import record

    if env.default_device().type != "cuda" and "TRITON_INTERPRET" not in env.variables():
        print("not_run: there is no CUDA device here", file=sys.stderr)
        return NOTHING_RUN

    plan = record.Plan(
        only=arguments.only,
        replays=arguments.replays,
        processes=arguments.processes,
        tree=arguments.tree,
        budget=arguments.budget,
    )
    evidence = record.record(registry, plan)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(evidence.to_json(), encoding="utf-8")
    found = record.results(evidence, record.chosen(registry, arguments.only))
    print_results(found, as_json=arguments.json)
    said = f"{evidence.seconds:.0f} s on {evidence.where}, tree {evidence.tree}"
    print(f"{said}; written to {arguments.out}", file=sys.stderr)
    return exit_code(result.verdict for result in found)

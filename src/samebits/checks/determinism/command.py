"""`samebits check determinism`: its arguments, and what it prints and returns."""

import argparse
import sys
from pathlib import Path

from samebits.checks.determinism.coverage import coverage
from samebits.checks.determinism.evidence import read_debts, write_debts
from samebits.checks.determinism.planted import planted
from samebits.checks.determinism.variant import Registry, RegistryError, load
from samebits.checks.result import (
    EXIT_CODES,
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
    what.add_argument("--list", action="store_true", help="list variants and kernels, and stop")
    what.add_argument(
        "--owe",
        metavar="REASON",
        help="list what lacks evidence as debt, until a run on a GPU renews it; drop paid debts",
    )
    add("--json", action="store_true", help="one JSON object a line instead of the table")


def main(arguments: argparse.Namespace) -> int:
    """Run the check, print its results and return the exit code.

    Determinism: a function of files.
    """
    try:
        registry = load(arguments.registry, planted())
        if arguments.list:
            return _list(registry)
        if arguments.owe is not None:
            return _owe(registry, arguments.owe)
        results = coverage(registry).results
    except RegistryError as error:
        print(f"samebits check determinism: {error}", file=sys.stderr)
        return USAGE
    print_results(results, as_json=arguments.json)
    return exit_code(result.verdict for result in results)


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

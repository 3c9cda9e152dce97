"""`samebits check invariance`: its arguments, and what it prints and returns."""

import argparse
import sys

from samebits.checks.compile.target import TargetError
from samebits.checks.invariance.audit import TOKENS, audit, results
from samebits.checks.invariance.subjects import PROBLEM, Wanted, find
from samebits.checks.result import (
    EXIT_CODES,
    NOTHING_RUN,
    USAGE,
    exit_code,
    print_results,
)
from samebits.errors import UnsupportedError, must


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check invariance`` to ``parser``."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add(
        "target",
        metavar="TARGET",
        help="one of our backends, transformers/IMPLEMENTATION, or package.module:function",
    )
    add(
        "--inputs",
        metavar="MODULE:FACTORY",
        help="of a function: what returns (args, kwargs); default: make_inputs in its module, else "
        "guessed from annotations",
    )
    add(
        "--rows",
        action="append",
        default=[],
        metavar="NAME",
        help="of a function: an argument that holds rows, by index or keyword; may be repeated; "
        "default: every tensor as long as the first",
    )
    add(
        "--tokens",
        default=",".join(map(str, TOKENS)),
        metavar="T,T,…",
        help="sizes of batches; default: %(default)s",
    )
    add("--problem", default=PROBLEM, metavar="TEXT", help="of experts; default: %(default)s")
    add("--model", metavar="NAME", help="of transformers: an experts class; default: mixtral")
    add("--json", action="store_true", help="one JSON object a line instead of the table")


def main(arguments: argparse.Namespace) -> int:
    """Run the check, print its results and return the exit code.

    Determinism: inputs have fixed seeds; results repeat where the judged function does.
    """
    try:
        tokens = _tokens(arguments.tokens)
        wanted = Wanted(
            target=arguments.target,
            inputs=arguments.inputs,
            rows=tuple(arguments.rows),
            tokens=max(tokens),
            problem=arguments.problem,
            model=arguments.model,
        )
        rows, problem = find(wanted)
    except ImportError as error:
        print(f"not_run: {error}", file=sys.stderr)
        return NOTHING_RUN
    except UnsupportedError as error:
        print(f"unsupported: {error}", file=sys.stderr)
        return NOTHING_RUN
    except (TargetError, TypeError, ValueError) as error:
        print(f"samebits check invariance: {error}", file=sys.stderr)
        return USAGE
    found = results(list(audit(rows, tokens)), arguments.target, problem)
    print_results(found, as_json=arguments.json)
    # That a call repeats says nothing about other rows.
    return exit_code(r.verdict for r in found if r.case != "repeat" or r.verdict == "fail")


def _tokens(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(must("--tokens", "be numbers, as in 1,16,257", repr(text))) from None
    if min(sizes) < 1 or max(sizes) < 2:
        raise ValueError(must("--tokens", "be at least 1, and one of them at least 2", repr(text)))
    return sizes

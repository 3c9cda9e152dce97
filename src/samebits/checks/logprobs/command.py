"""`samebits check logprobs`: its arguments, and what it prints and returns."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from samebits.checks.logprobs.compare import compare
from samebits.checks.logprobs.plot import check_suffix, draw
from samebits.checks.logprobs.reading import read
from samebits.checks.logprobs.recording import pairs
from samebits.checks.result import EXIT_CODES, NOTHING_RUN, USAGE, exit_code, print_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check logprobs`` to ``parser``."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add("a", metavar="A", type=Path, help="recording of the side that sampled, such as an engine")
    add("b", metavar="B", type=Path, help="recording of the other side, such as a trainer")
    add(
        "--control",
        metavar="A2",
        type=Path,
        help="A's engine once more, at another batch size: what it differs from itself",
    )
    add(
        "--allow",
        metavar="NATS",
        type=_nats,
        help="mean gap that passes; default: 0.01, or twice the control if that is more",
    )
    add("--key", metavar="NAME", help="name of the log-probs in the files; default: log_probs")
    add("--plot", metavar="FILE", type=Path, help="the gap by position (.svg, .png or .pdf)")
    add("--json", action="store_true", help="one JSON object a line instead of the table")


def _nats(text: str) -> float:
    nats = float(text)
    if not 0 <= nats < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and >= 0, got {text}")
    return nats


def main(arguments: argparse.Namespace) -> int:
    """Compare the recordings, print the verdicts and return the exit code.

    Determinism: pure function of the files.
    """
    if arguments.plot is not None and find_spec("matplotlib") is None:
        print("not_run: --plot needs matplotlib; install samebits[check]", file=sys.stderr)
        return NOTHING_RUN
    try:
        if arguments.plot is not None:
            check_suffix(arguments.plot)
        a, b = read(arguments.a, arguments.key), read(arguments.b, arguments.key)
        control = None
        if arguments.control is not None:
            control = read(arguments.control, arguments.key)
        rows = compare(a, b, control=control, allowed=arguments.allow)
        if arguments.plot is not None:
            draw(pairs(a, b), arguments.plot, f"{a.name} and {b.name}")
    except ImportError as error:
        print(f"not_run: {error}", file=sys.stderr)
        return NOTHING_RUN
    except (ValueError, OSError) as error:
        print(f"samebits check logprobs: {error}", file=sys.stderr)
        return USAGE
    print_results(rows, as_json=arguments.json)
    return exit_code(row.verdict for row in rows)

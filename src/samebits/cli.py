"""The command line: ``samebits check NAME | explain | env | convert | demo | report``.

Commands are modules with ``add_arguments(parser)`` and ``main(arguments) -> int`` (see
``samebits.checks``), imported when they are chosen: none needs what another needs.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType

from samebits import env
from samebits._version import __version__
from samebits.checks import CHECKS
from samebits.checks.result import EXIT_CODES, USAGE, plain_table

# Command -> module, imported when it is chosen.
COMMANDS: Mapping[str, str] = {
    "explain": "samebits.checks.explain",
    "demo": "samebits.demo",
    "report": "samebits.checks.report",
    "convert": "samebits.checkpoints.command",
}
_QUESTIONS = {
    "check": "Does a layer compute what it should?",
    "explain": "Which backends run a problem, why not the others, and what to do instead?",
    "env": "What decides the bits of this machine?",
    "convert": "How can a checkpoint's experts be stored otherwise, bit for bit?",
    "demo": "What does Samebits show on this machine, on CPU, in about a minute?",
    "report": "What did all checks of a machine say, on one page?",
}

Main = Callable[[argparse.Namespace], int]

# As a shell reports SIGINT and SIGPIPE: the command has come to no verdict.
_INTERRUPTED, _CLOSED_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 passed, 1 failed, 2 usage, 3 nothing run.

    Args:
        argv: Arguments after the program's name; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, command = _parser(words)
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # argparse has printed why
        return stop.code if isinstance(stop.code, int) else 0
    code = _CLOSED_PIPE
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        # The interpreter flushes what is left when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as stop:  # of foreign code, whose exit code is no verdict
        print(f"samebits: sys.exit({stop.code!r}) ended the command", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, Main]:
    """Return the parser, in which the chosen command has its arguments, and what it runs."""
    parser = argparse.ArgumentParser(
        prog="samebits",
        description="Mixture-of-experts layers with the same bits in training and inference, "
        "and checks that prove it.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command: Main = _nothing
    for name, question in _QUESTIONS.items():
        sub = commands.add_parser(name, help=question, description=question)
        if words[:1] != [name]:
            continue
        if name == "check":
            command = _add_checks(sub, words[1:])
        elif name == "env":
            command = _add_env(sub)
        else:
            command = _add_module(sub, import_module(COMMANDS[name]))
    return parser, command


def _add_checks(parser: argparse.ArgumentParser, words: Sequence[str]) -> Main:
    parser.epilog = EXIT_CODES
    checks = parser.add_subparsers(dest="check", required=True, metavar="NAME")
    command: Main = _nothing
    chosen = words[0] if words and words[0] in CHECKS else None
    for name, path in CHECKS.items():
        if chosen not in (None, name):
            continue
        module = import_module(path)
        question = _question(module)
        sub = checks.add_parser(name, help=question, description=question, epilog=EXIT_CODES)
        if name == chosen:
            command = _add_module(sub, module)
    return command


def _add_module(parser: argparse.ArgumentParser, module: ModuleType) -> Main:
    module.add_arguments(parser)
    run: Main = module.main
    return run


def _question(module: ModuleType) -> str:
    """Return the first line of the module's docstring, without the command that it names."""
    first = (module.__doc__ or "").strip().partition("\n")[0]
    return first.rpartition("`: ")[2]


def _add_env(parser: argparse.ArgumentParser) -> Main:
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--bits-key",
        action="store_true",
        help="only the line that two machines must share to have the same bits",
    )
    form.add_argument("--json", action="store_true", help="one JSON object")
    return _env


def _env(arguments: argparse.Namespace) -> int:
    if arguments.bits_key:
        print(env.bits_key())
        return 0
    versions, variables = env.versions(), env.variables()
    if arguments.json:
        described = {"versions": versions, "system": env.system(), "devices": env.devices()}
        keyed = {"variables": variables, "bits_key": env.bits_key()}
        print(json.dumps(described | keyed))
        return 0
    print("versions")
    print(_indented([[name, value or "not installed"] for name, value in versions.items()]))
    print("devices")
    print("\n".join(f"  {line}" for line in env.devices()))
    print("variables in effect")
    rows = [[f"{name}={value}", env.VARIABLES[name]] for name, value in variables.items()]
    print(_indented(rows) if rows else "  none")
    print(f"bits key\n  {env.bits_key()}")
    return 0


def _indented(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in plain_table(rows[0], rows[1:]).splitlines())


def _nothing(arguments: argparse.Namespace) -> int:
    """Stand for the command where the words name none: the parser stops before it is run."""
    raise AssertionError(arguments)

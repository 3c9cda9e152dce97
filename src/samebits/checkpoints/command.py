"""`samebits convert`: how can a checkpoint's experts be stored otherwise, bit for bit?"""

import argparse
import sys
from pathlib import Path

from samebits.checkpoints.convert import convert
from samebits.checkpoints.files import BadFileError
from samebits.checkpoints.schemes import SCHEMES
from samebits.errors import UnsupportedError

_UNITS = {"M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert`` to ``parser``."""
    schemes = f"{', '.join(SCHEMES)}; NAME:interleave=32 changes the order of gate and up"
    parser.epilog = (
        "A run that was stopped goes on where it was when it is started again. Exit codes: "
        "0 converted, 1 a file of SRC is damaged, 2 usage, 3 the schemes cannot hold what is there."
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="a folder of safetensors files")
    parser.add_argument("destination", metavar="DST", type=Path, help="a folder to write to")
    parser.add_argument("--to", required=True, metavar="SCHEME", help=schemes)
    parser.add_argument(
        "--from",
        dest="source_scheme",
        metavar="SCHEME",
        help="of SRC, where its names and its config.json do not tell",
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="E",
        help="how many there must be; default: as config.json says",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share an expert")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share experts")
    parser.add_argument(
        "--shard-size", type=_bytes, metavar="SIZE", help='as in "5G"; default: the largest of SRC'
    )


def main(arguments: argparse.Namespace) -> int:
    """Convert, and print what was done; see the epilog for exit codes.

    Determinism: exact.
    """
    try:
        done = convert(
            arguments.source,
            arguments.destination,
            arguments.to,
            source_scheme=arguments.source_scheme,
            num_experts=arguments.experts,
            tensor_parallel=arguments.tp,
            expert_parallel=arguments.ep,
            shard_bytes=arguments.shard_size,
            progress=_progress,
        )
    except BadFileError as error:
        return _say(error, 1)
    except UnsupportedError as error:
        return _say(error, 3)
    except (OSError, ValueError) as error:
        return _say(error, 2)
    sys.stdout.write(
        f"{done.layers} layers from {done.source} to {done.scheme}: {done.elements_read} elements "
        f"read, {done.elements_written} written, in {done.written} files ({done.kept} were there)\n"
    )
    return 0


def _say(error: Exception, code: int) -> int:
    sys.stderr.write(f"samebits convert: {error}\n")
    return code


def _progress(done: int, total: int) -> None:
    sys.stderr.write(f"{done} of {total} files\n")


def _bytes(text: str) -> int:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    try:
        size = int(number) * _UNITS.get(unit, 1)
    except ValueError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a number, or one with M or G")
    return size

"""The registry of our own kernels: each call, with the kernels and tiles that it launches.

Variants are made from the tuning tables and heuristics, so that a new tile is a new variant by
itself. A new kernel joins the call that launches it (the replays compare what was launched with
what is listed) or gets a call of its own; until then it is owed in ``evidence/debts.json``.
"""

from collections.abc import Iterator

from samebits.checks.determinism.eight_bits import eight_bits
from samebits.checks.determinism.layers import layers
from samebits.checks.determinism.operations import operations
from samebits.checks.determinism.options import options
from samebits.checks.determinism.variant import Variant

ROOT = "../.."


def variants() -> Iterator[Variant]:
    """Yield every variant."""
    yield from layers()
    yield from options()
    yield from eight_bits()
    yield from operations()

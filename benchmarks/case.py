"""What a benchmarked op provides: named cases, each with inputs, candidates, bytes and a check.

A module of ``benchmarks/ops`` has ``cases(shapes, options)``, which yields them; run.py does the
rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.problem import Problem

# The tensors of one set of buffers, in whatever an op keeps them.
Inputs = Any
Outputs = tuple[Tensor, ...]
Candidate = Callable[[Inputs], Outputs]

# The candidate that is judged; every other one is a peer or a bound.
OURS = "samebits"


class Options(NamedTuple):
    """What the command line asks for."""

    tokens: tuple[int, ...]
    device: str
    # With the peers: eager, compiled, Liger.
    peers: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of a table."""

    op: str
    # Which options of the op.
    variant: str
    # "forward" or "backward".
    direction: str
    shape: str
    T: int
    problem: Problem
    # Tile sizes of ours, for the record.
    config: str = ""
    # Bytes that have to move once.
    moved: int
    # Inputs of one set of buffers, from a seed.
    make: Callable[[int], Inputs]
    # Functions of the inputs; OURS among them.
    candidates: dict[str, Candidate]
    # Error over what is allowed, at most 1 for ours; peers are given PEER_SLACK.
    check: Callable[[Inputs, Outputs], float]

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.op} {self.variant} {self.direction} {self.shape} T={self.T}"


# Peers round between their operations, as their users accept.
PEER_SLACK = 8.0


def generator(seed: int, device: str) -> torch.Generator:
    """Return a seeded generator on ``device``."""
    return torch.Generator(device=device).manual_seed(seed)

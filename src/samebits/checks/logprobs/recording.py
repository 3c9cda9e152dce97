"""Recorded log-probabilities: what a recording holds, and how two of them are put side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.errors import must

# A log-probability may exceed 0 by this much, by rounding.
_ROUNDING = 1e-3


class RecordingError(ValueError):
    """A recording that cannot be compared; the message says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """The log-probability of every token of some sequences, as one engine computed them.

    Raises:
        RecordingError: It is empty, lengths disagree, or a value is no log-probability.
    """

    # What messages call it; a file's name, for example.
    name: str
    # One 1-D float tensor for each sequence: log p of the tokens that came, in order.
    log_probs: Sequence[Tensor]
    # Which of them count, bool, same lengths; None: all.
    masks: Sequence[Tensor] | None = None
    # Token ids, int64, same lengths; None where they were not recorded.
    tokens: Sequence[Tensor] | None = None
    # Names of the sequences; None: they are told apart by their order.
    ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.log_probs:
            raise RecordingError(must(self.name, "hold at least one sequence", "none"))
        for what in ("masks", "tokens", "ids"):
            given = getattr(self, what)
            if given is not None and len(given) != len(self.log_probs):
                rule = f"have {what} for each of its {len(self.log_probs)} sequences"
                raise RecordingError(must(self.name, rule, len(given)))
        if self.ids is not None and len(set(self.ids)) != len(self.ids):
            twice = next(i for i in self.ids if list(self.ids).count(i) > 1)
            raise RecordingError(must(self.name, "name each sequence once", f"{twice!r} twice"))
        for index, values in enumerate(self.log_probs):
            self._check(index, values)

    def __len__(self) -> int:
        return len(self.log_probs)

    def mask(self, index: int) -> Tensor:
        """Return which tokens of one sequence count."""
        if self.masks is not None:
            return self.masks[index]
        return torch.ones(len(self.log_probs[index]), dtype=torch.bool)

    def called(self, index: int) -> str:
        """Return how messages name one sequence."""
        name = str(index) if self.ids is None else repr(self.ids[index])
        return f"{self.name}: sequence {name}"

    def _check(self, index: int, values: Tensor) -> None:
        where = self.called(index)
        for what in ("masks", "tokens"):
            given = getattr(self, what)
            if given is not None and len(given[index]) != len(values):
                rule = f"have as many {what} as log-probs ({len(values)})"
                raise RecordingError(must(where, rule, len(given[index])))
        counted = values[self.mask(index)]
        wrong = ~counted.isfinite() | (counted > _ROUNDING)
        if not wrong.any():
            return
        place = int(self.mask(index).nonzero().flatten()[wrong][0])
        value = float(values[place])
        if value > 0 and value != float("inf"):
            rule = "be at most 0 (are these probabilities?)"
        else:
            rule = "be finite (a token that one engine could not choose has no gap; mask it)"
        raise RecordingError(must(f"{where}, token {place}", rule, value))


class Pair(NamedTuple):
    """One sequence in both recordings, in the order of the first; all tensors are 1-D."""

    called: str
    a: Tensor
    b: Tensor
    # Tokens that count in both.
    mask: Tensor
    # Tokens that count in one of them alone.
    masked_once: Tensor

    @property
    def change(self) -> Tensor:
        """Δ of the tokens that count."""
        return (self.b - self.a)[self.mask]


def pairs(a: Recording, b: Recording) -> list[Pair]:
    """Put two recordings side by side: by their ids where both have them, else in order.

    Raises:
        RecordingError: They are not of the same tokens.
    """
    return list(_pairs(a, b))


def _pairs(a: Recording, b: Recording) -> Iterator[Pair]:
    compared = 0
    for i, j in enumerate(_order(a, b)):
        first, second = a.log_probs[i].double(), b.log_probs[j].double()
        if len(first) != len(second):
            hint = ""
            if abs(len(first) - len(second)) == 1:
                hint = "; one of them may lack the first or the last token"
            rule = f"have as many tokens as in {a.name} ({len(first)})"
            raise RecordingError(must(b.called(j), rule, f"{len(second)}{hint}"))
        _check_tokens(a, i, b, j)
        masks = [r.mask(k) if r.masks is not None else None for r, k in ((a, i), (b, j))]
        # Where one side says nothing, the other side's word holds.
        ours = next((m for m in masks if m is not None), torch.ones(len(first), dtype=torch.bool))
        one, other = (ours if m is None else m for m in masks)
        compared += int((one & other).sum())
        yield Pair(a.called(i), first, second, one & other, one ^ other)
    if compared == 0:
        raise RecordingError(f"no token counts in both {a.name} and {b.name}")


def _order(a: Recording, b: Recording) -> list[int]:
    """Return for each sequence of ``a`` its index in ``b``."""
    if len(a) != len(b):
        rule = f"hold as many sequences as {a.name} ({len(a)})"
        raise RecordingError(must(b.name, rule, len(b)))
    if a.ids is None or b.ids is None:
        return list(range(len(a)))
    places = {name: index for index, name in enumerate(b.ids)}
    missing = [name for name in a.ids if name not in places]
    if missing:
        rule = f"hold the sequences of {a.name}"
        raise RecordingError(must(b.name, rule, f"none named {missing[0]!r}"))
    return [places[name] for name in a.ids]


def _check_tokens(a: Recording, i: int, b: Recording, j: int) -> None:
    if a.tokens is None or b.tokens is None:
        return
    first, second = a.tokens[i], b.tokens[j]
    if torch.equal(first, second):
        return
    place = int((first != second).nonzero()[0])
    hint = ""
    if torch.equal(first[1:], second[:-1]) or torch.equal(first[:-1], second[1:]):
        hint = "; they are the same one position apart"
    rule = f"have the tokens of {a.name} ({int(first[place])} at {place})"
    raise RecordingError(must(b.called(j), rule, f"{int(second[place])}{hint}"))

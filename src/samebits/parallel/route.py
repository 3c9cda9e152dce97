"""The way of one routing's rows: from their token's rank to their expert's rank, and back.

Rows leave sorted by expert, ties by slot, so those for one rank are neighbours; they arrive by
(source rank, expert, slot). Sorting arrivals by expert, stably, gives the rows that each expert has
where one rank holds all tokens. Bytes are moved, never numbers: every dtype and every NaN survives.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from samebits.parallel.exchange import exchange, on_device, take
from samebits.parallel.ranks import Ranks
from samebits.parallel.window import Way


@dataclass(frozen=True, eq=False)
class Route:
    """Where rows go. R = T * K rows leave a rank, A rows arrive."""

    ranks: Ranks
    # (R,) int32, row -> slot, R in the tail of rows that do not exist; and slot -> row, R for a
    # dropped slot.
    slots: Tensor
    inverse: Tensor
    topk: int
    # A; what is more than all of ``received`` is no row, and holds anything.
    arriving: int
    # Bits that any rank set in ``wishes``.
    wishes: int
    # Rows to and from each rank; equal numbers with a capacity.
    sent: list[int]
    received: list[int]
    # (W, E + 1), of each rank: its first row for each expert here, and the end.
    offsets: Tensor
    # With a capacity: (R,) place of each row in the buffer, its length where it did not fit; and
    # (W * C,) row in each place, R for none.
    places: Tensor | None = None
    rows: Tensor | None = None
    # ``ids`` of more arrivals or fewer, found before their number was known.
    early: Tensor | None = None
    # With windows as transport.
    way: Way | None = None

    @cached_property
    def ids(self) -> Tensor:
        """(A,) int64, the expert of each arrival, counted from the first one here; E for no row."""
        if self.places is not None:
            ends = self.offsets.diff().cumsum(1)
            place = torch.arange(self.received[0], device=ends.device)
            place = place.expand(self.ranks.size, -1).contiguous()
            return torch.searchsorted(ends, place, right=True).reshape(-1)
        if self.early is not None and self.arriving <= self.early.shape[0]:
            return self.early[: self.arriving]
        return experts_of_arrivals(self.offsets, self.arriving)

    def go(self, rows: Tensor, fill: float | None = 0.0, *, keep: bool = True) -> Tensor:
        """Return the arrivals ``(A, …)`` for ``rows`` ``(R, …)``; a collective.

        What is no row of a capacity's buffer is ``fill``, or anything. Without ``keep`` they are
        to be read before the next exchange.

        Determinism: exact copies.
        """
        if self.way is not None and rows.dim() == 2:
            window, there, _, most, _ = self.way
            return window.exchange(rows, self.sent, there, self.arriving, most, keep=keep)
        if self.rows is not None:
            rows = take(rows, self.rows, fill)
        return exchange(rows, self.sent, self.received, self.ranks.group, self.arriving)

    def go_from(self, x: Tensor, *, keep: bool, settled: bool = False) -> Tensor:
        """Return what ``go`` returns for the rows that tokens ``x`` ``(T, H)`` make; a collective.

        Only with a window; ``settled`` is the window's.

        Determinism: exact copies.
        """
        assert self.way is not None
        window, there, _, most, tokens = self.way
        return window.exchange(
            x, self.sent, there, self.arriving, most, keep=keep, index=tokens, settled=settled
        )

    def back(self, arrivals: Tensor, *, keep: bool = True) -> Tensor:
        """Return ``(R, …)`` for what was made of each arrival; a collective.

        Rows of dropped slots are unspecified; rows that did not fit are NaN. ``keep`` as in ``go``.

        Determinism: exact copies.
        """
        sent, received, group = self.sent, self.received, self.ranks.group
        if self.way is not None and arrivals.dim() == 2:
            window, _, home, most, _ = self.way
            total = self.inverse.shape[0]
            return window.exchange(arrivals, received, home, total, most, keep=keep)
        if self.places is None:
            total = self.inverse.shape[0]
            return exchange(arrivals, received, sent, group, total)
        # One more, for those that did not fit.
        total = sum(sent) + 1
        rows = exchange(arrivals, received, sent, group, total)
        rows[-1].fill_(float("nan"))
        return rows.index_select(0, self.places)


def experts_of_arrivals(offsets: Tensor, count: int) -> Tensor:
    """Return the expert of each of the first ``count`` arrivals, E for those that are no row.

    Args:
        offsets: See ``Route``.
        count: Any number.

    Determinism: exact integers.
    """
    sources, experts = offsets.shape[0], offsets.shape[1] - 1
    ends = offsets.diff().reshape(-1).cumsum(0)
    table = on_device((*range(experts),) * sources + (experts,), offsets.device, torch.int64)
    arrival = torch.arange(count, device=ends.device)
    return table.index_select(0, torch.searchsorted(ends, arrival, right=True))

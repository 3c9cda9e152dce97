"""The way of one routing's rows: from their token's rank to their expert's rank, and back.

Rows leave sorted by expert, ties by slot, so those for one rank are neighbours; they arrive by
(source rank, expert, slot). Sorting arrivals by expert, stably, gives the rows that each expert has
where one rank holds all tokens. Bytes are moved, never numbers: every dtype and every NaN survives.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.errors import must
from samebits.ops.permute import Metadata, sort_slots
from samebits.parallel.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Route:
    """Where rows go. R = T * K rows leave a rank, A rows arrive."""

    ranks: Ranks
    # (R,) int32, row -> slot, R in the tail of rows that do not exist; and slot -> row, R for a
    # dropped slot.
    slots: Tensor
    inverse: Tensor
    topk: int
    # (A,) int64, the expert of each arrival, counted from the first one here; E for no row.
    ids: Tensor
    # Bits that any rank set in ``wishes``.
    wishes: int
    # Rows to and from each rank; equal numbers with a capacity.
    sent: list[int]
    received: list[int]
    # With a capacity: (R,) place of each row in the buffer, its length where it did not fit; and
    # (W * C,) row in each place, R for none.
    places: Tensor | None = None
    rows: Tensor | None = None

    def go(self, rows: Tensor) -> Tensor:
        """Return the arrivals ``(A, …)`` for ``rows`` ``(R, …)``; a collective.

        Determinism: exact copies.
        """
        if self.rows is not None:
            rows = take(rows, self.rows, 0.0)
        return _exchange(rows, self.sent, self.received, self.ranks.group, sum(self.received))

    def back(self, arrivals: Tensor) -> Tensor:
        """Return ``(R, …)`` for what was made of each arrival; a collective.

        Rows of dropped slots are unspecified; rows that did not fit are NaN.

        Determinism: exact copies.
        """
        total = sum(self.sent) if self.places is not None else self.inverse.shape[0]
        rows = _exchange(arrivals, self.received, self.sent, self.ranks.group, total)
        return rows if self.places is None else take(rows, self.places, float("nan"))


def route_of(
    ranks: Ranks,
    topk_ids: Tensor,
    *,
    num_valid_tokens: Tensor | None,
    wishes: int,
    agreement: str,
) -> Route:
    """Return the route of a routing; a collective, which waits for counts without a capacity.

    Args:
        ranks: Who holds what.
        topk_ids: ``(T, K)`` global ids; others than 0 … N - 1 are dropped.
        num_valid_tokens: See ``samebits.experts``.
        wishes: Bits that this rank sets; every rank learns of each.
        agreement: What all ranks must have given alike.

    Raises:
        ValueError: Ranks do not agree; raised on each of them.

    Determinism: exact integers.
    """
    metadata = sort_slots(topk_ids, ranks.num_experts, num_valid_tokens=num_valid_tokens)
    if ranks.capacity is not None:
        return _fixed(ranks, metadata, topk_ids.shape[1], wishes)
    return _exact(ranks, metadata, topk_ids.shape[1], wishes, agreement)


def _exact(ranks: Ranks, metadata: Metadata, topk: int, wishes: int, agreement: str) -> Route:
    """Return a route with as many rows as there are; waits for the device once."""
    offsets = metadata.offsets.long()
    held, device = len(ranks.held), offsets.device
    mine = torch.tensor([wishes, zlib.crc32(agreement.encode())], device=device)
    counts = offsets.diff().split(ranks.counts)
    message = torch.cat([part for count in counts for part in (mine, count)])
    sizes = [mine.shape[0] + count for count in ranks.counts]
    arrived = _exchange(message, sizes, [mine.shape[0] + held] * ranks.size, ranks.group)
    arrived = arrived.view(ranks.size, -1)
    arriving = arrived[:, mine.shape[0] :]
    summary = torch.cat([arrived[:, : mine.shape[0]], arriving.sum(1, keepdim=True)], 1)
    edges = offsets[_edges(ranks.bounds, device)]
    known: list[int] = torch.cat([edges.diff(), summary.T.reshape(-1)]).tolist()
    starts = range(0, len(known), ranks.size)
    sent, wished, hashes, received = (known[i : i + ranks.size] for i in starts)
    _check_agreement(hashes, ranks.rank, agreement)
    experts = torch.arange(held, device=device).repeat(ranks.size)
    ids = experts.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
    every = reduce(or_, wished)
    return Route(ranks, metadata.slots, metadata.inverse, topk, ids, every, sent, received)


@lru_cache(maxsize=64)
def _edges(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Return ``bounds`` on the device; kept, because a captured graph cannot copy from the host."""
    return torch.tensor(bounds, device=device)


def _fixed(ranks: Ranks, metadata: Metadata, topk: int, wishes: int) -> Route:
    """Return a route through buffers of fixed size; nothing waits for the device."""
    assert ranks.capacity is not None
    slots, offsets, inverse, _ = metadata
    offsets = offsets.long()
    capacity, device, total = ranks.capacity.rows, offsets.device, inverse.shape[0]
    held = len(ranks.held)
    counts = _exchange(offsets.diff(), ranks.counts, [held] * ranks.size, ranks.group)
    counts = counts.view(ranks.size, held)
    place = torch.arange(capacity, device=device)
    ends = counts.cumsum(1).contiguous()
    ids = torch.searchsorted(ends, place.expand(ranks.size, -1).contiguous(), right=True)
    edges = offsets[_edges(ranks.bounds, device)]
    rows = edges[:-1, None] + place
    rows = torch.where(rows < edges[1:, None], rows, total).reshape(-1)
    row = torch.arange(total, device=device)
    to = torch.searchsorted(edges[1:].contiguous(), row, right=True)
    inside = row - edges[to.clamp(max=ranks.size - 1)]
    exists = row < edges[-1]
    fits = exists & (inside < capacity)
    ranks.capacity.overflow.add_((exists & ~fits).sum())
    sizes = [capacity] * ranks.size
    places = torch.where(fits, to * capacity + inside, ranks.size * capacity)
    return Route(ranks, slots, inverse, topk, ids.reshape(-1), wishes, sizes, sizes, places, rows)


def _check_agreement(hashes: list[int], rank: int, agreement: str) -> None:
    different = [other for other, value in enumerate(hashes) if value != hashes[rank]]
    if different:
        rule = "be alike on every rank"
        actual = f"another one on ranks {different} than here ({agreement})"
        raise ValueError(must("a parallel call", rule, actual))


def take(rows: Tensor, index: Tensor, missing: float) -> Tensor:
    """Return ``rows[index]``; ``missing`` where the index is the number of rows.

    Determinism: exact copies.
    """
    inside = index < rows.shape[0]
    if rows.shape[0] == 0:
        return rows.new_full((index.shape[0], *rows.shape[1:]), missing)
    found = rows.index_select(0, torch.where(inside, index, 0))
    return found.masked_fill_(~inside.view(-1, *(1,) * (rows.dim() - 1)), missing)


def _exchange(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    total: int | None = None,
) -> Tensor:
    """Send ``sent[r]`` rows to rank r; return ``total`` rows, those received first."""
    arriving = sum(received)
    out = rows.new_empty(arriving if total is None else total, *rows.shape[1:])
    given = rows[: sum(sent)].contiguous()
    dist.all_to_all_single(_bytes(out[:arriving]), _bytes(given), received, sent, group=group)
    return out


def _bytes(rows: Tensor) -> Tensor:
    """Return the bytes of each row: every transport moves them."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    return flat.view(torch.uint8)

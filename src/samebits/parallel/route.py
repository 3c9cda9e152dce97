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

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.ops.permute import Metadata, sort_slots
from samebits.parallel.ranks import Ranks
from samebits.routing import require_ids

# Numbers before the offsets in what a rank tells the others.
_HEADER = 2
# Bits beside the caller's wishes: that all stop, and that here no backward can follow.
_STOP, _INFERENCE = 1 << 16, 1 << 17


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


@dataclass(frozen=True, eq=False)
class Departure:
    """A routing whose rows are sorted, while the ranks tell one another how many there are.

    What only needs ``metadata`` is best started before ``route`` waits.
    """

    ranks: Ranks
    metadata: Metadata
    topk: int
    wishes: int
    agreement: str
    # What is wrong with the ids here: raised at once, it would let the others wait.
    wrong: ValueError | None
    # (W, 2 + N + 1) int32, from each rank: its wishes, a hash of its agreement, its offsets.
    told: Tensor

    def route(self) -> Route:
        """Return the route; without a capacity, waits for the device and then knows every count.

        Raises:
            ValueError: Ranks do not agree, or one has an id that is no expert; raised on each of
                them. Not with a capacity.
            UnsupportedError: A rank in inference mode beside one that wants gradients; the same.

        Determinism: exact integers.
        """
        held = self.ranks.held
        offsets = self.told[:, _HEADER + held.start : _HEADER + held.stop + 1]
        if self.ranks.capacity is not None:
            return self._fixed(offsets.long().diff())
        ends = offsets.diff().reshape(-1).cumsum(0)
        # The one wait for the device.
        told = self.told.cpu()
        wishes, hashes, counted = told[:, 0], told[:, 1], told[:, _HEADER:]
        _check_agreement(hashes.tolist(), self.ranks.rank, self.agreement)
        wished = self._agreed(reduce(or_, wishes.tolist()))
        sent = counted[self.ranks.rank, list(self.ranks.bounds)].diff().tolist()
        received = (counted[:, held.stop] - counted[:, held.start]).tolist()
        arrival = torch.arange(sum(received), device=ends.device)
        ids = torch.searchsorted(ends, arrival, right=True).remainder_(max(len(held), 1))
        slots, _, inverse, _ = self.metadata
        return Route(self.ranks, slots, inverse, self.topk, ids, wished, sent, received)

    def _agreed(self, wishes: int) -> int:
        """Return what the callers wish; raise, on every rank, if one cannot go on."""
        if wishes & _STOP:
            other = ValueError("topk_ids of another rank are out of range; it says which")
            raise self.wrong or other
        wished = wishes & ~_INFERENCE
        if wished and wishes & _INFERENCE:
            raise UnsupportedError(
                "a rank is in inference mode and another wants gradients, for which all run a "
                "backward; hint: torch.no_grad there"
            )
        return wished

    def _fixed(self, counts: Tensor) -> Route:
        """Return a route through buffers of fixed size; nothing waits for the device."""
        ranks, (slots, offsets, inverse, _) = self.ranks, self.metadata
        assert ranks.capacity is not None
        offsets = offsets.long()
        capacity, device, total = ranks.capacity.rows, offsets.device, inverse.shape[0]
        place = torch.arange(capacity, device=device)
        ends = counts.cumsum(1).contiguous()
        ids = torch.searchsorted(ends, place.expand(ranks.size, -1).contiguous(), right=True)
        edges = offsets[on_device(ranks.bounds, device).long()]
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
        ids = ids.reshape(-1)
        return Route(ranks, slots, inverse, self.topk, ids, self.wishes, sizes, sizes, places, rows)


def depart(
    ranks: Ranks,
    topk_ids: Tensor,
    *,
    num_valid_tokens: Tensor | None,
    wishes: int,
    agreement: str,
    wrong: ValueError | None,
) -> Departure:
    """Sort the rows of a routing and tell every rank how many there are; a collective.

    Args:
        ranks: Who holds what.
        topk_ids: ``(T, K)`` global ids; others than 0 … N - 1 are dropped.
        num_valid_tokens: See ``samebits.experts``.
        wishes: Bits that this rank sets; every rank learns of each, without a capacity.
        agreement: What all ranks must have given alike.
        wrong: See ``wrong_ids``.

    Raises:
        ValueError: ``wrong``, with a capacity: no rank learns of the others' errors there.

    Determinism: exact integers.
    """
    if wrong is not None and ranks.capacity is not None:
        raise wrong
    metadata = sort_slots(topk_ids, ranks.num_experts, num_valid_tokens=num_valid_tokens)
    told_too = (0 if wrong is None else _STOP) | torch.is_inference_mode_enabled() * _INFERENCE
    header = wishes | told_too, zlib.crc32(agreement.encode()) >> 1
    # The same for every rank: a gather, whose own collective needs a copy for each of them.
    mine = [on_device(header, topk_ids.device), metadata.offsets]
    copies = torch.cat(mine * ranks.size).view(ranks.size, -1)
    told = torch.empty_like(copies)
    dist.all_to_all_single(told, copies, group=ranks.group)
    return Departure(ranks, metadata, topk_ids.shape[1], wishes, agreement, wrong, told)


def wrong_ids(topk_ids: Tensor, num_experts: int, count: Tensor | None) -> ValueError | None:
    """Return what is wrong with the ids of valid tokens, where looking costs no device sync.

    Raises:
        TypeError: The count is no tensor.

    Determinism: exact integers.
    """
    if count is not None:
        require_type("num_valid_tokens", count, Tensor)
        # What else is wrong with the count, ``sort_slots`` says.
        if topk_ids.device.type == "cpu" and count.numel() == 1:
            topk_ids = topk_ids[: max(0, int(count))]
    try:
        require_ids(topk_ids, num_experts)
    except ValueError as error:
        return error
    return None


@lru_cache(maxsize=256)
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int32 numbers; kept, because a captured graph cannot copy from the host.

    Determinism: exact integers.
    """
    return torch.tensor(numbers, dtype=torch.int32, device=device)


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
    total: int,
) -> Tensor:
    """Send ``sent[r]`` rows to rank r; return ``total`` rows, those received first."""
    arriving = sum(received)
    out = rows.new_empty(total, *rows.shape[1:])
    given = rows[: sum(sent)].contiguous()
    dist.all_to_all_single(_bytes(out[:arriving]), _bytes(given), received, sent, group=group)
    return out


def _bytes(rows: Tensor) -> Tensor:
    """Return the bytes of each row: every transport moves them."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    return flat.view(torch.uint8)

"""The way of one routing's rows: from their token's rank to their expert's rank, and back.

Rows leave sorted by expert, ties by slot, so those for one rank are neighbours; they arrive by
(source rank, expert, slot). Sorting arrivals by expert, stably, gives the rows that each expert has
where one rank holds all tokens. Bytes are moved, never numbers: every dtype and every NaN survives.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.ops.permute import Metadata, check_slots
from samebits.parallel.copies import sort
from samebits.parallel.exchange import exchange, on_device, room_for, take
from samebits.parallel.ranks import Capacity, Ranks
from samebits.routing import require_ids

# Its name from torch 2.13 on, where the older one warns.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The least numbers that a rank tells the others: messages of other lengths would not be compared.
_LEAST = 512
# Bits beside the caller's wishes: that all stop, and that here no backward can follow.
_STOP, INFERENCE = 1 << 16, 1 << 17


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
        return _experts_of_arrivals(self.offsets, self.arriving)

    def go(self, rows: Tensor, fill: float | None = 0.0) -> Tensor:
        """Return the arrivals ``(A, …)`` for ``rows`` ``(R, …)``; a collective.

        What is no row of a capacity's buffer is ``fill``, or anything.

        Determinism: exact copies.
        """
        if self.rows is not None:
            rows = take(rows, self.rows, fill)
        return exchange(rows, self.sent, self.received, self.ranks.group, self.arriving)

    def back(self, arrivals: Tensor) -> Tensor:
        """Return ``(R, …)`` for what was made of each arrival; a collective.

        Rows of dropped slots are unspecified; rows that did not fit are NaN.

        Determinism: exact copies.
        """
        sent, received, group = self.sent, self.received, self.ranks.group
        if self.places is None:
            total = self.inverse.shape[0]
            return exchange(arrivals, received, sent, group, total)
        # One more, for those that did not fit.
        total = sum(sent) + 1
        rows = exchange(arrivals, received, sent, group, total)
        rows[-1].fill_(float("nan"))
        return rows.index_select(0, self.places)


def _experts_of_arrivals(offsets: Tensor, count: int) -> Tensor:
    """Return the expert of each of the first ``count`` arrivals, E for those that are no row."""
    sources, experts = offsets.shape[0], offsets.shape[1] - 1
    ends = offsets.diff().reshape(-1).cumsum(0)
    table = on_device((*range(experts),) * sources + (experts,), offsets.device, torch.int64)
    arrival = torch.arange(count, device=ends.device)
    return table.index_select(0, torch.searchsorted(ends, arrival, right=True))


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
    # (W, …) int32, from each rank: its wishes, a hash of its agreement, …, its N + 1 offsets.
    told: Tensor
    # The same on the host, once ``copied`` has happened; not with a capacity.
    heard: Tensor
    copied: torch.cuda.Event | None

    def route(self, *, roomy: bool = False) -> Route:
        """Return the route; without a capacity, waits until it knows every count.

        Args:
            roomy: Arrivals may be more than what is received: few different numbers of them, so
                that passes over them come again (``samebits.backends.passes``).

        Raises:
            ValueError: Ranks do not agree, or one has an id that is no expert; raised on each of
                them. With a capacity only on a CPU, where looking costs nothing.
            UnsupportedError: A rank without a backward beside one that wants gradients; the same.

        Determinism: exact integers.
        """
        ranks, held = self.ranks, self.ranks.held
        slots, _, inverse, _ = self.metadata
        start = self.told.shape[1] - ranks.num_experts - 1
        first, last = start + held.start, start + held.stop
        offsets = self.told[:, first : last + 1]
        if ranks.capacity is not None:
            if self.heard.device.type == "cpu":
                self._hear(first, last)
            sizes = [ranks.capacity.rows] * ranks.size
            places, rows = self._fixed(ranks.capacity)
            arriving = sum(sizes)
            return Route(
                ranks, slots, inverse, self.topk, arriving, self.wishes, sizes, sizes, offsets,
                places, rows,
            )  # fmt: skip
        # Until the counts are known the device has time, and the host: for a quarter more arrivals
        # than rows that leave, most often enough.
        early = _experts_of_arrivals(offsets, room_for(slots.shape[0] * 5 // 4))
        if self.copied is not None:
            # The one wait of the host, for what the device did before ``depart`` ended.
            self.copied.synchronize()
        wished, starts, stops = self._hear(first, last)
        bounds = _on_host(tuple(start + bound for bound in ranks.bounds))
        mine = self.heard[ranks.rank].index_select(0, bounds).tolist()
        sent = [after - bound for bound, after in pairwise(mine)]
        received = [after - bound for bound, after in zip(starts, stops, strict=True)]
        arriving = room_for(sum(received)) if roomy else sum(received)
        return Route(
            ranks, slots, inverse, self.topk, arriving, wished, sent, received, offsets,
            early=early,
        )  # fmt: skip

    def _hear(self, first: int, last: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return what any rank wishes, and each one's first and last row for this rank."""
        columns = _on_host((0, 1, first, last))
        told = self.heard.index_select(1, columns).tolist()
        wishes, hashes, starts, stops = zip(*told, strict=True)
        _check_agreement(hashes, self.ranks.rank, self.agreement)
        if self.ranks.capacity is not None and len({w & ~(_STOP | INFERENCE) for w in wishes}) > 1:
            rule = "be recorded on every rank or on none, with a capacity"
            raise ValueError(must("gradients", rule, f"wishes {wishes} by rank"))
        return self._agreed(reduce(or_, wishes)), starts, stops

    def _agreed(self, wishes: int) -> int:
        """Return what the callers wish; raise, on every rank, if one cannot go on."""
        if wishes & _STOP:
            other = ValueError("topk_ids of another rank are out of range; it says which")
            raise self.wrong or other
        wished = wishes & ~INFERENCE
        if wished and wishes & INFERENCE:
            raise UnsupportedError(
                "a rank is in inference mode, or compiled without gradients, and another wants "
                "some, for which all run a backward; hint: torch.no_grad in eager code there"
            )
        return wished

    def _fixed(self, capacity: Capacity) -> tuple[Tensor, Tensor]:
        """Return the place of each row in a buffer of fixed size, and the row of each place."""
        size, total = self.ranks.size, self.metadata.inverse.shape[0]
        device = self.told.device
        edges = self.metadata.offsets.long()[on_device(self.ranks.bounds, device, torch.int64)]
        starts, stops = edges[:-1, None], edges[1:, None]
        rows = starts + torch.arange(capacity.rows, device=device)
        rows = torch.where(rows < stops, rows, total).reshape(-1)
        row = torch.arange(total, device=device)
        to = torch.searchsorted(edges[1:].contiguous(), row, right=True)
        inside = row - edges[to.clamp(max=size - 1)]
        exists = row < edges[-1]
        fits = exists & (inside < capacity.rows)
        capacity.overflow.add_((exists & ~fits).sum())
        return torch.where(fits, to * capacity.rows + inside, size * capacity.rows), rows


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
        ValueError: ``wrong``, with a capacity on a GPU: no rank learns of the others' errors there.

    Determinism: exact integers.
    """
    if wrong is not None and ranks.capacity is not None and topk_ids.device.type != "cpu":
        raise wrong
    check_slots(topk_ids, ranks.num_experts, num_valid_tokens)
    metadata = sort(topk_ids, ranks.num_experts, num_valid_tokens)
    told_too = (0 if wrong is None else _STOP) | torch.is_inference_mode_enabled() * INFERENCE
    header = _header(wishes | told_too, agreement, ranks.num_experts, topk_ids.device)
    mine = torch.cat((header, metadata.offsets))
    told = mine.new_empty(ranks.size * mine.shape[0])
    _gather(told, mine, group=ranks.group)
    told = told.view(ranks.size, -1)
    heard, copied = told, None
    if ranks.capacity is None and told.is_cuda:
        # Before what the device does next: the host then waits for the counts alone.
        heard = told.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(told.device).record_event()
    return Departure(
        ranks, metadata, topk_ids.shape[1], wishes, agreement, wrong, told, heard, copied
    )


@lru_cache(maxsize=256)
def _header(wishes: int, agreement: str, num_experts: int, device: torch.device) -> Tensor:
    """Return what is told before the offsets; kept, see ``on_device``."""
    size = max(_LEAST, 1 << (num_experts + 2).bit_length()) - num_experts - 1
    numbers = (wishes, zlib.crc32(agreement.encode()) >> 1, *(0,) * (size - 2))
    return torch.tensor(numbers, dtype=torch.int32, device=device)


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


def _on_host(numbers: tuple[int, ...]) -> Tensor:
    return on_device(numbers, torch.device("cpu"), torch.int64)


def _check_agreement(hashes: tuple[int, ...], rank: int, agreement: str) -> None:
    different = [other for other, value in enumerate(hashes) if value != hashes[rank]]
    if different:
        rule = "be alike on every rank"
        actual = f"another one on ranks {different} than here ({agreement})"
        raise ValueError(must("a parallel call", rule, actual))

"""How a routing sets out: its slots are sorted, and the ranks tell one another how many rows come.

The one place where the host waits for the device, and where ranks find out that they disagree.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache, reduce
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
from samebits.parallel.exchange import on_device, room_for
from samebits.parallel.ranks import Capacity, Ranks
from samebits.parallel.route import Route, experts_of_arrivals
from samebits.parallel.window import Way, window_of
from samebits.routing import require_ids

# Its name from torch 2.13 on, where the older one warns.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The least numbers that a rank tells the others: messages of other lengths would not be compared.
_LEAST = 512
# Bits beside the caller's wishes: that all stop, and that here no backward can follow.
_STOP, INFERENCE = 1 << 16, 1 << 17


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
        early = experts_of_arrivals(offsets, room_for(slots.shape[0] * 5 // 4))
        tokens = None
        if ranks.transport == "window":
            tokens = torch.div(slots, self.topk, rounding_mode="floor")
        if self.copied is not None:
            # The one wait of the host, for what the device did before ``depart`` ended.
            self.copied.synchronize()
        wished, starts, stops = self._hear(first, last)
        bounds = _on_host(tuple(start + bound for bound in ranks.bounds))
        mine = self.heard[ranks.rank].index_select(0, bounds).tolist()
        sent = [after - bound for bound, after in pairwise(mine)]
        received = [after - bound for bound, after in zip(starts, stops, strict=True)]
        arriving = room_for(sum(received)) if roomy else sum(received)
        way = None if tokens is None else self._way(start, tokens)
        return Route(
            ranks, slots, inverse, self.topk, arriving, wished, sent, received, offsets,
            early=early, way=way,
        )  # fmt: skip

    def _way(self, start: int, tokens: Tensor) -> Way:
        """Return where rows lie in the windows of all ranks, whose first offset is ``start``."""
        ranks = self.ranks
        columns = _on_host(tuple(start + bound for bound in ranks.bounds))
        # Of each rank, its first row for each rank, and the end.
        firsts = self.heard.index_select(1, columns).tolist()
        counts = [[after - first for first, after in pairwise(line)] for line in firsts]
        there = [sum(column) for column in zip(*counts[: ranks.rank], strict=True)]
        home = [line[ranks.rank] for line in firsts]
        most = max(*(line[-1] for line in firsts), *map(sum, zip(*counts, strict=True)))
        window = window_of(ranks.group, self.told.device)
        return Way(window, there or [0] * ranks.size, home, most, tokens)

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

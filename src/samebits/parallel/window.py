"""Rows written straight into the memory of the other GPUs of a host: a transport without NCCL.

Each rank has one window, which the others write to. A barrier on the devices before anything is
written says that everybody has read what lay there, one behind it that everything has arrived: what
comes back is to be read before the next exchange of the group, or copied.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.errors import UnsupportedError
from samebits.parallel.exchange import room_for

# ms for which a device waits for another one.
_PATIENCE = 600_000


class Memory(NamedTuple):
    """Bytes of every rank, as this one sees them, and how their streams wait for each other."""

    # (bytes,) uint8 each.
    of_rank: list[Tensor]
    # Makes the stream at hand wait until that of every other rank is as far.
    barrier: Callable[[], None]


class Way(NamedTuple):
    """Where rows of one routing lie in the windows of the ranks."""

    window: "Window"
    # The place of this rank's first row among the arrivals of each rank, and of what it sends back
    # among the rows of each rank.
    there: list[int]
    home: list[int]
    # The most rows that a rank gets on either way.
    most: int
    # (R,) the token of each row that leaves.
    tokens: Tensor


class Window:
    """The memory of a group through which its rows travel; grows, on every rank alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank = dist.get_rank(group)
        self._memory: Memory | None = None
        self._bytes = 0
        # Of a dtype and a width, the rows of each rank for which there is room.
        self._rows: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def exchange(
        self,
        rows: Tensor,
        sent: list[int],
        starts: list[int],
        total: int,
        most: int,
        *,
        keep: bool,
        index: Tensor | None = None,
        settled: bool = False,
    ) -> Tensor:
        """Write ``sent[r]`` rows to rank r; return the first ``total`` rows written here.

        Args:
            rows: ``(…, H)``, those for rank 0 first.
            sent: How many go to each rank.
            starts: The place of the first of them in each rank's window.
            total: How many to return.
            most: The most that any rank gets; the same on every rank, as is the size of a row.
            keep: They are read after the group's next exchange.
            index: Which of ``rows`` to send, in the order in which they leave; None for all.
            settled: The ranks have met since the last exchange was read.

        Determinism: exact copies.
        """
        rows = rows.contiguous()
        # What is kept serves calls in inference mode and others.
        with torch.inference_mode(False):
            views, barrier = self._room(rows, most)
        if not settled:
            barrier()
        # Everybody begins with another one.
        for step in range(len(sent)):
            rank = (self._rank + 1 + step) % len(sent)
            first, count = sum(sent[:rank]), sent[rank]
            if count:
                target = views[rank][starts[rank] : starts[rank] + count]
                if index is None:
                    target.copy_(rows[first : first + count])
                else:
                    torch.index_select(rows, 0, index[first : first + count], out=target)
        barrier()
        arrived = views[self._rank][:total]
        if arrived.shape[0] == total:
            return arrived.clone() if keep else arrived
        # Rows of dropped slots, for which the ranks have not made room.
        out = rows.new_empty(total, *rows.shape[1:])
        out[: arrived.shape[0]] = arrived
        return out

    def _room(self, rows: Tensor, most: int) -> tuple[list[Tensor], Callable[[], None]]:
        """Return room for ``most`` rows like ``rows`` on every rank, and the barrier."""
        # For one row at least, where nobody sends any.
        memory = self._grown(room_for(max(most, 1)) * rows.shape[1] * rows.element_size())
        kind = rows.dtype, rows.shape[1]
        if kind not in self._rows:
            self._rows[kind] = [_rows_of(part, rows) for part in memory.of_rank]
        return self._rows[kind], memory.barrier

    def _grown(self, size: int) -> Memory:
        """Return memory of at least ``size`` bytes; where there is less, a collective."""
        if self._memory is None or size > self._bytes:
            if self._memory is not None and self._device.type == "cuda":
                # Nobody writes to it any more, once what was read of it has been.
                torch.cuda.synchronize(self._device)
            self._rows, self._memory, self._bytes = {}, None, 0
            # A quarter more: each time all ranks wait for one another.
            room = size + size // 4
            self._memory = open_memory(self._group, self._device, room)
            self._bytes = room
        return self._memory


def _rows_of(memory: Tensor, rows: Tensor) -> Tensor:
    """Return the rows like ``rows`` for which there is room."""
    width = rows.shape[1] * rows.element_size()
    count = memory.shape[0] // width
    return memory[: count * width].view(rows.dtype).view(count, rows.shape[1])


# None is forgotten: ranks that forgot different ones would wait for one another to open it again.
@cache
def window_of(group: dist.ProcessGroup, device: torch.device) -> Window:
    """Return the one window of a group, which all its layers use in turn.

    Determinism: no arithmetic.
    """
    return Window(group, device)


def open_memory(group: dist.ProcessGroup, device: torch.device, size: int) -> Memory:
    """Return memory of ``size`` bytes of every rank; a collective that waits.

    Raises:
        UnsupportedError: The device is no GPU.

    Determinism: no arithmetic.
    """
    if device.type != "cuda":
        raise UnsupportedError(
            f"transport 'window' writes to GPUs of one host, not to {device.type}\n"
            "hint: transport='torch'"
        )
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(own, group)
    of_rank = [
        own if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8)
        for rank in range(handle.world_size)
    ]
    # The timeout keeps a dead rank from stopping the others for ever.
    return Memory(of_rank, lambda: handle.barrier(0, _PATIENCE))

"""Which rank holds which experts, and how many rows two ranks may exchange without a host sync."""

import zlib
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.arguments import require_int, require_name, require_type
from samebits.errors import UnsupportedError, must

_DEEP_EP = (
    "DeepEP is no transport here: it is built against NVSHMEM for one cluster, and its combine "
    "adds a token's rows up on the way, in its own order\nhint: transport='torch'"
)


def expert_bounds(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Return the first expert of each rank, and N at the end, as DTensor shards dimension 0.

    Each rank holds ceil(N / W) experts until none are left: the last ranks may hold fewer, or none.

    Args:
        num_experts: N.
        num_ranks: W.

    Returns:
        W + 1 ids, from 0 to N.
    """
    require_int("num_experts", num_experts, minimum=1)
    require_int("num_ranks", num_ranks, minimum=1)
    share = -(-num_experts // num_ranks)
    return tuple(min(rank * share, num_experts) for rank in range(num_ranks + 1))


def require_rank(rank: int, size: int) -> None:
    """Raise unless ``rank`` is one of ``size``."""
    require_int("size", size, minimum=1)
    require_int("rank", rank, minimum=0)
    if rank >= size:
        raise ValueError(must("rank", f"be below size = {size}", rank))


def require_alike(
    argument: str, mine: str, shown: str, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise on every rank of ``group`` unless all give the same; a collective that waits.

    Args:
        argument: What it is that the ranks were given, for the message.
        mine: Everything that has to be alike, as text.
        shown: What the message says of it.
        group: The ranks.
        device: Where the group communicates.

    Raises:
        ValueError: Another rank gives another text.

    Determinism: exact, but for texts of one CRC-32.
    """
    told = torch.tensor([zlib.crc32(mine.encode())], device=device)
    every = [told.clone() for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, told, group=group)
    different = [rank for rank, other in enumerate(every) if int(other) != int(told)]
    if different:
        actual = f"others on ranks {different} than here ({shown})"
        raise ValueError(must(argument, "be made alike on every rank", actual))


class Capacity:
    """Fix how many rows each rank sends to each rank, so that nothing waits for a count.

    Slots that do not fit are counted on the device, and the tokens that they belong to get NaN, in
    the output and in their gradients: dropping is never silent. ``Ranks.check`` raises.

    Args:
        rows: Rows from one rank to one other, and to itself; T * K always suffices.
        device: Where the ranks compute.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        require_int("rows", rows, minimum=1)
        self.rows = rows
        # (1,) int64, slots of this rank that did not fit since the last ``reset``.
        self.overflow = torch.zeros(1, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Count from 0 again."""
        self.overflow.zero_()

    def __repr__(self) -> str:
        return f"Capacity(rows={self.rows})"


def require_transport(transport: str, capacity: Capacity | None) -> None:
    """Raise unless ``transport`` moves rows, with this capacity."""
    require_name("transport", transport, ("torch", "window", "deep_ep"))
    if transport == "deep_ep":
        raise UnsupportedError(_DEEP_EP)
    if transport == "window" and capacity is not None:
        raise UnsupportedError("transport 'window' exchanges counts: it takes no capacity")


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks among which experts are spread: contiguous ranges, in rank order.

    Args:
        group: Every rank of it calls the same functions in the same order.
        bounds: First expert of each rank, and N at the end; equal for all ranks.
        capacity: None exchanges counts first and waits for them (exact, any imbalance); otherwise
            buffers have a fixed size and nothing waits for the device (CUDA graphs).
        transport: What moves rows: "torch", the group's own all-to-all; "window", stores to the
            memory of the other GPUs of one host (counts still take the group).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``bounds`` do not ascend from 0, or are not one more than the ranks.
        UnsupportedError: ``transport`` is "deep_ep", or "window" with a capacity.
    """

    group: dist.ProcessGroup
    bounds: tuple[int, ...]
    capacity: Capacity | None = None
    transport: str = "torch"
    # This rank's place in the group, and how many there are.
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        require_type("group", self.group, dist.ProcessGroup)
        require_type("bounds", self.bounds, tuple)
        if self.capacity is not None:
            require_type("capacity", self.capacity, Capacity)
        require_transport(self.transport, self.capacity)
        object.__setattr__(self, "rank", dist.get_rank(self.group))
        object.__setattr__(self, "size", dist.get_world_size(self.group))
        for bound in self.bounds:
            require_int("bounds", bound, minimum=0)
        ascending = list(self.bounds) == sorted(self.bounds)
        if len(self.bounds) != self.size + 1 or self.bounds[0] != 0 or not ascending:
            rule = f"ascend from 0, {self.size} + 1 of them for a group of {self.size} ranks"
            raise ValueError(must("bounds", rule, self.bounds))

    def __deepcopy__(self, _memo: object) -> "Ranks":
        return self  # a group of processes has no copies

    @staticmethod
    def of(
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        capacity: Capacity | None = None,
        transport: str = "torch",
    ) -> "Ranks":
        """Return ranks with the experts spread by ``expert_bounds``."""
        require_type("group", group, dist.ProcessGroup)
        bounds = expert_bounds(num_experts, dist.get_world_size(group))
        return Ranks(group, bounds, capacity, transport)

    @property
    def num_experts(self) -> int:
        """N, the number of the model's experts."""
        return self.bounds[-1]

    @property
    def held(self) -> range:
        """Global ids of the experts of this rank."""
        return range(self.bounds[self.rank], self.bounds[self.rank + 1])

    @property
    def counts(self) -> list[int]:
        """How many experts each rank holds."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    def agree(self, device: torch.device) -> None:
        """Raise on every rank if the ranks were not made alike; waits for the device.

        A collective, once per layer: later calls have sizes that follow from bounds and capacity,
        and would fail in the transport.

        Args:
            device: Where the group communicates.

        Raises:
            ValueError: Another rank has other bounds, another capacity, or another transport.
        """
        mine = f"Ranks(bounds={self.bounds}, capacity={self.capacity})"
        if self.transport != "torch":
            mine = f"{mine[:-1]}, transport={self.transport})"
        require_alike("ranks", mine, mine, self.group, device)

    def check(self) -> None:
        """Raise on every rank if slots of any rank did not fit; waits for the device.

        A collective: every rank calls it, at a point of the caller's choice (after a step).

        Raises:
            RuntimeError: Some did not; the message says how many, and on which ranks.
            ValueError: There is no capacity.
        """
        if self.capacity is None:
            raise ValueError(must("capacity", "be given to be checked", None))
        mine = self.capacity.overflow
        every: list[Tensor] = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.group)
        lost = {rank: int(count) for rank, count in enumerate(every) if int(count)}
        if lost:
            listed = ", ".join(f"{count} of rank {rank}" for rank, count in lost.items())
            rule = "hold every row that one rank sends to another; slots that did not fit"
            raise RuntimeError(must("capacity", rule, f"{listed} with rows={self.capacity.rows}"))

"""Rows from rank to rank: one all-to-all, and what numbers and places it needs.

Bytes are moved, never numbers: every dtype and every NaN survives.
"""

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor


def take(rows: Tensor, index: Tensor, missing: float | None) -> Tensor:
    """Return ``rows[index]``; ``missing``, None for anything, where the index is their number.

    Determinism: exact copies.
    """
    if rows.shape[0] == 0:
        return rows.new_full((index.shape[0], *rows.shape[1:]), missing or 0.0)
    found = rows.index_select(0, index.clamp(max=rows.shape[0] - 1))
    if missing is None:
        return found
    beyond = (index >= rows.shape[0]).view(-1, *(1,) * (rows.dim() - 1))
    return found.masked_fill_(beyond, missing)


def exchange(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    total: int,
) -> Tensor:
    """Send ``sent[r]`` rows to rank r; return ``total`` rows, those received first.

    On the stream that computes: nothing has to wait for another stream, or be kept for it.
    """
    out = rows.new_empty(total, *rows.shape[1:])
    dist.all_to_all_single(
        _bytes(out, sum(received)),
        _bytes(rows.contiguous(), sum(sent)),
        received,
        sent,
        group=group,
    )
    return out


def _bytes(rows: Tensor, count: int) -> Tensor:
    """Return the bytes of each of the first rows: every transport moves them."""
    if rows.dim() != 2:
        rows = rows.flatten(1) if rows.dim() > 2 else rows[:, None]
    return (rows if count == rows.shape[0] else rows[:count]).view(torch.uint8)


@lru_cache(maxsize=256)
def on_device(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return integers; kept, because a captured graph cannot copy from the host.

    Determinism: exact integers.
    """
    return torch.tensor(numbers, dtype=dtype, device=device)


def room_for(rows: int) -> int:
    """Return a number of at least ``rows``, by at most 1/32 larger; few numbers have one of these.

    Determinism: pure function of its argument.
    """
    step = 1 << max(rows.bit_length() - 6, 0)
    return -(-rows // step) * step

"""See ``samebits.ops.permute``; torch only, on any device, differentiable where values are."""

import torch
from torch import Tensor

from samebits.ops.permute.tuning import Metadata, Tiles
from samebits.routing import Permutation


def metadata(
    topk_ids: Tensor,
    num_local: int,
    block_r: int,
    *,
    expert_start: int = 0,
    num_valid_tokens: Tensor | None = None,
) -> Metadata:
    """See ``samebits.ops.permute``.

    Determinism: exact integers.
    """
    permutation = Permutation.of(
        topk_ids, num_local, expert_start=expert_start, num_valid_tokens=num_valid_tokens
    )
    slots, offsets, inverse = (part.int() for part in permutation)
    return Metadata(slots, offsets, inverse, tiles(offsets, topk_ids.numel(), block_r))


def tiles(offsets: Tensor, total: int, block_r: int) -> Tiles:
    """Return the tile table of ``offsets``; entries past ``count`` hold anything.

    Determinism: exact integers.
    """
    num_local = offsets.shape[0] - 1
    counts = offsets.diff()
    per_expert = (counts + block_r - 1) // block_r
    order = counts.argsort(descending=True, stable=True)
    ends = per_expert[order].cumsum(0)
    index = torch.arange(min(total, total // block_r + num_local), device=offsets.device)
    rank = torch.searchsorted(ends, index, right=True).clamp(max=num_local - 1)
    expert = order[rank]
    first = offsets[expert] + (index - (ends[rank] - per_expert[expert])) * block_r
    return Tiles(expert.int(), first.int(), offsets[expert + 1].int(), ends[-1:].int())


def permute(x: Tensor, inverse: Tensor, topk: int, probs: Tensor | None) -> Tensor:
    """See ``samebits.ops.permute``; rows of no slot are 0.

    Determinism: elementwise.
    """
    total = x.shape[0] * topk
    source = x.repeat_interleave(topk, 0)
    if probs is not None:
        source = (source.float() * probs.reshape(-1, 1).float()).to(x.dtype)
    rows = x.new_zeros(total + 1, x.shape[1])
    return rows.index_copy(0, inverse.long(), source)[:total]


def combine(
    rows: Tensor, inverse: Tensor, topk: int, probs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``samebits.ops.permute``.

    Determinism: fixed order; each token independent of the others.
    """
    total, wide = inverse.shape[0], torch.float64 if rows.dtype == torch.float64 else torch.float32
    by_row, choice = inverse.view(-1, topk).long().sort(1)
    padded = torch.cat([rows.to(wide), rows.new_zeros(1, rows.shape[1], dtype=wide)])
    out = torch.zeros(total // topk, rows.shape[1], dtype=wide, device=rows.device)
    for k in range(topk):
        term = padded[by_row[:, k]]
        if probs is not None:
            p = probs.to(wide).gather(1, choice[:, k : k + 1])
            term = torch.where(by_row[:, k : k + 1] < total, term * p, 0.0)
        out = out + term
    return out.to(dtype)

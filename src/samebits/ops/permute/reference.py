"""See ``samebits.ops.permute``; torch only, on any device, vectorised."""

import torch
from torch import Tensor

from samebits.ops.permute.tuning import COLUMNS_PER_SUM, Metadata, Tiles, capacity
from samebits.routing import Permutation


def metadata(
    topk_ids: Tensor,
    num_local: int,
    block_r: int,
    *,
    expert_start: int = 0,
    num_valid_tokens: Tensor | None = None,
) -> Metadata:
    """See ``samebits.ops.permute.sort_slots``.

    Determinism: exact integers.
    """
    permutation = Permutation.of(
        topk_ids, num_local, expert_start=expert_start, num_valid_tokens=num_valid_tokens
    )
    slots, offsets, inverse = (part.int() for part in permutation)
    return Metadata(slots, offsets, inverse, tiles(offsets, topk_ids.numel(), block_r))


def tiles(offsets: Tensor, total: int, block_r: int) -> Tiles:
    """Return the tiles of ``offsets`` for one BLOCK_R.

    Determinism: exact integers.
    """
    num_local = offsets.shape[0] - 1
    counts = offsets.diff()
    per_expert = (counts + block_r - 1) // block_r
    order = counts.argsort(descending=True, stable=True)
    ends = per_expert[order].cumsum(0)
    index = torch.arange(capacity(total, num_local, block_r), device=offsets.device)
    rank = torch.searchsorted(ends, index, right=True).clamp(max=num_local - 1)
    expert = order[rank]
    first = offsets[expert] + (index - (ends[rank] - per_expert[expert])) * block_r
    return Tiles(expert.int(), first.int(), offsets[expert + 1].int(), ends[-1:].int())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sums_of_columns(product: Tensor) -> Tensor:
    """Return row sums: 64 neighbours in pairs, six times; then these sums in ascending order."""
    padding = -product.shape[1] % COLUMNS_PER_SUM
    sums = torch.nn.functional.pad(product, (0, padding))
    for _ in range(COLUMNS_PER_SUM.bit_length() - 1):
        sums = sums[:, ::2] + sums[:, 1::2]
    total = torch.zeros(product.shape[0], dtype=product.dtype, device=product.device)
    for column in sums.unbind(1):
        total = total + column
    return total


def permute(
    x: Tensor, inverse: Tensor, topk: int, probs: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return rows; rows of no slot are 0. See ``samebits.ops.permute.permute``.

    Determinism: elementwise.
    """
    dtype, total = dtype or x.dtype, inverse.shape[0]
    # Entry R takes the dropped slots. Each row fetches its token: a row is written once.
    slots = torch.zeros(total + 1, dtype=torch.int64, device=x.device)
    slots[inverse.long()] = torch.arange(total, device=x.device)
    slots = slots[:total]
    rows = x.index_select(0, slots // topk)
    if probs is not None:
        wide = _wide(x.dtype)
        rows = rows.to(wide).mul_(probs.reshape(-1)[slots].to(wide)[:, None])
    rows = rows.to(dtype)
    rows[int((inverse < total).sum()) :] = 0
    return rows


def combine(
    rows: Tensor, inverse: Tensor, topk: int, probs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return sums by token. See ``samebits.ops.permute.combine``.

    Determinism: fixed order; each token independent of the others.
    """
    total, wide = inverse.shape[0], _wide(rows.dtype)
    by_row, choice = inverse.view(-1, topk).long().sort(1)
    dropped = by_row >= total
    by_row = by_row.clamp_(max=max(total - 1, 0))
    out = torch.zeros(total // topk, rows.shape[1], dtype=wide, device=rows.device)
    for k in range(topk):
        term = rows.index_select(0, by_row[:, k]).to(wide)
        if probs is not None:
            term = term.mul_(probs.to(wide).gather(1, choice[:, k : k + 1]))
        if bool(dropped[:, k].any()):
            term = torch.where(dropped[:, k : k + 1], 0.0, term)
        out += term
    return out.to(dtype)


def _probs_gradient(tokens: Tensor, rows: Tensor, inverse: Tensor, topk: int) -> Tensor:
    """Return ``Σ_H tokens[s // K] · rows[inverse[s]]`` for each slot, ``(T, K)``; 0 if dropped."""
    total, wide = inverse.shape[0], _wide(rows.dtype)
    dp = []
    # One choice at a time: R rows of products at once would be K times the memory.
    for row in inverse.view(-1, topk).long().unbind(1):
        there = rows.index_select(0, row.clamp(max=total - 1)).to(wide)
        product = torch.where((row < total)[:, None], tokens.to(wide) * there, 0.0)
        dp.append(_sums_of_columns(product))
    return torch.stack(dp, 1)


def permute_backward(
    drows: Tensor, inverse: Tensor, topk: int, probs: Tensor | None, x: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return ``(dx, dp)``; dp only with ``x``.

    Determinism: fixed order; each token independent of the others.
    """
    dx = combine(drows, inverse, topk, probs, drows.dtype)
    return dx, None if x is None else _probs_gradient(x, drows, inverse, topk)


def combine_backward(
    dout: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    rows: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(drows, dp)``; dp only with ``rows``; rows of no slot are 0.

    Determinism: fixed order.
    """
    drows = permute(dout, inverse, topk, probs, dtype)
    return drows, None if rows is None else _probs_gradient(dout, rows, inverse, topk)

"""What a router is trained with besides the model's loss: pure functions of one call's routing."""

import torch
from torch import Tensor

from samebits.errors import must


def expert_counts(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Count the slots of each expert; ids outside ``[0, num_experts)`` are not counted.

    Args:
        topk_ids: ``(T, K)`` int32 or int64.
        num_experts: N.

    Returns:
        ``(N,)`` int64.

    Raises:
        TypeError: ``topk_ids`` holds no integers.

    Determinism: exact integers.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(must("topk_ids", "be int32 or int64", topk_ids.dtype))
    ids = topk_ids.reshape(-1).to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, ids, torch.ones_like(ids))[:num_experts]


def load_balancing_loss(shares: Tensor, counts: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return ``N · Σ_e f_e · P_e``: 1 at perfect balance, N where one expert gets everything.

    ``f_e`` is the expert's share of the slots (no gradient) and ``P_e`` its mean share of the
    scores over tokens. Switch Transformers' loss, in the scale that does not depend on K.

    Args:
        shares: ``(T, N)``, each token's scores divided by their sum; see ``Router.shares``.
        counts: ``(N,)`` slots of each expert, see ``expert_counts``.
        valid: ``(T,)`` bool, the tokens that take part; None means all.

    Returns:
        A scalar in the dtype of ``shares``; 0 without tokens.

    Determinism: bitwise repeatable.
    """
    load = counts.to(shares.dtype) / counts.sum().clamp(min=1)
    return shares.shape[1] * (load * _mean(shares, valid)).sum()


def router_z_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of ``logsumexp(logits)²``, which keeps logits small (ST-MoE).

    Args:
        logits: ``(T, N)``.
        valid: ``(T,)`` bool, the tokens that take part; None means all.

    Returns:
        A scalar in the dtype of ``logits``; 0 without tokens.

    Determinism: bitwise repeatable.
    """
    return _mean(torch.logsumexp(logits, -1, keepdim=True).square(), valid).sum()


def _mean(value: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean over the rows that take part; 0 where there is none."""
    if valid is None:
        return value.sum(0) / max(value.shape[0], 1)
    return torch.where(valid[:, None], value, 0.0).sum(0) / valid.sum().clamp(min=1)

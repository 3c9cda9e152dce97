"""See ``samebits.ops.indirect_gemm``; torch only, one expert after the other."""

from itertools import pairwise

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.routing import Permutation
from samebits.weights import ExpertWeights, split_gate_up


def first_projection(
    x: Tensor,
    permutation: Permutation,
    topk: int,
    weights: ExpertWeights,
    activation: Activation,
    probs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``(h, z)`` of the kept rows, each rounded to the dtype of ``x``.

    Determinism: repeatable.
    """
    hs, zs = [], []
    wide = torch.promote_types(x.dtype, torch.float32)
    for expert, slots in _spans(permutation):
        z = x[slots // topk].to(wide) @ weights.gate_up[expert].to(wide).T
        if weights.gate_up_bias is not None:
            z = z + weights.gate_up_bias[expert].to(wide)
        z = z.to(x.dtype)
        parts = (
            split_gate_up(z.to(wide), weights.layout) if activation.gated else (z.to(wide), None)
        )
        h = act.apply(activation, *parts)
        if probs is not None:
            h = h * probs.reshape(-1)[slots].to(wide)[:, None]
        hs.append(h.to(x.dtype))
        zs.append(z)
    empty = x.new_empty(0, weights.down.shape[2]), x.new_empty(0, weights.gate_up.shape[1])
    return torch.cat([empty[0], *hs]), torch.cat([empty[1], *zs])


def second_projection(
    h: Tensor, permutation: Permutation, weights: ExpertWeights, probs: Tensor | None
) -> Tensor:
    """Return ``y`` of the kept rows, rounded to the dtype of ``h``.

    Determinism: repeatable.
    """
    ys = [h.new_empty(0, weights.down.shape[1])]
    wide = torch.promote_types(h.dtype, torch.float32)
    start = 0
    for expert, slots in _spans(permutation):
        stop = start + slots.numel()
        y = h[start:stop].to(wide) @ weights.down[expert].to(wide).T
        if weights.down_bias is not None:
            bias = weights.down_bias[expert].to(wide)
            y = y + (bias if probs is None else bias * probs.reshape(-1)[slots].to(wide)[:, None])
        ys.append(y.to(h.dtype))
        start = stop
    return torch.cat(ys)


def _spans(permutation: Permutation) -> list[tuple[int, Tensor]]:
    bounds = permutation.offsets.tolist()
    return [
        (expert, permutation.slots[start:stop].long())
        for expert, (start, stop) in enumerate(pairwise(bounds))
        if stop > start
    ]

"""See ``samebits.ops.hidden_gradient``; torch only, one expert after the other."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.routing import Permutation
from samebits.weights import ExpertWeights, merge_gate_up, split_gate_up


class Rows(NamedTuple):
    """Results of the kept rows."""

    # Gradient of z, in the dtype of z.
    dz: Tensor
    # The activation times its probability, in the dtype of z.
    h: Tensor
    # Gradient of each row's probability, in the wide dtype.
    dp: Tensor


def hidden_gradient(
    dout: Tensor,
    z: Tensor,
    permutation: Permutation,
    topk: int,
    weights: ExpertWeights,
    activation: Activation,
    probs: Tensor | None,
) -> Rows:
    """Return the gradients behind the product with ``down``.

    Args:
        dout: ``(T, H)`` gradient of the output.
        z: ``(R, 2F or F)`` first projection by row.
        permutation: Rows of each expert.
        topk: K.
        weights: Parameters; ``down``, ``down_bias`` and the layout are used.
        activation: The function between the projections.
        probs: ``(T, K)`` factor of the activation; None where the probability comes before it.

    Determinism: repeatable.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    parts = [Rows(z[:0], z.new_empty(0, weights.down.shape[2]), z.new_empty(0, dtype=wide))]
    for expert, (start, stop) in enumerate(pairwise(permutation.offsets.tolist())):
        slots = permutation.slots[start:stop].long()
        dy = dout[slots // topk].to(z.dtype).to(wide)
        p = 1.0 if probs is None else probs.reshape(-1)[slots].to(wide)[:, None]
        dh = dy @ weights.down[expert].to(wide)
        rows = z[start:stop].to(wide)
        if activation.gated:
            local = act.derivative(activation, *split_gate_up(rows, weights.layout))
        else:
            local = act.derivative(activation, rows, None)
        dz = dh * p * local.gate
        if local.up is not None:
            dz = merge_gate_up(dz, dh * p * local.up, weights.layout)
        dp = (dh * local.h).sum(-1)
        if weights.down_bias is not None:
            dp = dp + dy @ weights.down_bias[expert].to(wide)
        parts.append(Rows(dz.to(z.dtype), (local.h * p).to(z.dtype), dp))
    return Rows(*(torch.cat(values) for values in zip(*parts, strict=True)))

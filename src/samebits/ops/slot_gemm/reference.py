"""See ``samebits.ops.slot_gemm``; torch only, one slot after the other."""

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.problem import ProbPlacement
from samebits.weights import ExpertWeights, split_gate_up


def slot_hidden(
    x: Tensor,
    topk_ids: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    probs: Tensor,
    placement: ProbPlacement,
) -> Tensor:
    """Return ``h`` (T * K, F) by slot; rows of slots that no expert held here owns are 0.

    Determinism: repeatable.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = [x.new_zeros(weights.down.shape[2])] * topk_ids.numel()
    for slot, expert in enumerate(topk_ids.reshape(-1).tolist()):
        if not 0 <= expert < weights.down.shape[0]:
            continue
        row, p = x[slot // topk_ids.shape[1]].to(wide), probs.reshape(-1)[slot].to(wide)
        if placement == ProbPlacement.FC1_INPUT:
            row = (row * p).to(x.dtype).to(wide)
        z = weights.gate_up[expert].to(wide) @ row
        if weights.gate_up_bias is not None:
            z = z + weights.gate_up_bias[expert].to(wide)
        z = z.to(x.dtype).to(wide)
        parts = split_gate_up(z, weights.layout) if activation.gated else (z, None)
        h = act.apply(activation, *parts)
        rows[slot] = (h * p if placement == ProbPlacement.FC2_INPUT else h).to(x.dtype)
    return torch.stack(rows)


def token_output(
    h: Tensor, topk_ids: Tensor, weights: ExpertWeights, probs: Tensor, placement: ProbPlacement
) -> Tensor:
    """Return the sum over each token's slots, by expert, then slot, rounded to the dtype of ``h``.

    Determinism: repeatable.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    tokens, topk = topk_ids.shape
    out = torch.zeros(tokens, weights.down.shape[1], dtype=wide, device=h.device)
    for token, ids in enumerate(topk_ids.tolist()):
        for expert, k in sorted((expert, k) for k, expert in enumerate(ids)):
            if not 0 <= expert < weights.down.shape[0]:
                continue
            p = probs[token, k].to(wide)
            y = weights.down[expert].to(wide) @ h[token * topk + k].to(wide)
            if weights.down_bias is not None:
                bias = weights.down_bias[expert].to(wide)
                y = y + (bias * p if placement == ProbPlacement.FC2_INPUT else bias)
            y = y.to(h.dtype).to(wide)
            out[token] += y * p if placement == ProbPlacement.FC2_OUTPUT else y
    return out.to(h.dtype)

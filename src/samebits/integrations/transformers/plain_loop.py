"""The plain loop over any decorated experts class: what the error budget is measured against.

One loop over experts with the contract's rounding points (CONTRACT.md section 5) and fp32 between
them. The function between the projections is the class's own ``_apply_gate`` or ``act_fn``, the
norm its own ``post_expert_norm``, so the loop needs no translation of the class and cannot share an
error with one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def plain_loop(module: Any, hidden_states: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Tensor:
    """Return the experts' output, computed in fp32 and rounded to the dtype of ``hidden_states``.

    Args:
        module: An instance of a decorated class, parameters in fp32 (fp64 for fp64 tokens) and
            already rounded to the working dtype.
        hidden_states: ``(T, H)`` in the working dtype.
        topk_ids: ``(T, K)``; ids outside the experts are dropped.
        topk_probs: ``(T, K)``.

    Returns:
        ``(T, H)`` in the working dtype; differentiable.

    Determinism: repeatable.
    """
    dtype = hidden_states.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype).to(wide)

    first, second = projections(module)
    activation: Callable[[Tensor], Tensor] = (
        module._apply_gate if module.has_gate else module.act_fn
    )
    norm: Callable[[Tensor], Tensor] | None = getattr(module, "post_expert_norm", None)
    out = torch.zeros(hidden_states.shape, dtype=wide)
    for expert in range(module.down_proj.shape[0]):
        tokens, choices = torch.where(topk_ids == expert)
        if tokens.numel() == 0:
            continue
        z = rounded(first(hidden_states[tokens].to(wide), expert))
        y = second(rounded(activation(z)), expert)
        y = rounded(y if norm is None else norm(y))
        out = out.index_add(0, tokens, y * topk_probs[tokens, choices, None].to(wide))
    return out.to(dtype)


Projection = Callable[[Tensor, int], Tensor]


def projections(module: Any) -> tuple[Projection, Projection]:
    """Return the two projections of one expert, ``(rows, expert) -> rows``, biases included."""

    def projection(name: str) -> Projection:
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)

        def project(rows: Tensor, expert: int) -> Tensor:
            matrix = weight[expert] if module.is_transposed else weight[expert].T
            value: Tensor = rows @ matrix
            return value if bias is None else value + bias[expert]

        return project

    return projection("gate_up_proj" if module.has_gate else "up_proj"), projection("down_proj")

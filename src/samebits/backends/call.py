"""What every backend gets: the tensors of one call, and the gradients that are wanted of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.problem import Problem


class Call(NamedTuple):
    """Tensors of one call; shapes as in CONTRACT section 1, already validated."""

    # (T, H).
    x: Tensor
    # (T, K) int32 or int64.
    topk_ids: Tensor
    # (T, K).
    topk_probs: Tensor
    # (E, 2F or F, H), any strides.
    gate_up: Tensor
    # (E, H, F), any strides.
    down: Tensor
    # (E, 2F or F).
    gate_up_bias: Tensor | None
    # (E, H).
    down_bias: Tensor | None
    # (H,).
    norm_scale: Tensor | None
    # (1,) int32.
    num_valid_tokens: Tensor | None


# The differentiable tensors of a call, in the order in which every backward returns gradients.
DIFFERENTIABLE = (
    "x",
    "topk_probs",
    "gate_up",
    "down",
    "gate_up_bias",
    "down_bias",
    "norm_scale",
)


class Gradients(NamedTuple):
    """Gradients of one call, named as the tensors they belong to; None where not wanted."""

    x: Tensor | None = None
    topk_probs: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    norm_scale: Tensor | None = None


def accumulate_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for fp64."""
    return torch.float64 if problem.dtype == "fp64" else torch.float32

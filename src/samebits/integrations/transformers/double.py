"""A small double of an experts module, in fp64 on CPU, and tokens for it."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from samebits.integrations.transformers import fp8

# Sizes of the double, pairwise different so that no two dimensions can be mistaken.
_EXPERTS, _HIDDEN, COLUMNS, _TOPK, _TOKENS = 5, 14, 6, 3, 9
# The expert that no token chooses: not the first or the last, which code may forget.
_UNUSED = 2


def double_of(module: nn.Module, flags: dict[str, bool], generator: torch.Generator) -> nn.Module:
    """Return a small module of the same class with random fp64 parameters on CPU.

    Determinism: a function of its arguments.
    """
    double: nn.Module = copy.copy(module)
    double.__dict__ = dict(vars(module))
    hidden, columns = _HIDDEN, COLUMNS
    rows = 2 * columns if flags["has_gate"] else columns
    first = "gate_up_proj" if flags["has_gate"] else "up_proj"
    shapes = {first: (rows, hidden), "down_proj": (hidden, columns)}
    biases = {first + "_bias": (rows,), "down_proj_bias": (hidden,)}
    # Parameters that a class announces but leaves out stay None.
    parameters: dict[str, nn.Parameter | None] = dict.fromkeys(module._parameters)
    if flags["quantized"]:
        # Read beside matrices of more than 8 bits, and not used.
        scales = {name: torch.ones(_EXPERTS, 1, 1) for name in (first, "down_proj")}
        parameters |= {n + fp8.SCALE: nn.Parameter(s, False) for n, s in scales.items()}
    for name, shape in (shapes | (biases if flags["has_bias"] else {})).items():
        stored = shape[::-1] if flags["is_transposed"] else shape
        parameters[name] = _random((_EXPERTS, *stored), generator)
    double.__dict__["_parameters"] = parameters
    double.__dict__["_modules"] = dict(module._modules)
    norm = module._modules.get("post_expert_norm")
    if norm is not None and flags["has_post_expert_norm"]:
        small = copy.copy(norm)
        small.__dict__ = dict(vars(norm))
        small.__dict__["_parameters"] = {"weight": _random((hidden,), generator)}
        double.__dict__["_modules"]["post_expert_norm"] = small
    double.__dict__["num_experts"] = _EXPERTS
    for name, value in vars(module).items():
        if type(value) is int and name.startswith("hidden_"):
            double.__dict__[name] = hidden
        if type(value) is int and name.startswith("intermediate_"):
            double.__dict__[name] = columns
    return double


def _random(shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    value = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return nn.Parameter(value)


class Inputs(NamedTuple):
    """Tokens, their routing, and the gradient of the output."""

    x: Tensor
    topk_ids: Tensor
    topk_probs: Tensor
    dout: Tensor


def inputs_of(generator: torch.Generator, spread: float) -> Inputs:
    """Return inputs for every expert but ``_UNUSED``; the first projection has rms ``spread``.

    Determinism: a function of its arguments.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    ids = torch.stack(
        [torch.randperm(_EXPERTS - 1, generator=generator)[:_TOPK] for _ in range(_TOKENS)]
    )
    ids = ids + (ids >= _UNUSED)
    probs = torch.rand(_TOKENS, _TOPK, generator=generator, dtype=torch.float64) + 0.1
    x = draw(_TOKENS, _HIDDEN) * (spread / _HIDDEN**0.5)
    return Inputs(x, ids, probs, draw(_TOKENS, _HIDDEN))

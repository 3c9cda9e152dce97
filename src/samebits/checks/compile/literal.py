"""Inputs as Python source: four digits where small, random of the same kind where large."""

import math
from typing import Any

import torch

_LARGEST = 64


def of(value: Any) -> str:
    """Return an expression for ``value``.

    Raises:
        ValueError: There is none, as for an object of a class.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{k!r}: {of(v)}" for k, v in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(of(item) for item in value) + "]"
    if type(value) is tuple:
        return "(" + "".join(f"{of(item)}, " for item in value) + ")"
    raise ValueError(f"an input of type {type(value).__name__} has no source")


def _tensor(value: torch.Tensor) -> str:
    device = "" if value.device.type == "cpu" else f', device="{value.device.type}"'
    if value.numel() <= _LARGEST and value.isfinite().all():
        return (
            f"torch.tensor({_digits(value.detach().cpu().tolist())}, dtype={value.dtype}{device})"
        )
    shape = tuple(value.shape)
    if value.is_floating_point():
        scale = float(value.detach().float().std())
        return f"(torch.randn({shape}{device}) * {scale:.3g}).to({value.dtype})"
    if value.dtype == torch.bool:
        return f"torch.rand({shape}{device}) > 0.5"
    return f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape}{device})"


def _digits(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_digits(item) for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)

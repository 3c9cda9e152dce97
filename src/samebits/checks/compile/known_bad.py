"""Programs that are known to go stale: what the self-test looks for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx


def clamped_swiglu(x: Tensor, limit: float) -> Tensor:
    """Return SwiGLU with the gate and up parts clamped (pytorch#194976, mended in torch 2.15)."""
    gate, up = torch.chunk(x, 2, -1)
    return F.silu(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)


def scaled_rms_norm(x: Tensor, scale: float) -> Tensor:
    """Return an RMS norm whose eps moves with a scale (pytorch#197889, open)."""
    return F.rms_norm(x * scale, (x.shape[-1],), eps=scale + 1e-3)


def _forgetful(module: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Compile to code that keeps the numbers of its first call, as a broken compiler would."""
    del example_inputs
    kept: dict[int, Tensor] = {}

    def run(*args: Any) -> Any:
        frozen = []
        for index, value in enumerate(args):
            is_number = isinstance(value, Tensor) and value.dtype == torch.float64
            frozen.append(kept.setdefault(index, value.clone()) if is_number else value)
        return module.forward(*frozen)

    return run


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x * scale


# Wrong with every torch: what an audit must find to be trusted.
planted = torch.compile(_scaled, backend=_forgetful)


def make_inputs() -> tuple[tuple[Tensor, float], dict[str, Any]]:
    """Return a tensor and a number that every program here takes."""
    return (torch.randn(4, 8), 0.5), {}

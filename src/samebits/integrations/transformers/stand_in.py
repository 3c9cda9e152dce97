"""transformers' sonicmoe adapter, judged without its kernel.

The kernel needs a Hopper GPU, but which function it is asked to compute is decided before it, by
the adapter in ``transformers.integrations.sonicmoe``. `sonicmoe_stand_in` puts a torch function in
the kernel's place that computes what the **arguments** ask for, as well as a fused kernel could:

| argument | meaning |
| --- | --- |
| ``activation_type`` | SWIGLU, GEGLU or REGLU: gelu is the erf form |
| ``concat_layout`` | True: gate and up as two halves; False: interleaved |
| ``expert_ids`` | ids >= E are dropped |
| ``w1``, ``w2`` | ``(2F, H, E)`` and ``(H, F, E)`` |

There is no argument for a clamp, an alpha, an offset or a soft cap: a class that has one is
computed wrongly, and the verdict says so with ``evidence: "arguments"``.
"""

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from samebits.activation import Activation, apply
from samebits.errors import UnsupportedError

_HOOKS = ("_SONICMOE", "SonicMoE", "_load_sonicmoe_kernel", "load_sonicmoe_kernel")


class _ActivationType(enum.Enum):
    SWIGLU = Activation(kind="silu")
    GEGLU = Activation(kind="gelu")
    REGLU = Activation(kind="relu")


@contextmanager
def sonicmoe_stand_in() -> Iterator[None]:
    """Replace the sonicmoe kernel by a torch function until the ``with`` block ends.

    Raises:
        UnsupportedError: This transformers loads its kernel in another way.
    """
    adapter = _adapter()
    saved = {name: getattr(adapter, name) for name in _HOOKS}
    bundle = adapter.SonicMoE(_ActivationType, _experts)
    replacements: dict[str, Any] = {
        "_SONICMOE": bundle,
        "_load_sonicmoe_kernel": lambda: None,
        "load_sonicmoe_kernel": lambda: bundle,
    }
    try:
        for name, value in replacements.items():
            setattr(adapter, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(adapter, name, value)


def sonicmoe_runs_here() -> bool:
    """Return whether the real kernel can be loaded, so that no stand-in is needed."""
    loadable: Callable[[], bool] | None = getattr(_adapter(), "is_sonicmoe_loadable", None)
    return loadable is not None and bool(loadable())


def _adapter() -> ModuleType:
    from transformers.integrations import sonicmoe

    missing = [name for name in _HOOKS if not hasattr(sonicmoe, name)]
    if missing:
        names = ", ".join(missing)
        raise UnsupportedError(f"transformers.integrations.sonicmoe has no {names} here")
    module: ModuleType = sonicmoe
    return module


def _experts(
    x: Tensor,
    router_scores: Tensor,
    token_idx: Tensor,
    expert_ids: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    E: int,
    activation_type: _ActivationType,
    concat_layout: bool,
    **_launch: object,
) -> tuple[Tensor, None]:
    """Compute what the arguments ask for; values rounded where a fused kernel stores them."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(E):
        slots = (expert_ids == expert).nonzero().flatten()
        tokens = token_idx[slots].long()
        z = x[tokens].to(wide) @ w1[:, :, expert].to(wide).T
        z = (z if b1 is None else z + b1[expert].to(wide)).to(x.dtype).to(wide)
        gate, up = z.chunk(2, -1) if concat_layout else (z[:, ::2], z[:, 1::2])
        h = apply(activation_type.value, gate, up).to(x.dtype).to(wide)
        y = h @ w2[:, :, expert].to(wide).T
        y = (y if b2 is None else y + b2[expert].to(wide)).to(x.dtype).to(wide)
        out = out.index_add(0, tokens, y * router_scores[slots, None].to(wide))
    return out.to(x.dtype), None

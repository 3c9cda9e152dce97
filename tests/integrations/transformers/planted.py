"""Wrong experts implementations, one fault each, and a module made for a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.integrations.transformers.interface import load

Implementation = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def right(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return load().moe.batched_mm_experts_forward(module, x, ids, probs)


def clamp_dropped(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    limit, module.limit = module.limit, 1e9
    out = right(module, x, ids, probs)
    module.limit = limit
    return out


class _Changed:
    """A module with some attributes replaced."""

    def __init__(self, module: Any, **changes: Any) -> None:
        self._module, self._changes = module, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._module, name)


def gate_and_up_swapped(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    gate, up = module.gate_up_proj.chunk(2, 1)
    return right(_Changed(module, gate_up_proj=torch.cat([up, gate], 1)), x, ids, probs)


def probability_twice(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return right(module, x, ids, probs * probs)


def last_expert_skipped(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return right(module, x, ids, probs.masked_fill(ids == module.num_experts - 1, 0.0))


def unused_experts_get_a_gradient(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return right(module, x, ids, probs) + 1e-30 * module.down_proj.sum()


def one_row_wrong(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    out = right(module, x, ids, probs)
    scale = torch.ones(out.shape[0], 1, dtype=out.dtype)
    scale[4] = 1.125
    return out * scale


def forward_only(module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    return right(module, x, ids, probs.detach())


class StaleLimit:
    """Keeps the limit of its first call."""

    def __init__(self) -> None:
        self.limits: dict[int, float] = {}

    def __call__(self, module: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        first = self.limits.setdefault(id(module), module.limit)
        now, module.limit = module.limit, first
        out = right(module, x, ids, probs)
        module.limit = now
        return out


@contextmanager
def registered(name: str, implementation: Implementation) -> Iterator[None]:
    """Enter an implementation into transformers' table until the block ends."""
    table = load().moe.ALL_EXPERTS_FUNCTIONS
    table[name] = implementation
    try:
        yield
    finally:
        del table[name]


MODEL = """
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation


class BrandNewConfig(PreTrainedConfig):
    model_type = "brand_new"

    def __init__(self, hidden_size=1024, number_of_specialists=64, width=512, cap=3.0, **kwargs):
        self.hidden_size = hidden_size
        self.number_of_specialists = number_of_specialists
        self.width = width
        self.cap = cap
        super().__init__(**kwargs)


@use_experts_implementation
class BrandNewExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = config.number_of_specialists
        self.gate_up_proj = nn.Parameter(
            torch.empty(self.num_experts, 2 * config.width, config.hidden_size)
        )
        self.down_proj = nn.Parameter(
            torch.empty(self.num_experts, config.hidden_size, config.width)
        )
        self.act_fn = nn.SiLU()
        self.never_read = float(config.cap)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, choices = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ self.gate_up_proj[expert].T).chunk(2, -1)
            y = (self.act_fn(gate) * up) @ self.down_proj[expert].T
            y = y * top_k_weights[tokens, choices, None]
            out.index_add_(0, tokens, (y OWN).to(out.dtype))
        return out
"""


def write_model(folder: Path, name: str, *, own: str = "") -> None:
    """Write a package like those of ``transformers.models`` into ``folder``.

    ``own`` is appended to each expert's output in the class's own loop only.
    """
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / f"modeling_{name}.py").write_text(MODEL.replace("OWN", own))

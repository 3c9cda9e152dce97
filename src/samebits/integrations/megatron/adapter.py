"""Run Megatron-LM's experts modules on this library: same parameters, same call.

``adapt(module)`` replaces the forward of one ``TEGroupedMLP`` or ``SequentialMLP``. The parameters
stay the same objects with the same names, so that optimizers, checkpoints and refits go on as
before; where their memory is one buffer (``repoint``) the library reads it without a copy.
"""

from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.experts import grouped_experts
from samebits.integrations.configs.megatron import (
    fields_of,
    megatron_activation,
    megatron_layout,
    megatron_placement,
)
from samebits.integrations.megatron.stacking import repoint, stacked
from samebits.problem import ProbPlacement
from samebits.weights import ExpertWeights, Layout

_REFUSED = {
    "fp8": "FP8 experts are Transformer Engine's; use BF16 experts",
    "fp4": "FP4 experts are Transformer Engine's; use BF16 experts",
    "fine_grained_activation_offloading": "the library keeps its own activations",
}


class Options(NamedTuple):
    """What a configuration says of the experts."""

    activation: Activation
    layout: Layout
    placement: ProbPlacement


def options_of(config: Any) -> Options:
    """Return what a configuration says of the experts.

    Raises:
        UnsupportedError, ValueError: See ``samebits.from_megatron_args``.

    Determinism: a function of the configuration.
    """
    fields = fields_of(config)
    activation = megatron_activation(fields)
    layout = megatron_layout(fields, "moe_mlp_glu_interleave_size", activation)
    placement = megatron_placement(fields, int(fields.get("moe_router_topk", default=1)))
    return Options(activation, layout, placement)


class Adapted:
    """An experts module that runs on this library; ``remove()`` gives it its own forward back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def remove(self) -> None:
        """Undo ``adapt``; the parameters stay where they are."""
        vars(self.module).pop("forward", None)


def adapt(module: nn.Module, config: Any = None, *, backend: str = "auto") -> Adapted:
    """Make an experts module of Megatron-LM compute with ``samebits.grouped_experts``.

    Its call stays ``(permuted_hidden, tokens_per_expert, permuted_probs) -> (out, None)``.

    Args:
        module: A ``TEGroupedMLP`` or ``SequentialMLP``, or any module with ``linear_fc1`` and
            ``linear_fc2`` (weights ``weight0`` …, or one stacked ``weight``) or ``local_experts``.
        config: Its configuration; None takes ``module.config``.
        backend: See ``samebits.experts``.

    Returns:
        A handle, to undo it.

    Raises:
        TypeError: The module has no such parameters.
        UnsupportedError: The configuration asks for something that this path does not do.
        ValueError: Its options contradict one another.

    Determinism: see ``samebits.experts``.
    """
    config = module.config if config is None else config
    for name, reason in _REFUSED.items():
        value = getattr(config, name, None)
        if value:
            raise UnsupportedError(f"{name} = {value!r}: {reason}")
    if "moe_act" in (getattr(config, "recompute_modules", None) or ()):
        raise UnsupportedError(
            "recompute_modules = moe_act: the activation is part of the library's operator; use "
            'recompute_modules = ["moe"]'
        )
    options = options_of(config)
    _weights(module, options)  # shapes and dtypes are checked before anything changes
    for parameters in _parameters(module).values():
        if len(parameters) > 1:
            repoint(parameters)

    def forward(
        self: nn.Module,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        output_buffer: Tensor | None = None,
        grad_input_buffer: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if output_buffer is not None or grad_input_buffer is not None:
            raise UnsupportedError("output_buffer and grad_input_buffer are the op-fuser's")
        rows = permuted_local_hidden_states
        out = grouped_experts(
            rows,
            _offsets(tokens_per_expert, rows),
            # Of self, which is another module in a deep copy.
            _weights(self, options),
            options.activation,
            row_probs=permuted_probs.reshape(-1).float(),
            placement=options.placement,
            backend=backend,
        )
        return out, None

    vars(module)["forward"] = MethodType(forward, module)
    return Adapted(module)


def _offsets(tokens_per_expert: Tensor | list[int], rows: Tensor) -> Tensor:
    counts = torch.as_tensor(tokens_per_expert, device=rows.device)
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


# Parameter of this library -> linear layer and kind of Megatron-LM.
_PLACES = {
    "gate_up": ("linear_fc1", "weight"),
    "down": ("linear_fc2", "weight"),
    "gate_up_bias": ("linear_fc1", "bias"),
    "down_bias": ("linear_fc2", "bias"),
}


def _weights(module: nn.Module, options: Options) -> ExpertWeights:
    """Return the parameters that ``module`` holds now: their owner may have put others there."""
    tensors: dict[str, Any] = {
        name: None if not held else held[0] if held[0].dim() == _dims(name) else stacked(held)
        for name, held in _parameters(module).items()
    }
    return ExpertWeights(layout=options.layout, **tensors)


def _dims(name: str) -> int:
    """Return the dimensions of a stacked parameter."""
    return 2 if name.endswith("bias") else 3


def _parameters(module: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors of each parameter, one for each expert or one that is stacked."""
    return {name: _held(module, *place) for name, place in _PLACES.items()}


def _held(module: nn.Module, linear: str, kind: str) -> list[Tensor]:
    local = getattr(module, "local_experts", None)
    if local is not None:
        held = [getattr(getattr(expert, linear), kind, None) for expert in local]
    else:
        owner = getattr(module, linear, None)
        whole = getattr(owner, kind, None)
        if isinstance(whole, Tensor) and whole.numel():
            return [whole]
        held = []
        while isinstance(getattr(owner, f"{kind}{len(held)}", None), Tensor):
            held.append(getattr(owner, f"{kind}{len(held)}"))
    present = [p for p in held if isinstance(p, Tensor) and p.numel()]
    if len(present) not in (0, len(held)) or (kind == "weight" and not present):
        rule = f"have a {kind} of {linear} for each expert"
        raise TypeError(must("module", rule, f"{len(present)} of {len(held)}"))
    shapes = {tuple(p.shape) for p in present}
    if len(shapes) > 1:
        rule = f"have one shape for the {kind} of {linear} of every expert"
        raise ValueError(must("module", rule, sorted(shapes)))
    return present

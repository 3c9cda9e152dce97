"""Parameters of Megatron-LM's experts modules: where they are, and as the library takes them."""

from typing import Any, TypeAlias

from torch import Tensor, nn

from samebits.errors import must
from samebits.integrations.megatron.owners import StackedOwner
from samebits.integrations.megatron.stacking import stacked
from samebits.weight_gradients import Owner
from samebits.weights import ExpertWeights, Layout

# Tensors of each parameter of this library, one for each expert or one that is stacked.
Parameters: TypeAlias = dict[str, list[Tensor]]

# Parameter of this library -> linear layer and kind of Megatron-LM.
_PLACES = {
    "gate_up": ("linear_fc1", "weight"),
    "down": ("linear_fc2", "weight"),
    "gate_up_bias": ("linear_fc1", "bias"),
    "down_bias": ("linear_fc2", "bias"),
}


def weights_of(parameters: Parameters, layout: Layout) -> ExpertWeights:
    """Return the parameters as the library takes them: views where memory allows.

    Determinism: exact.
    """
    tensors: dict[str, Any] = {
        name: None if not held else held[0] if _is_stacked(name, held) else stacked(held)
        for name, held in parameters.items()
    }
    return ExpertWeights(layout=layout, **tensors)


def owners_of(held: Parameters) -> dict[str, Owner]:
    """Return who gets the gradients of ``weights_of``.

    Determinism: no arithmetic.
    """
    return {
        name: Owner(parameters[0]) if _is_stacked(name, parameters) else StackedOwner(parameters)
        for name, parameters in held.items()
        if parameters
    }


def _is_stacked(name: str, held: list[Tensor]) -> bool:
    """Return whether one tensor holds the parameter of all experts."""
    return held[0].dim() == (2 if name.endswith("bias") else 3)


def held_by(module: nn.Module) -> Parameters:
    """Return the tensors of each parameter, one for each expert or one that is stacked.

    They are those of now: their owner may have put others there.

    Raises:
        TypeError: The module has no such parameters, or some of its experts have none.
        ValueError: Its experts have different shapes.

    Determinism: no arithmetic.
    """
    return {name: _held(module, *place) for name, place in _PLACES.items()}


def linears_of(module: nn.Module, linear: str) -> list[Any]:
    """Return the layers named ``linear``: one of each expert, or one.

    Determinism: no arithmetic.
    """
    local = getattr(module, "local_experts", None)
    owners = [module] if local is None else list(local)
    return [getattr(owner, linear, None) for owner in owners]


def _held(module: nn.Module, linear: str, kind: str) -> list[Tensor]:
    linears = linears_of(module, linear)
    if getattr(module, "local_experts", None) is not None:
        held = [getattr(owner, kind, None) for owner in linears]
    else:
        (owner,) = linears
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

"""Run the experts that transformers' interface does not reach on this library.

``replace_experts(model)`` gives each such module a subclass of its own class with another forward.
The module stays the same object, with its parameters, their names and their memory; ``remove()``
gives it its class back. The gate is read from the class's code, by its values (``gate.py``).

=======================  =========================================================================
class                    what its forward becomes
=======================  =========================================================================
``Llama4TextMoe``        router as it is; experts with ``FC1_INPUT``, K = ``top_k``; shared expert
``Step3p7Experts``       experts, limits behind the activation
``DbrxExperts``          experts; ``w1`` and ``v1`` are put side by side at each call
``LongcatFlashExperts``  experts, and identity experts added to their unrounded sum
``JetMoeMoE``            router as it is; experts; the block's bias added once
=======================  =========================================================================
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.errors import must
from samebits.experts import experts
from samebits.integrations.transformers import gate
from samebits.nn.sums import Parts, add_parts
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import ExpertWeights, Layout

# Where the activation of a replaced module is kept, like ``translation.ATTRIBUTE``.
_ACTIVATION = "_samebits_activation"


class _Replacement(NamedTuple):
    """How one class is replaced."""

    # (module) -> gate function of the whole first projection, and the numbers that it reads.
    gate: Callable[[Any], tuple[Callable[[Tensor], Tensor], list[float]]]
    # The new forward, with the arguments of the old one.
    forward: Callable[..., Any]


def _halves(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(z: Tensor) -> Tensor:
        first, second = z.chunk(2, -1)
        return act(first) * second

    return gated


def _wide(probs: Tensor) -> Tensor:
    return probs if probs.dtype == torch.float64 else probs.float()


def _activation(module: nn.Module) -> Activation:
    activation: Activation = getattr(module, _ACTIVATION)
    return activation


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    ids = logits.topk(self.top_k, 1).indices
    weights = ExpertWeights(
        gate_up=self.experts.gate_up_proj.transpose(1, 2),
        down=self.experts.down_proj.transpose(1, 2),
    )
    routed = experts(
        x,
        Routing(ids, _wide(scores.gather(1, ids))),
        weights,
        _activation(self),
        placement=ProbPlacement.FC1_INPUT,
    )
    shared: Tensor = self.shared_expert(x)
    return shared + routed, logits


def _step(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    weights = ExpertWeights(gate_up=self.gate_up_proj, down=self.down_proj)
    routing = Routing(top_k_index, _wide(top_k_weights))
    return experts(hidden_states, routing, weights, _activation(self))


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    number, columns, hidden = self.num_experts, self.ffn_hidden_size, self.hidden_size
    parts = (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    gate_part, up, down = (p.view(number, columns, hidden) for p in parts)
    weights = ExpertWeights(gate_up=torch.cat([gate_part, up], 1), down=down.transpose(1, 2))
    x = hidden_states.reshape(-1, hidden)
    out = experts(x, Routing(top_k_index, _wide(top_k_weights)), weights, _activation(self))
    return out.view(hidden_states.shape[0], -1, hidden)


def _longcat(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    real, total, dtype = self.num_routed_experts, self.total_experts, hidden_states.dtype
    probs = _wide(top_k_weights)
    # Rows of gate_up_proj behind the real experts exist, and are never used.
    weights = ExpertWeights(gate_up=self.gate_up_proj[:real], down=self.down_proj)
    own = torch.where(top_k_index < real, top_k_index, -1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = experts(hidden_states, Routing(own, probs), weights, _activation(self), out_dtype=wide)
    parts = Parts(out, hidden_states, top_k_index, probs, None)
    return add_parts(parts, range(real, total), "1.0", dtype)


def _jetmoe(self: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    logits = self.router.layer(x).float()
    chosen, ids = logits.topk(self.router.top_k, 1)
    probs = torch.softmax(chosen, 1).type_as(x)
    weights = ExpertWeights(gate_up=self.input_linear.weight, down=self.output_linear.weight)
    out = experts(x, Routing(ids, _wide(probs)), weights, _activation(self))
    total: Tensor = out.view(layer_input.shape) + self.bias
    return total


REPLACEMENTS: dict[str, _Replacement] = {
    "Llama4TextMoe": _Replacement(lambda module: (_halves(module.experts.act_fn), []), _llama4),
    "Step3p7Experts": _Replacement(lambda module: (module._apply_gate, [module.limit]), _step),
    "DbrxExperts": _Replacement(lambda module: (_halves(module.mlp.activation_fn), []), _dbrx),
    "LongcatFlashExperts": _Replacement(lambda module: (_halves(module.act_fn), []), _longcat),
    "JetMoeMoE": _Replacement(lambda module: (_halves(module.activation), []), _jetmoe),
}


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class Replaced(tuple[str, ...]):
    """Paths of the modules that ``replace_experts`` changed."""

    _modules: tuple[nn.Module, ...] = ()

    def remove(self) -> None:
        """Give the modules their own classes back; their parameters stay as they are."""
        for module in self._modules:
            kind = type(module)
            if getattr(kind, "_samebits_replaced", False):
                module.__class__ = kind.__mro__[1]
                vars(module).pop(_ACTIVATION, None)
        self._modules = ()


def replace_experts(model: nn.Module) -> Replaced:
    """Make every module of ``model`` whose class is in the table above compute with this library.

    Where one gate cannot be read nothing is changed. Modules that are replaced already are left.

    Args:
        model: A model, or one such module.

    Returns:
        The paths, and ``remove()``.

    Raises:
        ValueError: The model holds no such module.
        UnsupportedError: A gate is none of this library's; the message says whose.

    Determinism: see ``samebits.experts``.
    """
    found = {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__ in REPLACEMENTS
        and type(module).__module__.startswith("transformers.")
        and not getattr(type(module), "_samebits_replaced", False)
    }
    if not found:
        names = ", ".join(REPLACEMENTS)
        raise ValueError(must("model", f"hold one of {names}", type(model).__name__))
    activations = {path: _read(module, path) for path, module in found.items()}
    for path, module in found.items():
        setattr(module, _ACTIVATION, activations[path])
        module.__class__ = _subclass(type(module))
    replaced = Replaced(found)
    replaced._modules = tuple(found.values())
    return replaced


def _read(module: Any, path: str) -> Activation:
    function, scalars = REPLACEMENTS[type(module).__name__].gate(module)
    name = f"the gate of {type(module).__name__} ({path or 'the module itself'})"
    return gate.identify(function, scalars, Layout(), gated=True, name=name)[0]


def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the one subclass of ``kind``: compiled code knows a module by its class."""
    if kind not in _SUBCLASSES:
        members = {"forward": REPLACEMENTS[kind.__name__].forward, "_samebits_replaced": True}
        _SUBCLASSES[kind] = type(kind.__name__, (kind,), members)
    return _SUBCLASSES[kind]

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
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.integrations.transformers import gate
from samebits.nn.sums import Parts, add_parts
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import ExpertWeights, Layout

# Where the gate of a replaced module is kept, like ``translation.ATTRIBUTE``.
_GATE = "_samebits_gate"
# Of every class of the table; torch.compile does not trace a dataclass's default.
_LAYOUT = Layout()
# Attribute of a class that replaces another: that other one.
_OWN = "_samebits_own_class"
# (module) -> the function that its gate calls, and the number that it reads, None where none.
_Sources = Callable[[Any], tuple[Any, float | None]]


class _Gate(NamedTuple):
    """What the gate of a module computes, and what this was read from."""

    activation: Activation
    function: Any
    # As text: a float that is held may go stale in a compiled graph.
    number: str | None


class _Replacement(NamedTuple):
    """How one class is replaced."""

    # (module) -> gate function of the whole first projection.
    gate: Callable[[Any], Callable[[Tensor], Tensor]]
    sources: _Sources
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
    """Return the activation; it is read again where what the gate is made of has changed."""
    held: _Gate = getattr(module, _GATE)
    function, number = _replacement(module).sources(module)
    text = held.number
    if function is not held.function or (text is not None and number != float(text)):
        if torch.compiler.is_compiling():
            raise RuntimeError("a gate has changed: call the module once without compilation")
        held = _read(module, "")
        setattr(module, _GATE, held)
    return held.activation


def _replacement(module: nn.Module) -> _Replacement:
    own: type[nn.Module] = getattr(module, _OWN, type(module))
    return REPLACEMENTS[own.__name__]


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    ids = logits.topk(self.top_k, 1).indices
    weights = ExpertWeights(
        gate_up=self.experts.gate_up_proj.transpose(1, 2),
        down=self.experts.down_proj.transpose(1, 2),
        layout=_LAYOUT,
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
    weights = ExpertWeights(gate_up=self.gate_up_proj, down=self.down_proj, layout=_LAYOUT)
    routing = Routing(top_k_index, _wide(top_k_weights))
    return experts(hidden_states, routing, weights, _activation(self))


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    number, columns, hidden = self.num_experts, self.ffn_hidden_size, self.hidden_size
    parts = (self.mlp.w1, self.mlp.v1, self.mlp.w2)
    gate_part, up, down = (p.view(number, columns, hidden) for p in parts)
    weights = ExpertWeights(
        gate_up=torch.cat([gate_part, up], 1), down=down.transpose(1, 2), layout=_LAYOUT
    )
    x = hidden_states.reshape(-1, hidden)
    out = experts(x, Routing(top_k_index, _wide(top_k_weights)), weights, _activation(self))
    return out.view(hidden_states.shape[0], -1, hidden)


def _longcat(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    real, total, dtype = self.num_routed_experts, self.total_experts, hidden_states.dtype
    probs = _wide(top_k_weights)
    # Rows of gate_up_proj behind the real experts exist, and are never used.
    weights = ExpertWeights(gate_up=self.gate_up_proj[:real], down=self.down_proj, layout=_LAYOUT)
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
    weights = ExpertWeights(
        gate_up=self.input_linear.weight, down=self.output_linear.weight, layout=_LAYOUT
    )
    out = experts(x, Routing(ids, _wide(probs)), weights, _activation(self))
    total: Tensor = out.view(layer_input.shape) + self.bias
    return total


def _plain(function: Callable[[Any], Any], forward: Callable[..., Any]) -> _Replacement:
    """Return how a class is replaced whose gate is a function of the first half."""
    return _Replacement(
        lambda module: _halves(function(module)), lambda module: (function(module), None), forward
    )


REPLACEMENTS: dict[str, _Replacement] = {
    "Llama4TextMoe": _plain(lambda module: module.experts.act_fn, _llama4),
    "Step3p7Experts": _Replacement(
        lambda module: module._apply_gate, lambda module: (module.act_fn, module.limit), _step
    ),
    "DbrxExperts": _plain(lambda module: module.mlp.activation_fn, _dbrx),
    "LongcatFlashExperts": _plain(lambda module: module.act_fn, _longcat),
    "JetMoeMoE": _plain(lambda module: module.activation, _jetmoe),
}


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class Replaced(tuple[str, ...]):
    """Paths of the modules that ``replace_experts`` changed."""

    _modules: tuple[nn.Module, ...] = ()

    def remove(self) -> None:
        """Give the modules their own classes back; their parameters stay as they are.

        Raises:
            UnsupportedError: A module got another class since (``fully_shard``); none is changed.
        """
        held = [module for module in self._modules if hasattr(module, _OWN)]
        for module in held:
            if type(module) not in _SUBCLASSES.values():
                raise UnsupportedError(f"{type(module).__name__} is a class that came after ours")
        for module in held:
            module.__class__ = getattr(module, _OWN)
            vars(module).pop(_GATE, None)
        self._modules = ()


def replace_experts(model: nn.Module) -> Replaced:
    """Make every module of ``model`` whose class is in the table above compute with this library.

    Where one gate cannot be read nothing is changed. Modules that are replaced already are left.
    Call it before ``fully_shard``, which gives modules a class of its own.

    Args:
        model: A model, or one such module.

    Returns:
        The paths, and ``remove()``.

    Raises:
        ValueError: The model holds no such module.
        UnsupportedError: A gate is none of this library's, or a module's class is derived from one
            in the table; the message says whose.

    Determinism: see ``samebits.experts``.
    """
    known = {
        path: module
        for path, module in model.named_modules()
        if any(_is_in_table(kind) for kind in type(module).__mro__)
    }
    found = {path: module for path, module in known.items() if not hasattr(module, _OWN)}
    for path, module in found.items():
        if not _is_in_table(type(module)):
            raise UnsupportedError(
                f"{type(module).__name__} ({path or 'the module itself'}) is derived from a class "
                "that can be replaced\nhint: call replace_experts before fully_shard"
            )
    if not known:
        names = ", ".join(REPLACEMENTS)
        raise ValueError(must("model", f"hold one of {names}", type(model).__name__))
    gates = {path: _read(module, path) for path, module in found.items()}
    for path, module in found.items():
        setattr(module, _GATE, gates[path])
        module.__class__ = _subclass(type(module))
    replaced = Replaced(found)
    replaced._modules = tuple(found.values())
    return replaced


def _is_in_table(kind: type) -> bool:
    return kind.__name__ in REPLACEMENTS and kind.__module__.startswith("transformers.")


def _read(module: Any, path: str) -> _Gate:
    replacement = _replacement(module)
    function, number = replacement.sources(module)
    numbers = [] if number is None else [number]
    name = f"the gate of {type(module).__name__} ({path or 'the module itself'})"
    activation, _ = gate.identify(replacement.gate(module), numbers, _LAYOUT, gated=True, name=name)
    return _Gate(activation, function, None if number is None else repr(number))


def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the one subclass of ``kind``: compiled code knows a module by its class."""
    if kind not in _SUBCLASSES:
        forward = REPLACEMENTS[kind.__name__].forward
        members = {"forward": forward, _OWN: kind, "__reduce_ex__": _reduce}
        _SUBCLASSES[kind] = type(kind.__name__, (kind,), members)
    return _SUBCLASSES[kind]


def _reduce(self: nn.Module, protocol: int) -> Any:
    """Pickle and copy by the own class: no module holds ours under its name."""
    if type(self) not in _SUBCLASSES.values():
        return object.__reduce_ex__(self, protocol)
    return _blank, (getattr(self, _OWN),), vars(self)


def _blank(kind: type[nn.Module]) -> nn.Module:
    replaced = _subclass(kind)
    return replaced.__new__(replaced)

"""What attach() learned of one experts module, frozen, and the tensors it names.

=========================  ====================================================
transformers               samebits
=========================  ====================================================
``gate_up_proj``           ``ExpertWeights.gate_up``; ``(E, H, 2F)`` where ``is_transposed``
``up_proj``                ``ExpertWeights.gate_up`` without a gate
``down_proj``              ``ExpertWeights.down``; ``(E, F, H)`` where ``is_transposed``
``*_proj_bias``            ``gate_up_bias``, ``down_bias``
``is_concatenated``        ``Layout()``; otherwise ``Layout(interleave=1)``
``has_gate``               ``Activation.gated``
``_apply_gate``, scalars   ``Activation``, by probing (``gate.py``)
``post_expert_norm``       ``PostExpertNorm``, ``norm_scale``
``top_k_weights``          ``topk_probs`` with ``ProbPlacement.FC2_OUTPUT``
=========================  ====================================================
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from samebits.activation import Activation
from samebits.formats import QuantizedWeights
from samebits.weights import ExpertWeights, Layout, PostExpertNorm

# Where a translation is kept: a plain attribute of the experts module, so that deepcopy and pickle
# carry it, state_dict leaves it out, and torch.compile can guard on it.
ATTRIBUTE = "_samebits"
# The submodule that holds packed matrices, where ``pack_experts`` made one.
PACKED = "samebits_packed"

FactKind = Literal["number", "plain", "type", "function", "method", "partial", "object", "code"]


class Fact(NamedTuple):
    """One value that the class's own code reads, as it was when the translation was verified."""

    # Attribute names from the module on, for example ("act_fn", "up_softcap", "softcap").
    path: tuple[str, ...]
    # "number": any int or float; "plain": bool, str or None; "type": the type of a submodule;
    # "function", "method": its identity, which copies share; "partial": what it calls, and with
    # what; "object": the identity of any other callable;
    # "code": a method of the class itself.
    kind: FactKind
    # The value; a number is spelled as text, because a compiled graph keeps text as a constant
    # while a Python float may turn into an input of the graph.
    value: Any

    def __str__(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One experts module in the words of this library; holds no tensor.

    Tensors are taken from the module at each call, because ``Module.to``, sharding and weight
    loading replace them.
    """

    activation: Activation
    layout: Layout
    # Matrices are stored as (E, in, out).
    transposed: bool
    biased: bool
    norm: PostExpertNorm | None
    # The scale of the norm is 1 + weight instead of weight.
    norm_centered: bool
    # What would make the translation wrong if it changed.
    facts: tuple[Fact, ...]
    # How the translation was verified, for people.
    verified: str


def read(module: nn.Module, path: tuple[str, ...]) -> Any:
    """Return the value at ``path``, or None where it is gone."""
    value: Any = module
    for name in path:
        value = getattr(value, name, None)
    return value


def holds(module: nn.Module, fact: Fact) -> bool:
    """Return whether ``fact`` still describes ``module``; traceable by torch.compile."""
    if fact.kind == "code":
        (name,) = fact.path
        return getattr(type(module), name) is fact.value and name not in module.__dict__
    value = read(module, fact.path)
    if fact.kind == "number":
        return isinstance(value, (int, float)) and value == float(fact.value)
    if fact.kind == "type":
        return type(value) is fact.value
    if fact.kind in ("function", "object"):
        return value is fact.value
    if fact.kind == "method":
        return getattr(value, "__func__", None) is fact.value
    if fact.kind == "partial":
        return _is_partial(value, *fact.value)
    # Without the type a True would pass for 1.
    return type(value) is type(fact.value) and value == fact.value


def _is_partial(value: Any, function: Any, arguments: tuple[Any, ...], options: Any) -> bool:
    if not isinstance(value, partial) or value.func is not function:
        return False
    # What the arguments are is not traced: swapping them alone, after attach(), is left to eager.
    if torch.compiler.is_compiling():
        return True
    return value.args == arguments and tuple(value.keywords.items()) == options


def is_current(module: nn.Module, translation: Translation) -> bool:
    """Return whether every fact of ``translation`` still describes ``module``."""
    return all(holds(module, fact) for fact in translation.facts)


def changed(module: nn.Module, translation: Translation) -> str:
    """Return the names of the facts of ``translation`` that no longer describe ``module``."""
    return ", ".join(str(fact) for fact in translation.facts if not holds(module, fact))


def weights_of(module: nn.Module, translation: Translation) -> ExpertWeights:
    """Return the parameters of ``module`` as ``ExpertWeights``: views of the same memory.

    The scale of a post-expert norm is the one tensor that is computed, ``1 + weight``.
    """
    first = "gate_up_proj" if translation.activation.gated else "up_proj"
    gate_up, down = getattr(module, first), module.down_proj
    assert isinstance(down, Tensor)
    if translation.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    vectors = _vectors_of(module, translation)
    return ExpertWeights(gate_up=gate_up, down=down, layout=translation.layout, **vectors)


def packed_weights_of(module: nn.Module, translation: Translation) -> QuantizedWeights:
    """Return the parameters of a module whose matrices are packed, its biases beside them."""
    held: QuantizedWeights = getattr(module, PACKED).weights
    return replace(held, **_vectors_of(module, translation))


def _vectors_of(module: nn.Module, translation: Translation) -> dict[str, Any]:
    """Return what the parameters hold besides the matrices and their layout."""
    first = "gate_up_proj" if translation.activation.gated else "up_proj"
    biased = translation.biased
    scale: Tensor | None = None
    if translation.norm is not None:
        weight = read(module, ("post_expert_norm", "weight"))
        scale = 1.0 + weight if translation.norm_centered else weight
    return {
        "gate_up_bias": getattr(module, first + "_bias") if biased else None,
        "down_bias": module.down_proj_bias if biased else None,
        "norm": translation.norm,
        "norm_scale": scale,
    }

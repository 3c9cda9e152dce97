"""The layers of a model, from Megatron-LM's arguments or a ``TransformerConfig``.

=====================================  =====================================
Megatron-LM                            samebits
=====================================  =====================================
``activation_func``, ``--swiglu`` …    ``Activation.kind``
``gated_linear_unit``                  ``Activation.gated``
``activation_func_clamp_value``        ``Activation.limit`` ("pre")
``glu_linear_offset``                  ``Activation.linear_offset``
``quick_gelu``                         ``Activation.alpha`` = 1.702
``moe_mlp_glu_interleave_size``        ``Layout.interleave``
``moe_apply_probs_on_input``           ``ProbPlacement.FC1_INPUT``
neither                                ``ProbPlacement.FC2_INPUT``
``moe_router_*``                       ``RoutingRule``
``moe_latent_size``                    ``LayerSpec.latent_size``
=====================================  =====================================
"""

from collections.abc import Mapping
from typing import Any

import torch

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.kinds import activation_of
from samebits.integrations.configs.spec import LayerSpec, SharedSpec
from samebits.problem import ProbPlacement
from samebits.routing import RoutingRule
from samebits.rule import Score
from samebits.weights import Layout

_SCORES: Mapping[str, Score] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrt_softplus",
}
# Command-line switches, and the function of the gate that each selects.
_SWITCHES = {"swiglu": "silu", "quick_geglu": "quick_gelu", "squared_relu": "squared_relu"}
_GATED_SWITCHES = ("swiglu", "quick_geglu")
_NOT_OF_EXPERTS = (
    "qk_clip_alpha",
    "rotary_interleaved",
    "dsa_indexer_rope_interleaved",
    "wgrad_deferral_limit",
    "moe_router_topk_limited_devices",
)


def from_megatron_args(args: Any) -> dict[int, LayerSpec]:
    """Return the mixture-of-experts layers of a model, by their index; dense layers are absent.

    Args:
        args: Megatron-LM's parsed arguments, a ``TransformerConfig``, or a dict of either's fields.

    Returns:
        Layer index → specification.

    Raises:
        TypeError: ``args`` has no fields.
        ValueError: A field is missing.
        UnsupportedError: There is an option that samebits does not have, or one that nobody reads.

    Determinism: a function of the arguments.
    """
    fields = fields_of(args)
    layers = int(fields.get("num_layers"))
    activation, rule = megatron_activation(fields), _rule(fields)
    spec = LayerSpec(
        hidden_size=int(fields.get("hidden_size")),
        intermediate_size=int(fields.get("moe_ffn_hidden_size", default=0))
        or int(fields.get("ffn_hidden_size")),
        num_experts=int(fields.get("num_moe_experts", "num_experts")),
        activation=activation,
        rule=rule,
        placement=megatron_placement(fields, rule.topk),
        layout=megatron_layout(fields, "moe_mlp_glu_interleave_size", activation),
        biased=bool(fields.get("add_bias_linear", default=False)),
        selection_bias=bool(fields.get("moe_router_enable_expert_bias", default=False)),
        shared=_shared(fields, activation),
        latent_size=fields.get("moe_latent_size", default=None),
    )
    fields.refuse("moe_input_jitter_eps", "is noise on the router's input, which samebits has not")
    fields.refuse_unread()
    return dict.fromkeys(_sparse(fields, layers), spec)


def fields_of(args: Any) -> Fields:
    """Return the fields of arguments, of a configuration, or of a dict.

    Raises:
        TypeError: ``args`` has no fields.

    Determinism: a function of its argument.
    """
    fields = Fields(_values(args), "the Megatron-LM configuration")
    fields.elsewhere(*_NOT_OF_EXPERTS)
    return fields


def megatron_activation(fields: Fields) -> Activation:
    """Return the function of the routed experts.

    Raises:
        UnsupportedError: Megatron-LM's function is none of this library's.

    Determinism: a function of the configuration.
    """
    function = fields.get("activation_func", default=None)
    on = [name for name in _SWITCHES if fields.get(name, default=False)]
    if len(on) > 1:
        raise ValueError(must(on[0], f"be off with {on[1]}", True))
    if function is None:
        name = _SWITCHES[on[0]] if on else "gelu"
        gated = bool(on) and on[0] in _GATED_SWITCHES
    else:
        name, gated = _name(function), bool(fields.get("gated_linear_unit", default=False))
    limit = fields.get("activation_func_clamp_value", default=None)
    offset = float(fields.get("glu_linear_offset", default=0.0))
    return activation_of(name, gated=gated, limit=limit, linear_offset=offset)


def _values(args: Any) -> Mapping[str, Any]:
    if isinstance(args, Mapping):
        return args
    if not hasattr(args, "__dict__"):
        raise TypeError(must("args", "be arguments, a configuration or a dict", repr(args)))
    values: Mapping[str, Any] = vars(args)
    return values


def _name(function: Any) -> str:
    known = {torch.nn.functional.silu: "silu", torch.nn.functional.gelu: "gelu"}
    return known.get(function) or str(getattr(function, "__name__", function))


def megatron_layout(fields: Fields, name: str, activation: Activation) -> Layout:
    """Return the layout that the field ``name`` says.

    Determinism: a function of the configuration.
    """
    size = fields.get(name, default=None)
    if size is not None and not activation.gated:
        raise ValueError(must(name, "be None without a gate", size))
    return Layout(interleave=size)


def megatron_placement(fields: Fields, topk: int) -> ProbPlacement:
    """Return where the probability is multiplied in; on the input with K = 1 only.

    Determinism: a function of the configuration.
    """
    if not fields.get("moe_apply_probs_on_input", default=False):
        return ProbPlacement.FC2_INPUT
    if topk != 1:
        raise ValueError(must("moe_router_topk", "be 1 with moe_apply_probs_on_input", topk))
    return ProbPlacement.FC1_INPUT


def _rule(fields: Fields) -> RoutingRule:
    topk = int(fields.get("moe_router_topk"))
    score = fields.get("moe_router_score_function", default="softmax")
    if score not in _SCORES:
        raise UnsupportedError(
            must("moe_router_score_function", f"be one of {', '.join(_SCORES)}", score)
        )
    groups = int(fields.get("moe_router_num_groups", default=0) or 0)
    kept = int(fields.get("moe_router_group_topk", default=0) or 0)
    grouped = groups > 1 and kept > 0
    # Its softmax over the chosen is the default; sigmoid scores are renormalised for K > 1.
    chosen = score == "softmax" and not fields.get("moe_router_pre_softmax", default=False)
    normed = score != "softmax" and topk > 1
    return RoutingRule(
        topk=topk,
        score=_SCORES[score],
        topk_first=chosen,
        groups=groups if grouped else 1,
        topk_groups=kept if grouped else 1,
        group_topk=topk // kept if grouped else 2,
        renormalize=normed,
        renormalize_eps=1e-20 if normed else 0.0,
        scaling_factor=float(fields.get("moe_router_topk_scaling_factor", default=0.0) or 1.0),
    )


def _shared(fields: Fields, activation: Activation) -> SharedSpec | None:
    size = fields.get("moe_shared_expert_intermediate_size", default=None)
    layout = megatron_layout(fields, "moe_shared_expert_glu_interleave_size", activation)
    gate = bool(fields.get("moe_shared_expert_gate", default=False))
    if not size:
        return None
    return SharedSpec(intermediate_size=int(size), activation=activation, layout=layout, gate=gate)


def _sparse(fields: Fields, layers: int) -> tuple[int, ...]:
    frequency = fields.get("moe_layer_freq", default=1)
    if isinstance(frequency, int):
        return tuple(range(0, layers, frequency))
    if isinstance(frequency, str):
        raise TypeError(must("moe_layer_freq", "be an int or a list, already parsed", frequency))
    if len(frequency) != layers:
        rule = f"hold one number for each of {layers} layers"
        raise ValueError(must("moe_layer_freq", rule, f"{len(frequency)} numbers"))
    return tuple(i for i, sparse in enumerate(frequency) if sparse)

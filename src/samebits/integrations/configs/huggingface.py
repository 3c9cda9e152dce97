"""The layers of a model, from its transformers configuration or its ``config.json``.

Nothing is imported from transformers, and no model is built: this also reads what a class of
transformers ignores (Ling-3's limits). What its code computes is ``problems_of_config``'s question.
"""

from collections.abc import Mapping
from typing import Any

from samebits.errors import UnsupportedError, must, unknown
from samebits.integrations.configs.families import FAMILIES, MODEL_TYPES, REFUSED
from samebits.integrations.configs.family import Family
from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.readers import experts_of
from samebits.integrations.configs.spec import LayerSpec


def from_hf_config(config: Any) -> dict[int, LayerSpec]:
    """Return the mixture-of-experts layers of a model, by their index; dense layers are absent.

    0 or None in a per-layer list of limits means "off", as in the models that have such lists. A
    field that looks like an option of the experts and is not read for this model raises, so that
    none is dropped.

    Args:
        config: A configuration object of transformers, or the content of a ``config.json``; of a
            model with several parts, the text part is taken.

    Returns:
        Layer index → specification. The placement is transformers' (the output of the experts, or
        Llama-4's input): a trainer that multiplies elsewhere says so with ``dataclasses.replace``.

    Raises:
        TypeError: ``config`` is neither.
        ValueError: A field is missing, or two names of one field disagree.
        UnsupportedError: The model type is not known, or the model has an option that is not; the
            message names it.

    Determinism: a function of the configuration.
    """
    values = _values(config)
    name = str(values.get("model_type"))
    if name in REFUSED:
        raise UnsupportedError(f"the layers of {name} are none of this library's: {REFUSED[name]}")
    if name not in MODEL_TYPES:
        raise UnsupportedError(unknown("model type", name, MODEL_TYPES))
    family = FAMILIES[MODEL_TYPES[name]]
    fields = Fields(values, f"the configuration of {name}")
    fields.elsewhere(*family.elsewhere)
    layers = family.layers(fields)
    sparse = family.sparse(fields, layers)
    specs = {layer: _layer(family, fields, layer, layers) for layer in sparse}
    fields.refuse_unread()
    return specs


def _values(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        values: Mapping[str, Any] = config
    elif hasattr(config, "to_dict"):
        values = config.to_dict()
    else:
        raise TypeError(must("config", "be a configuration or a dict", type(config).__name__))
    text = values.get("text_config")
    values = text if isinstance(text, Mapping) else values
    inner = values.get("ffn_config")  # DBRX keeps its experts there, with an H of their own
    if not isinstance(inner, Mapping):
        return values
    return {**values, **{k: v for k, v in inner.items() if k not in ("model_type", "hidden_size")}}


def _layer(family: Family, fields: Fields, layer: int, layers: int) -> LayerSpec:
    return LayerSpec(
        hidden_size=int(fields.get(family.hidden)),
        intermediate_size=int(fields.get(*family.columns)),
        num_experts=experts_of(fields),
        activation=family.activation(fields, layer, layers),
        rule=family.rule(fields),
        placement=family.placement,
        layout=family.layout,
        orientation=family.orientation,
        biased=family.biased,
        router_bias=family.router_bias,
        selection_bias=family.selection_bias,
        shared=family.shared(fields, layer, layers),
        identity_experts=family.identity_experts(fields),
        latent_size=None if family.latent is None else fields.get(family.latent, default=None),
        routed_scaling=family.routed_scaling(fields),
        beyond=family.beyond(fields, layer),
    )

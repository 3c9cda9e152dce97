"""What the configurations of transformers' models say of their layers, one reader per spelling.

Each reads ``Fields``; a row of ``FAMILIES`` puts some together.
"""

from collections.abc import Callable, Mapping

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.integrations.configs.fields import Fields, existing
from samebits.integrations.configs.kinds import activation_of
from samebits.integrations.configs.spec import SharedSpec
from samebits.routing import RoutingRule
from samebits.rule import Score

# (fields, layer, number of layers) -> the function of that layer's experts.
OfLayer = Callable[[Fields, int, int], Activation]
SharedOfLayer = Callable[[Fields, int, int], SharedSpec | None]
# (fields, number of layers) -> those that have experts.
Layers = Callable[[Fields, int], tuple[int, ...]]
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
# DeepSeek-V3's, and of those that followed it.
_EPS = 1e-20
_SCORES: Mapping[str, Score] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrt_softplus",
}


def experts_of(fields: Fields) -> int:
    """Return E."""
    return int(fields.get(*_EXPERTS))


def topk_of(fields: Fields) -> int:
    """Return K."""
    return int(fields.get(*_TOPK))


def plain(fields: Fields, layer: int, layers: int) -> Activation:
    """Return the function that ``hidden_act`` names."""
    return activation_of(fields.get("hidden_act", "hidden_activation"))


def pre_clamped(fields: Fields, layer: int, layers: int) -> Activation:
    """Return it with ``swiglu_limit`` before the activation."""
    return activation_of(
        fields.get("hidden_act"), limit=fields.limit("swiglu_limit", layer, layers)
    )


def post_clamped(field: str) -> OfLayer:
    """Return a reader of a limit behind the activation, or of one for each layer."""

    def of_layer(fields: Fields, layer: int, layers: int) -> Activation:
        return activation_of(
            fields.get("hidden_act"), limit=fields.limit(field, layer, layers), position="post"
        )

    return of_layer


def plain_with_offset(fields: Fields, layer: int, layers: int) -> Activation:
    """Return gpt-oss' function: no field holds its offset of 1, nor at first its slope."""
    named = fields.get("hidden_act", default="silu")
    if named not in ("silu", "swigluoai"):
        raise UnsupportedError(must("hidden_act", "be silu or swigluoai in this family", named))
    return Activation(
        alpha=float(fields.get("swiglu_alpha", default=1.702)),
        limit=fields.limit("swiglu_limit", layer, layers),
        linear_offset=1.0,
    )


def softmax(fields: Fields) -> RoutingRule:
    """Return softmax over all, then renormalised."""
    return RoutingRule(topk=topk_of(fields), renormalize=True)


def softmax_if_normed(fields: Fields) -> RoutingRule:
    """Return softmax over all, renormalised where ``norm_topk_prob`` says so."""
    normed = fields.get("norm_topk_prob", default=False)
    return RoutingRule(topk=topk_of(fields), renormalize=bool(normed))


def chosen_softmax(fields: Fields) -> RoutingRule:
    """Return softmax over the chosen logits."""
    return RoutingRule(topk=topk_of(fields), topk_first=True)


def chosen_sigmoid(fields: Fields) -> RoutingRule:
    """Return the sigmoid of the chosen logits."""
    return RoutingRule(topk=topk_of(fields), score="sigmoid", topk_first=True)


def sigmoid(fields: Fields) -> RoutingRule:
    """Return sigmoids, renormalised."""
    return RoutingRule(topk=topk_of(fields), score="sigmoid", renormalize=True)


def scaled_sigmoid(fields: Fields) -> RoutingRule:
    """Return sigmoids, renormalised and scaled."""
    return RoutingRule(
        topk=topk_of(fields),
        score="sigmoid",
        renormalize=True,
        renormalize_eps=_EPS,
        scaling_factor=float(fields.get("router_scaling_factor")),
    )


def grouped_sigmoid(fields: Fields) -> RoutingRule:
    """Return DeepSeek-V3's rule: a group ranks by the sum of its best two."""
    for name, fixed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        value = fields.get(name, default=fixed)
        if value != fixed:
            raise UnsupportedError(must(name, f"be {fixed} in this family", value))
    normed = bool(fields.get("norm_topk_prob", "moe_renormalize", default=True))
    groups = int(fields.get("n_group", "num_expert_group", default=1))
    return RoutingRule(
        topk=topk_of(fields),
        score="sigmoid",
        groups=groups,
        topk_groups=int(fields.get("topk_group", default=1)) if groups > 1 else 1,
        renormalize=normed,
        renormalize_eps=_EPS if normed else 0.0,
        scaling_factor=float(fields.get("routed_scaling_factor", default=1.0)),
    )


def grouped_softmax(fields: Fields) -> RoutingRule:
    """Return DeepSeek-V2's rule: a group ranks by its best; probabilities are not renormalised."""
    fields.refuse("norm_topk_prob", "is not what transformers' DeepSeek-V2 computes")
    method = fields.get("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(must("topk_method", "be greedy or group_limited_greedy", method))
    groups = int(fields.get("n_group", default=1)) if method == "group_limited_greedy" else 1
    return RoutingRule(
        topk=topk_of(fields),
        groups=groups,
        topk_groups=int(fields.get("topk_group", default=1)) if groups > 1 else 1,
        group_topk=1 if groups > 1 else 2,
        scaling_factor=float(fields.get("routed_scaling_factor", default=1.0)),
    )


def scored_by_field(fields: Fields) -> RoutingRule:
    """Return DeepSeek-V4's rule: the score function is a field."""
    if not fields.get("norm_topk_prob", default=True):
        raise UnsupportedError(must("norm_topk_prob", "be True in this family", False))
    score = fields.get("scoring_func", default="sqrtsoftplus")
    if score not in _SCORES:
        raise UnsupportedError(must("scoring_func", f"be one of {', '.join(_SCORES)}", score))
    return RoutingRule(
        topk=topk_of(fields),
        score=_SCORES[score],
        renormalize=True,
        renormalize_eps=_EPS,
        scaling_factor=float(fields.get("routed_scaling_factor", default=1.0)),
    )


def scaled_softmax(fields: Fields) -> RoutingRule:
    """Return softmax over all, scaled."""
    factor = float(fields.get("routed_scaling_factor", default=1.0))
    return RoutingRule(topk=topk_of(fields), scaling_factor=factor)


def every_layer(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return all layers."""
    return tuple(range(layers))


def stepped(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return every n-th layer, without those listed as dense."""
    step = int(fields.get("decoder_sparse_step", default=1))
    dense = set(fields.get("mlp_only_layers", default=()))
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def behind_dense(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers behind the first dense ones."""
    return tuple(range(int(fields.get("first_k_dense_replace", default=0)), layers))


def typed(default: Layers) -> Layers:
    """Return a reader of a list of layer types; without one, ``default`` reads."""

    def sparse(fields: Fields, layers: int) -> tuple[int, ...]:
        types = fields.get("mlp_layer_types", default=None)
        if types is None:
            return default(fields, layers)
        return existing(layers, (i for i, kind in enumerate(types) if kind != "dense"))

    return sparse


def listed(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers that Step lists; its models have three dense ones without a list."""
    listed = fields.get("moe_layers_enum", default=None)
    if listed is None:
        return tuple(range(3, layers))
    items = listed.split(",") if isinstance(listed, str) else listed
    return existing(layers, (int(item) for item in items))


def interleaved_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return Llama-4's layers, listed or every n-th."""
    step = int(fields.get("interleave_moe_layer_step", default=1))
    listed = fields.get("moe_layers", default=None)
    return existing(layers, range(step - 1, layers, step) if listed is None else listed)


def behind_one(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return every layer but the first."""
    return tuple(range(1, layers))


def counted_shared(activation: OfLayer, *names: str) -> SharedOfLayer:
    """Return a reader of shared experts that are a number of routed sizes."""

    def shared(fields: Fields, layer: int, layers: int) -> SharedSpec | None:
        count = int(fields.get(*(names or ("n_shared_experts", "num_shared_experts")), default=0))
        if not count:
            return None
        size = count * int(fields.get("moe_intermediate_size"))
        return SharedSpec(intermediate_size=size, activation=activation(fields, layer, layers))

    return shared


def sized_shared(activation: OfLayer, name: str, *, gate: bool = False) -> SharedOfLayer:
    """Return a reader of one shared expert with a size of its own."""

    def shared(fields: Fields, layer: int, layers: int) -> SharedSpec | None:
        size = int(fields.get(name, default=0))
        if not size:
            return None
        function = activation(fields, layer, layers)
        return SharedSpec(intermediate_size=size, activation=function, gate=gate)

    return shared


def hash_routing(fields: Fields, layer: int) -> str | None:
    """Say which of DeepSeek-V4's layers choose by token id."""
    types = fields.get("mlp_layer_types", default=None)
    first = int(fields.get("num_hash_layers", default=3)) if types is None else 0
    hashed = layer < first if types is None else types[layer] == "hash_moe"
    return "its choice is a table of token ids (hash routing)" if hashed else None


def gemma_router(fields: Fields, layer: int) -> str | None:
    """Say what Gemma's router does besides."""
    return "its router normalises its input and scales the probabilities of each expert"

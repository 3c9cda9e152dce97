"""How the families of transformers route: readers of ``RoutingRule``, one for each spelling."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from samebits.errors import UnsupportedError, must
from samebits.integrations.configs.fields import Fields
from samebits.integrations.configs.readers import experts_of, topk_of
from samebits.routing import RoutingRule
from samebits.rule import Score

Rule = Callable[[Fields], RoutingRule]
# DeepSeek-V3's, and of those that followed it.
_EPS = 1e-20
_SCORES: Mapping[str, Score] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrt_softplus",
}


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


def sigmoid_if_normed(fields: Fields) -> RoutingRule:
    """Return sigmoids, renormalised where ``norm_topk_prob`` says so."""
    normed = bool(fields.get("norm_topk_prob", default=False))
    return RoutingRule(topk=topk_of(fields), score="sigmoid", renormalize=normed)


def chosen_sigmoid_if_normed(fields: Fields) -> RoutingRule:
    """Return the sigmoid of the chosen logits, renormalised where ``norm_topk_prob`` says so."""
    return replace(sigmoid_if_normed(fields), topk_first=True)


def scaled_sigmoid(factor: str, eps: float = _EPS) -> Rule:
    """Return a reader of sigmoids, renormalised and scaled by the field ``factor``."""

    def rule(fields: Fields) -> RoutingRule:
        score = fields.get("scoring_func", default="sigmoid")
        if score != "sigmoid":
            raise UnsupportedError(must("scoring_func", "be sigmoid in this family", score))
        return RoutingRule(
            topk=topk_of(fields),
            score="sigmoid",
            renormalize=True,
            renormalize_eps=eps,
            scaling_factor=float(fields.get(factor, default=1.0)),
        )

    return rule


def liquid(fields: Fields) -> RoutingRule:
    """Return LFM-2's rule: sigmoids, with an eps of its own."""
    if not fields.get("use_expert_bias", default=True):
        raise UnsupportedError(must("use_expert_bias", "be True in this family", False))
    normed = bool(fields.get("norm_topk_prob", default=True))
    return RoutingRule(
        topk=topk_of(fields),
        score="sigmoid",
        renormalize=normed,
        renormalize_eps=1e-6 if normed else 0.0,
        scaling_factor=float(fields.get("routed_scaling_factor", default=1.0)),
    )


def soft_capped_sigmoid(fields: Fields) -> RoutingRule:
    """Return Laguna's rule: sigmoids of logits that a soft cap may bound; 0 is off there."""
    fields.refuse(
        "moe_apply_router_weight_on_input", "is refused by transformers' own code, and untested"
    )
    cap = float(fields.get("moe_router_logit_softcapping", default=0.0))
    return replace(sigmoid(fields), softcap=cap or None)


def cohere(fields: Fields) -> RoutingRule:
    """Return Cohere's rule: the score function is a field, and works on the chosen logits."""
    name = fields.get("expert_selection_fn", default="softmax")
    if name not in ("softmax", "sigmoid"):
        raise UnsupportedError(must("expert_selection_fn", "be softmax or sigmoid", name))
    return chosen_softmax(fields) if name == "softmax" else chosen_sigmoid_if_normed(fields)


def softmax_from(least: str) -> Rule:
    """Return a reader of softmax, renormalised by a sum that is at least the field ``least``."""

    def rule(fields: Fields) -> RoutingRule:
        smallest, number = float(fields.get(least, default=0.0)), experts_of(fields)
        # With a selection bias any K experts may be chosen.
        if smallest > 1e-6:
            raise UnsupportedError(must(least, f"not bind with {number} experts", smallest))
        fields.refuse("use_bias", "gives the shared expert biases, which samebits.nn has not")
        return softmax(fields)

    return rule


def split_softmax(fields: Fields) -> RoutingRule:
    """Return the privacy filter's rule: divided by K here, multiplied by K behind the experts."""
    return replace(chosen_softmax(fields), scaling_factor=1.0 / topk_of(fields))


def softmax_if_norm(fields: Fields) -> RoutingRule:
    """Return DBRX's rule: divided by the p-norm that a field names, or not at all."""
    fields.refuse("moe_jitter_eps", "is noise on the router's input, which samebits has not")
    norm = fields.get("moe_normalize_expert_weights", default=None)
    if norm not in (None, 1):
        raise UnsupportedError(must("moe_normalize_expert_weights", "be None or 1", norm))
    return RoutingRule(topk=topk_of(fields), renormalize=norm is not None)


def without_noise(rule: Rule, field: str) -> Rule:
    """Return ``rule``, for models whose noise ``field`` is off."""

    def read(fields: Fields) -> RoutingRule:
        fields.refuse(field, "is noise on the router's input, which samebits has not")
        return rule(fields)

    return read


def unscaled(rule: Rule) -> Rule:
    """Return ``rule`` without its factor, which the family multiplies behind the experts."""
    return lambda fields: replace(rule(fields), scaling_factor=1.0)


def grouped_softmax_sums(fields: Fields) -> RoutingRule:
    """Return Mistral-4's rule: softmax, and groups that rank by the sum of their best two."""
    return replace(grouped_sigmoid(fields), score="softmax")


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

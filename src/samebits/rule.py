"""How a router's logits become expert ids and probabilities: one frozen rule, and its operators.

With ``s = score(softcap(logits))`` over all N experts and ``b`` the selection bias::

    topk_ids   = the topk experts with the largest s + b, ties to the lowest id
    topk_probs = s[topk_ids]                       # topk_first: score over the chosen logits only
    topk_probs = topk_probs / (sum + renormalize_eps) * scaling_factor

Compiled code reaches this through operators that take the rule as a string: a token must be routed
alike in eager and compiled code, and a compiler's own exp or division has other bits; nor may a
Python float go stale in a graph.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.arguments import (
    Reader,
    read_bool,
    read_options,
    require_bool,
    require_int,
    require_name,
    require_number,
)
from samebits.autograd import laid_out, recording
from samebits.errors import must

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrt_softplus")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """Describe how logits become ids and probabilities; see ``Routing.from_logits``.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is outside its range, or the others leave it without effect.
    """

    # Experts chosen per token, K >= 1.
    topk: int
    # Score function of a logit, over all N experts.
    score: Score = "softmax"
    # First bound logits by softcap * tanh(logits / softcap); finite, > 0; None is off. 30 is Grok.
    softcap: float | None = None
    # True: choose by logits first and score only the K chosen (gpt-oss, Granite).
    topk_first: bool = False
    # Experts are cut into this many equal groups; 1 means no grouping.
    groups: int = 1
    # Groups kept per token, 1 … groups.
    topk_groups: int = 1
    # Experts whose scores are summed to rank a group: 2 is DeepSeek-V3, 1 (the maximum) is
    # DeepSeek-V2. Has a meaning with groups > 1 only.
    group_topk: int = 2
    # Divide the K probabilities by their sum.
    renormalize: bool = False
    # Added to that sum; finite, >= 0. 1e-20 is DeepSeek-V3.
    renormalize_eps: float = 0.0
    # Multiplied into the probabilities last; finite, > 0. 2.5 is DeepSeek-V3.
    scaling_factor: float = 1.0
    # Canonical spelling, for example "topk=8,score=sigmoid,renormalize=True".
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_name("score", self.score, SCORES)
        for name in ("topk", "groups", "topk_groups", "group_topk"):
            require_int(name, getattr(self, name), minimum=1)
        for name in ("topk_first", "renormalize"):
            require_bool(name, getattr(self, name))
        eps = require_number("renormalize_eps", self.renormalize_eps, least=0.0)
        object.__setattr__(self, "renormalize_eps", eps)
        for name in ("softcap", "scaling_factor"):
            value = getattr(self, name)
            if value is not None or name != "softcap":
                object.__setattr__(self, name, require_number(name, value, above=0.0))
        self._refuse_unused()
        options = ((f, getattr(self, f.name)) for f in fields(self) if f.init)
        spelled = (f"{f.name}={value}" for f, value in options if value != f.default)
        object.__setattr__(self, "key", ",".join(spelled))

    def _refuse_unused(self) -> None:
        if self.topk_groups > self.groups:
            raise ValueError(must("topk_groups", f"be <= groups = {self.groups}", self.topk_groups))
        if self.topk_first and self.groups > 1:
            raise ValueError(must("groups", "be 1 with topk_first", self.groups))
        if self.groups == 1 and self.group_topk != 2:
            rule = "be 2 without groups, which alone use it"
            raise ValueError(must("group_topk", rule, self.group_topk))
        if not self.renormalize and self.renormalize_eps != 0.0:
            rule = "be 0 without renormalize, which alone uses it"
            raise ValueError(must("renormalize_eps", rule, self.renormalize_eps))

    def __str__(self) -> str:
        return self.key

    @staticmethod
    def parse(key: str) -> "RoutingRule":
        """Return the rule that ``key`` spells; the inverse of ``RoutingRule.key``.

        Raises:
            ValueError: ``key`` is not of the form ``topk=8,option=value,…``.
        """
        return _parse(key)

    def check(self, num_experts: int) -> None:
        """Raise ``ValueError`` unless the rule can choose from ``num_experts`` experts."""
        if num_experts % self.groups:
            raise ValueError(must("groups", f"divide N = {num_experts}", self.groups))
        per_group = num_experts // self.groups
        if self.groups > 1 and self.group_topk > per_group:
            limit = f"be <= experts per group = {per_group}"
            raise ValueError(must("group_topk", limit, self.group_topk))
        choosable = per_group * self.topk_groups
        if self.topk > choosable:
            rule = f"be <= {choosable}, the experts to choose from"
            raise ValueError(must("topk", rule, self.topk))


@lru_cache(maxsize=1024)
def _parse(key: str) -> RoutingRule:
    readers: dict[str, Reader] = dict.fromkeys(("topk", "groups", "topk_groups", "group_topk"), int)
    readers |= dict.fromkeys(("softcap", "renormalize_eps", "scaling_factor"), float)
    readers |= dict.fromkeys(("topk_first", "renormalize"), read_bool)
    readers["score"] = str
    options = read_options("routing option", key.split(","), readers)
    if "topk" not in options:
        raise ValueError(must("key", "hold topk", repr(key)))
    return RoutingRule(**options)


def score(logits: Tensor, kind: Score) -> Tensor:
    """Return the score of each logit: softmax over the last dimension, sigmoid or √softplus.

    Determinism: bitwise repeatable; each row independent of the others.
    """
    if kind == "softmax":
        return torch.softmax(logits, -1)
    # torch's own sigmoid and softplus give an element other bits on CPU when it falls into the tail
    # of a vector loop, that is, by its place in the tensor; exp and log1p do not.
    positive = logits >= 0
    decay = torch.exp(torch.where(positive, -logits, logits))
    if kind == "sigmoid":
        return torch.where(positive, 1.0, decay) / (1.0 + decay)
    softplus = torch.log1p(decay) + torch.where(positive, logits, 0.0)
    # The slope of √ at 0 is infinite: keep off it where the softplus underflows.
    return torch.sqrt(softplus.clamp(min=torch.finfo(logits.dtype).tiny))


def widen(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Return the capped logits in fp32 (fp64 for fp64).

    Determinism: elementwise.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if rule.softcap is None else rule.softcap * torch.tanh(wide / rule.softcap)


def choose(logits: Tensor, selection_bias: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return the ids ``(T, K)`` that the rule chooses, by descending choice score.

    Determinism: bitwise repeatable; each row independent of T and of the other rows.
    """
    wide = widen(logits, rule)
    choice = wide if rule.topk_first else score(wide, rule.score)
    if selection_bias is not None:
        choice = choice + selection_bias.to(choice.dtype)
    if rule.groups > 1:
        grouped = choice.reshape(choice.shape[0], rule.groups, choice.shape[1] // rule.groups)
        ranks = grouped.topk(rule.group_topk, -1).values.sum(-1)
        kept = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : rule.topk_groups]
        mask = torch.zeros_like(ranks, dtype=torch.bool).scatter(1, kept, value=True)
        choice = torch.where(mask[..., None], grouped, float("-inf")).flatten(1)
    # A stable descending sort is the only choice that promises ties to the lowest id.
    return choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.topk].contiguous()


def probabilities(logits: Tensor, topk_ids: Tensor, rule: RoutingRule) -> Tensor:
    """Return the probabilities ``(T, K)`` of given ids; differentiable by autograd.

    Slots whose id is outside ``[0, N)`` get 0 and take no part in a normalisation.

    Determinism: bitwise repeatable; each row independent of T and of the other rows.
    """
    wide = widen(logits, rule)
    ids = topk_ids.to(torch.int64)
    kept = (ids >= 0) & (ids < logits.shape[1])
    scores = wide if rule.topk_first else score(wide, rule.score)
    probs = scores.gather(1, torch.where(kept, ids, 0))
    if rule.topk_first:
        probs = score(torch.where(kept, probs, torch.finfo(probs.dtype).min), rule.score)
    probs = torch.where(kept, probs, 0.0)
    if rule.renormalize:
        total = probs.sum(-1, keepdim=True) + rule.renormalize_eps
        probs = probs / torch.where(kept.any(-1, keepdim=True), total, 1.0)
    return probs * rule.scaling_factor if rule.scaling_factor != 1.0 else probs


torch.library.define(
    "samebits::choose_experts", "(Tensor logits, Tensor? selection_bias, str rule) -> Tensor"
)
torch.library.define(
    "samebits::topk_probs_forward", "(Tensor logits, Tensor topk_ids, str rule) -> Tensor"
)
torch.library.define(
    "samebits::topk_probs_backward",
    "(Tensor dprobs, Tensor logits, Tensor topk_ids, str rule) -> Tensor",
)


@torch.library.impl("samebits::choose_experts", "CompositeExplicitAutograd")
def _choose(logits: Tensor, selection_bias: Tensor | None, rule: str) -> Tensor:
    return choose(logits, selection_bias, _parse(rule))


@torch.library.register_fake("samebits::choose_experts")  # type: ignore[untyped-decorator]
def _choose_fake(logits: Tensor, _selection_bias: Tensor | None, rule: str) -> Tensor:
    return logits.new_empty(logits.shape[0], _parse(rule).topk, dtype=torch.int64)


@torch.library.impl("samebits::topk_probs_forward", "CompositeExplicitAutograd")
def _forward(logits: Tensor, topk_ids: Tensor, rule: str) -> Tensor:
    return probabilities(logits, topk_ids, _parse(rule))


@torch.library.register_fake("samebits::topk_probs_forward")  # type: ignore[untyped-decorator]
def _forward_fake(logits: Tensor, topk_ids: Tensor, _rule: str) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(topk_ids.shape, dtype=wide)


@torch.library.impl("samebits::topk_probs_backward", "CompositeExplicitAutograd")
def _backward(dprobs: Tensor, logits: Tensor, topk_ids: Tensor, rule: str) -> Tensor:
    leaf = logits.detach().requires_grad_()
    with recording():
        (dlogits,) = torch.autograd.grad(probabilities(leaf, topk_ids, _parse(rule)), leaf, dprobs)
    return laid_out(dlogits, logits)


@torch.library.register_fake("samebits::topk_probs_backward")  # type: ignore[untyped-decorator]
def _backward_fake(_dprobs: Tensor, logits: Tensor, _topk_ids: Tensor, _rule: str) -> Tensor:
    return torch.empty_like(logits)


class TopkProbs(torch.autograd.Function):
    """Tie the two operators of ``probabilities`` together; saves logits and ids."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, topk_ids: Tensor, rule: str) -> Tensor:
        """Return the probabilities."""
        ctx.save_for_backward(logits, topk_ids)
        ctx.rule = rule
        out: Tensor = torch.ops.samebits.topk_probs_forward(logits, topk_ids, rule)
        return out

    @staticmethod
    def backward(ctx: Any, *dprobs: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        grad = torch.ops.samebits.topk_probs_backward(dprobs[0], *ctx.saved_tensors, ctx.rule)
        return grad, None, None

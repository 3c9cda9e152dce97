"""Which experts a token goes to, with what probability, and the order in which rows are computed.

A *slot* is the flat index t*K + k of one (token, choice). A *row* is a slot's position after the
kept slots are sorted by expert, stably. For T = 3, K = 2, E = 3 and
``topk_ids = [[2, 0], [0, -1], [2, 1]]``::

    slot      0   1   2   3   4   5          slot 3 is dropped
    expert    2   0   0   -   2   1
    slots     1   2   5   0   4   -          row -> slot, the tail is filled with R = T*K
    offsets   0       2   3       5          rows of expert e: offsets[e] … offsets[e+1] - 1
    inverse   3   0   1   6   4   2          slot -> row, R for a dropped slot
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from samebits.errors import must, unknown

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sqrt_softplus")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """Describe how logits become ids and probabilities; see ``Routing.from_logits``."""

    # Experts chosen per token, K >= 1.
    topk: int
    # Score function of a logit, over all N experts.
    score: Score = "softmax"
    # True: choose by logits first and score only the K chosen (gpt-oss, Granite).
    topk_first: bool = False
    # Experts are cut into this many equal groups; 1 means no grouping.
    groups: int = 1
    # Groups kept per token, 1 … groups.
    topk_groups: int = 1
    # Experts whose scores are summed to rank a group: 2 is DeepSeek-V3, 1 (the maximum) DeepSeek-V2.
    group_topk: int = 2
    # Divide the K probabilities by their sum.
    renormalize: bool = False
    # Added to that sum; 1e-20 is DeepSeek-V3.
    renormalize_eps: float = 0.0
    # Multiplied into the probabilities last; 2.5 is DeepSeek-V3.
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ValueError(unknown("score", self.score, SCORES))
        for name in ("topk", "groups", "topk_groups", "group_topk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(must(name, "be an int", repr(value)))
            if value < 1:
                raise ValueError(must(name, "be >= 1", value))
        if self.topk_groups > self.groups:
            raise ValueError(must("topk_groups", f"be <= groups = {self.groups}", self.topk_groups))
        if self.topk_first and self.groups > 1:
            raise ValueError(must("groups", "be 1 with topk_first", self.groups))
        if not self.renormalize and self.renormalize_eps != 0.0:
            rule = "be 0 without renormalize, which alone uses it"
            raise ValueError(must("renormalize_eps", rule, self.renormalize_eps))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Hold the routing of T tokens: ids, probabilities and the number of experts they refer to.

    Raises:
        TypeError: An argument is not a tensor, or ids are not integers.
        ValueError: Shapes or devices disagree; the message names both.
    """

    # (T, K) int32 or int64; -1 and num_experts mark dropped slots, which contribute exactly 0.
    topk_ids: Tensor
    # (T, K), fp32 or the working dtype; taken as given, never renormalised.
    topk_probs: Tensor
    # N, the number of the model's experts; None means the experts of the weights.
    num_experts: int | None = None

    def __post_init__(self) -> None:
        for name in ("topk_ids", "topk_probs"):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(must(name, "be a tensor", type(value).__name__))
            if value.dim() != 2:
                raise ValueError(must(name, "have shape (T, K)", tuple(value.shape)))
        if self.topk_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(must("topk_ids", "be int32 or int64", self.topk_ids.dtype))
        if not self.topk_probs.dtype.is_floating_point:
            raise TypeError(must("topk_probs", "be a float tensor", self.topk_probs.dtype))
        if self.topk_probs.shape != self.topk_ids.shape:
            rule = f"have the shape of topk_ids {tuple(self.topk_ids.shape)}"
            raise ValueError(must("topk_probs", rule, tuple(self.topk_probs.shape)))
        if self.topk_probs.device != self.topk_ids.device:
            rule = f"be on the device of topk_ids ({self.topk_ids.device})"
            raise ValueError(must("topk_probs", rule, self.topk_probs.device))

    @staticmethod
    def from_logits(
        logits: Tensor, rule: RoutingRule, *, selection_bias: Tensor | None = None
    ) -> "Routing":
        """Choose experts by score and return them with their probabilities.

        The choice is by score (+ selection bias), ties to the lowest expert id; the probability is
        the score without the bias, then renormalised and scaled as ``rule`` says. Groups: a group
        ranks by the sum of its ``group_topk`` best choice scores; experts outside the kept groups
        are not chosen.

        Args:
            logits: ``(T, N)``, any float dtype; scored in fp32 (fp64 for fp64).
            rule: The rule.
            selection_bias: ``(N,)``, added to the score for the choice only (DeepSeek-V3's
                ``e_score_correction_bias``); gets no gradient.

        Returns:
            Ids int64 and probabilities fp32 (fp64 for fp64), both ``(T, K)``, in order of
            descending choice score; differentiable in ``logits``.

        Raises:
            ValueError: K exceeds what the rule leaves to choose from, or shapes disagree.

        Determinism: bitwise repeatable; each row independent of T and of the other rows.
        """
        if logits.dim() != 2:
            raise ValueError(must("logits", "have shape (T, N)", tuple(logits.shape)))
        experts = logits.shape[1]
        _check_sizes(rule, experts, selection_bias)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores = wide if rule.topk_first else score(wide, rule.score)
        choice = scores.detach()
        if selection_bias is not None:
            choice = choice + selection_bias.detach().to(choice.dtype)
        if rule.groups > 1:
            choice = _mask_groups(choice, rule)
        # A stable descending sort is the only choice that promises ties to the lowest id.
        topk_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.topk]
        topk_probs = scores.gather(1, topk_ids)
        if rule.topk_first:
            topk_probs = score(topk_probs, rule.score)
        if rule.renormalize:
            topk_probs = topk_probs / (topk_probs.sum(-1, keepdim=True) + rule.renormalize_eps)
        if rule.scaling_factor != 1.0:
            topk_probs = topk_probs * rule.scaling_factor
        return Routing(topk_ids, topk_probs, experts)


def score(logits: Tensor, kind: Score) -> Tensor:
    """Return the score of each logit: softmax over the last dimension, sigmoid or √softplus.

    Determinism: bitwise repeatable; each row independent of the others.
    """
    if kind == "softmax":
        return torch.softmax(logits, -1)
    if kind == "sigmoid":
        return torch.sigmoid(logits)
    return torch.sqrt(torch.nn.functional.softplus(logits))


def _check_sizes(rule: RoutingRule, experts: int, selection_bias: Tensor | None) -> None:
    if experts % rule.groups:
        raise ValueError(must("groups", f"divide N = {experts}", rule.groups))
    if rule.groups > 1 and rule.group_topk > experts // rule.groups:
        limit = f"be <= experts per group = {experts // rule.groups}"
        raise ValueError(must("group_topk", limit, rule.group_topk))
    choosable = experts // rule.groups * rule.topk_groups
    if rule.topk > choosable:
        raise ValueError(must("topk", f"be <= {choosable}, the experts to choose from", rule.topk))
    if selection_bias is not None and tuple(selection_bias.shape) != (experts,):
        raise ValueError(
            must("selection_bias", f"have shape ({experts},)", tuple(selection_bias.shape))
        )


def _mask_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    grouped = choice.unflatten(1, (rule.groups, -1))
    group_score = grouped.topk(rule.group_topk, -1).values.sum(-1)
    kept = group_score.sort(dim=-1, descending=True, stable=True).indices[:, : rule.topk_groups]
    mask = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, kept, value=True)
    return torch.where(mask[..., None], grouped, float("-inf")).flatten(1)


class Permutation(NamedTuple):
    """Rows sorted by expert, with static shapes (module docstring).

    Invariants: ``slots[:kept]`` lists the kept slots, by expert, ties in slot order (so the rows of
    a token ascend with its expert ids); ``offsets`` is monotone with ``offsets[E] = kept``;
    ``inverse[slots[row]] = row``.
    """

    # (R,) int64, row -> slot; R in the tail of rows that do not exist.
    slots: Tensor
    # (E + 1,) int64, first row of each expert held here; offsets[E] counts the rows.
    offsets: Tensor
    # (R,) int64, slot -> row; R for a dropped slot.
    inverse: Tensor

    @staticmethod
    def of(
        topk_ids: Tensor,
        num_local: int,
        *,
        expert_start: int = 0,
        num_valid_tokens: Tensor | None = None,
    ) -> "Permutation":
        """Sort the slots of ``topk_ids`` by expert, on its device, without a host sync.

        Args:
            topk_ids: ``(T, K)`` int32 or int64. Ids outside ``[expert_start, expert_start +
                num_local)`` are dropped, whatever they are.
            num_local: E, the experts held here.
            expert_start: First of them.
            num_valid_tokens: ``(1,)`` int32; slots of tokens from there on are dropped.

        Returns:
            The permutation.

        Determinism: exact integers.
        """
        tokens, topk = topk_ids.shape
        total = tokens * topk
        local = topk_ids.reshape(-1).to(torch.int64) - expert_start
        kept = (local >= 0) & (local < num_local)
        if num_valid_tokens is not None:
            slot = torch.arange(total, device=topk_ids.device)
            kept = kept & (slot < num_valid_tokens.to(torch.int64) * topk)
        local = torch.where(kept, local, num_local)
        ordered, slots = local.sort(stable=True)
        bounds = torch.arange(num_local + 1, device=topk_ids.device)
        offsets = torch.searchsorted(ordered, bounds)
        rows = torch.arange(total, device=topk_ids.device)
        inverse = torch.empty_like(slots).scatter_(0, slots, rows)
        inverse = torch.where(kept, inverse, total)
        return Permutation(torch.where(rows < offsets[-1], slots, total), offsets, inverse)

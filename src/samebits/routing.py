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
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.arguments import require_int, require_type
from samebits.errors import must
from samebits.rule import RoutingRule as RoutingRule
from samebits.rule import TopkProbs

_INDICES = (torch.int32, torch.int64)


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
        if self.topk_ids.dtype not in _INDICES:
            raise TypeError(must("topk_ids", "be int32 or int64", self.topk_ids.dtype))
        if not self.topk_probs.dtype.is_floating_point:
            raise TypeError(must("topk_probs", "be a float tensor", self.topk_probs.dtype))
        if self.topk_probs.shape != self.topk_ids.shape:
            rule = f"have the shape of topk_ids {tuple(self.topk_ids.shape)}"
            raise ValueError(must("topk_probs", rule, tuple(self.topk_probs.shape)))
        if self.topk_probs.device != self.topk_ids.device:
            rule = f"be on the device of topk_ids ({self.topk_ids.device})"
            raise ValueError(must("topk_probs", rule, self.topk_probs.device))
        if self.num_experts is not None:
            require_int("num_experts", self.num_experts, minimum=1)

    @staticmethod
    def from_logits(
        logits: Tensor,
        rule: RoutingRule,
        *,
        selection_bias: Tensor | None = None,
        topk_ids: Tensor | None = None,
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
            topk_ids: ``(T, K)``, a recorded choice to replay instead of choosing; only the
                probabilities are computed. Dropped slots stay dropped, with probability 0.

        Returns:
            Ids int64 (or as given) and probabilities fp32 (fp64 for fp64), both ``(T, K)``, in
            order of descending choice score (or as given); differentiable in ``logits``.

        Raises:
            TypeError: An argument has the wrong type or kind of dtype.
            ValueError: K exceeds what the rule leaves to choose from, shapes disagree, or a
                selection bias is given for a choice that is made already.

        Determinism: bitwise repeatable; each row independent of T and of the other rows; the same
        bits in compiled code.
        """
        require_type("rule", rule, RoutingRule)
        require_type("logits", logits, Tensor)
        if not logits.dtype.is_floating_point:
            raise TypeError(must("logits", "be a float tensor", logits.dtype))
        if logits.dim() != 2:
            raise ValueError(must("logits", "have shape (T, N)", tuple(logits.shape)))
        rule.check(logits.shape[1])
        if topk_ids is None:
            if selection_bias is not None:
                _check_selection_bias(selection_bias, logits)
            topk_ids = torch.ops.samebits.choose_experts(logits, selection_bias, rule.key)
        elif selection_bias is not None:
            raise ValueError(must("selection_bias", "be None with topk_ids", "a tensor"))
        else:
            _check_choice(topk_ids, logits, rule)
        if torch.is_grad_enabled() and logits.requires_grad:
            topk_probs: Tensor = TopkProbs.apply(logits, topk_ids, rule.key)  # type: ignore[no-untyped-call]
        else:
            topk_probs = torch.ops.samebits.topk_probs_forward(logits, topk_ids, rule.key)
        return Routing(topk_ids, topk_probs, logits.shape[1])


def require_ids(topk_ids: Tensor, num_experts: int) -> None:
    """Raise ``ValueError`` for an id that is no expert, where looking costs no device sync."""
    if topk_ids.device.type != "cpu" or topk_ids.numel() == 0:
        return
    low, high = (int(v) for v in topk_ids.aminmax())
    if low < -1 or high > num_experts:
        rule = f"be in [0, N) with N = {num_experts}, or -1 or N for a dropped slot"
        raise ValueError(must("topk_ids", rule, low if low < -1 else high))


def _check_choice(topk_ids: Tensor, logits: Tensor, rule: RoutingRule) -> None:
    require_type("topk_ids", topk_ids, Tensor)
    if topk_ids.dtype not in _INDICES:
        raise TypeError(must("topk_ids", "be int32 or int64", topk_ids.dtype))
    if tuple(topk_ids.shape) != (logits.shape[0], rule.topk):
        shape = f"have shape (T, K) = ({logits.shape[0]}, {rule.topk})"
        raise ValueError(must("topk_ids", shape, tuple(topk_ids.shape)))
    if topk_ids.device != logits.device:
        place = f"be on the device of logits ({logits.device})"
        raise ValueError(must("topk_ids", place, topk_ids.device))


def _check_selection_bias(selection_bias: Tensor, logits: Tensor) -> None:
    require_type("selection_bias", selection_bias, Tensor)
    if not selection_bias.dtype.is_floating_point:
        raise TypeError(must("selection_bias", "be a float tensor", selection_bias.dtype))
    if selection_bias.shape != logits.shape[1:]:
        size = f"have shape ({logits.shape[1]},)"
        raise ValueError(must("selection_bias", size, tuple(selection_bias.shape)))
    if selection_bias.device != logits.device:
        place = f"be on the device of logits ({logits.device})"
        raise ValueError(must("selection_bias", place, selection_bias.device))


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

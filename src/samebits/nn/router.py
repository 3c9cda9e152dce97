"""The router as a module: fp32 logits, row by row, and the rule that turns them into a routing."""

import warnings
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from samebits.arguments import require_bool, require_int, require_number, require_type
from samebits.errors import must
from samebits.nn.linear import project, require_floats
from samebits.routing import Routing, RoutingRule


class RouterOutput(NamedTuple):
    """What a router decides, and the logits it decided on (losses need them)."""

    routing: Routing
    # (T, N), before any soft cap; fp32, fp64 for an fp64 router.
    logits: Tensor


class Router(nn.Module):
    """Choose K of N experts for each token.

    ``logits = x · weightᵀ + bias`` in fp32 whatever the dtypes of ``x`` and ``weight``, and under
    autocast too; then ``Routing.from_logits`` by ``rule``. Logits do not depend on T or on the
    other tokens (``samebits.nn.linear``), so that a token is routed alike in training and decoding.

    Args:
        hidden_size: H.
        num_experts: N.
        rule: How logits become ids and probabilities.
        bias: Add a learned bias to the logits (gpt-oss).
        selection_bias: Add the buffer ``selection_bias`` to the scores for the choice only; see
            ``update_selection_bias``. It stays fp32 when the module is cast to a narrower dtype,
            where its small steps would be lost.
        device: Device of the parameters.
        dtype: Dtype of the parameters; None means torch's default dtype.

    Raises:
        TypeError: ``rule`` has the wrong type.
        ValueError: A size is out of range, or the rule asks for more than N experts.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        rule: RoutingRule,
        bias: bool = False,
        selection_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_type("rule", rule, RoutingRule)
        require_int("hidden_size", hidden_size, minimum=1)
        require_int("num_experts", num_experts, minimum=1)
        require_bool("bias", bias)
        require_bool("selection_bias", selection_bias)
        rule.check(num_experts)
        _warn_without_gradient(rule)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.rule = rule
        self._shares = RoutingRule(
            topk=num_experts,
            score=rule.score,
            softcap=rule.softcap,
            renormalize=rule.score != "softmax",
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight = parameter(num_experts, hidden_size)
        self.bias = parameter(num_experts) if bias else None
        empty = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("selection_bias", empty if selection_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``torch.nn.Linear`` does; set the selection bias to 0."""
        bound = self.hidden_size**-0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)
            if self.selection_bias is not None:
                self.selection_bias.zero_()

    def forward(self, x: Tensor, topk_ids: Tensor | None = None) -> RouterOutput:
        """Return the routing of each token, and its logits.

        Args:
            x: ``(T, H)``, any float dtype.
            topk_ids: ``(T, K)``, a recorded choice to replay; see ``Routing.from_logits``.

        Returns:
            ``RouterOutput(routing, logits)``; differentiable in ``x``, weight and bias.

        Raises:
            TypeError: ``x`` is no float tensor, or ``topk_ids`` no tensor of integers.
            ValueError: The shape of ``x`` or ``topk_ids`` is wrong.

        Determinism: bitwise repeatable; each row independent of T and of the other rows.
        """
        require_floats("x", x)
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(wide)
        logits = project(x.to(wide), self.weight.to(wide), bias)
        bias = self.selection_bias if topk_ids is None else None
        routing = Routing.from_logits(logits, self.rule, selection_bias=bias, topk_ids=topk_ids)
        return RouterOutput(routing, logits)

    def shares(self, logits: Tensor) -> Tensor:
        """Return each token's scores over all experts, divided by their sum; differentiable.

        Args:
            logits: ``(T, N)``, see ``RouterOutput``.

        Returns:
            ``(T, N)`` in the dtype of ``logits``.

        Determinism: bitwise repeatable; each row independent of T and of the other rows.
        """
        every = torch.arange(self.num_experts, device=logits.device).expand(logits.shape)
        return Routing.from_logits(logits, self._shares, topk_ids=every).topk_probs

    @torch.no_grad()
    def update_selection_bias(self, counts: Tensor, rate: float) -> None:
        """Move the selection bias towards balance: ``+= rate · sign(mean(counts) − counts)``.

        DeepSeek-V3's balancing without a loss. Call it once per optimizer step, with the counts of
        the whole batch, summed over all ranks.

        Args:
            counts: ``(N,)`` slots of each expert (``MoEOutput.counts``); any dtype.
            rate: Size of the step, finite, >= 0; 1e-3 is DeepSeek-V3's.

        Raises:
            TypeError: ``counts`` is no tensor, or ``rate`` no plain number.
            ValueError: There is no selection bias, ``rate`` is out of range, the shape of
                ``counts`` is wrong, or (checked on CPU) a count is not finite.

        Determinism: bitwise repeatable.
        """
        if self.selection_bias is None:
            rule = "be True in the constructor to be updated"
            raise ValueError(must("selection_bias", rule, False))
        step = require_number("rate", rate, least=0.0)
        require_type("counts", counts, Tensor)
        if tuple(counts.shape) != (self.num_experts,):
            rule = f"have shape ({self.num_experts},)"
            raise ValueError(must("counts", rule, tuple(counts.shape)))
        if counts.device.type == "cpu" and not counts.isfinite().all():
            raise ValueError(must("counts", "be finite", counts.tolist()))
        counts = counts.to(device=self.selection_bias.device, dtype=torch.float64)
        sign = torch.sign(counts.mean() - counts).to(self.selection_bias.dtype)
        self.selection_bias.add_(sign * step)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.selection_bias
        if before is None or after is None or after.dtype.itemsize >= before.dtype.itemsize:
            return self
        source = after if before.is_meta else before
        self.selection_bias = source.to(device=after.device, dtype=before.dtype)
        return self

    def extra_repr(self) -> str:
        """Return sizes, rule and options."""
        parts = [
            f"hidden_size={self.hidden_size}",
            f"num_experts={self.num_experts}",
            f"rule=({self.rule})",
        ]
        if self.bias is not None:
            parts.append("bias=True")
        if self.selection_bias is not None:
            parts.append("selection_bias=True")
        return ", ".join(parts)


def _warn_without_gradient(rule: RoutingRule) -> None:
    """Warn where the probability of the one chosen expert is 1 whatever the logits."""
    normalised = rule.renormalize or (rule.topk_first and rule.score == "softmax")
    if rule.topk == 1 and normalised:
        warnings.warn(
            "with topk=1 a renormalised probability is 1 whatever the logits, so the router gets "
            "no gradient from the output; hint: topk=1 without renormalize or topk_first",
            stacklevel=3,
        )

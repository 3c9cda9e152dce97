"""The two passes of a layer over ranks, given the way of its rows.

What travels is in the working dtype and not yet weighted: the output of an expert goes back and is
weighted and added up where its token is; in the backward the gradient of a token's output goes out
as it is, because the one-rank run rounds nothing between it and the product with ``down``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from samebits.backends.call import DIFFERENTIABLE, Call, Gradients
from samebits.backends.options import Options
from samebits.parallel.copies import combine, permute
from samebits.parallel.departure import depart, wrong_ids
from samebits.parallel.exchange import take
from samebits.parallel.held import Local
from samebits.parallel.ranks import Ranks
from samebits.parallel.route import Route
from samebits.problem import ProbPlacement

# What a rank may want of the others: a backward pass, gradients of x and of the probabilities.
BACKWARD, X, PROBS = 1, 2, 4
EVERYTHING = BACKWARD | X | PROBS


def set_out(
    call: Call, placement: ProbPlacement, ranks: Ranks, wishes: int, agreement: str
) -> tuple[Route, Tensor]:
    """Return the way of a call's rows, and the rows that arrive on it; a collective.

    Raises:
        ValueError: The ranks disagree, or an id is out of range (exact mode).
        UnsupportedError: A rank without a backward beside one that wants gradients (exact mode).

    Determinism: exact copies; products with probabilities elementwise.
    """
    leaving = depart(
        ranks,
        call.topk_ids,
        num_valid_tokens=call.num_valid_tokens,
        wishes=wishes,
        agreement=agreement,
        wrong=wrong_ids(call.topk_ids, ranks.num_experts, call.num_valid_tokens),
    )
    on_input = placement == ProbPlacement.FC1_INPUT
    with torch.no_grad():
        if ranks.transport == "window" and not on_input:
            route = leaving.route(roomy=True)
            return route, route.go_from(call.x, keep=bool(route.wishes), settled=True)
        # Before the wait for counts, which it does not need.
        probs = call.topk_probs if on_input else None
        rows = permute(call.x, leaving.metadata.inverse, leaving.topk, probs)
        route = leaving.route(roomy=True)
        # A backward needs them again.
        return route, route.go(rows, None, keep=bool(route.wishes))


@dataclass(frozen=True, eq=False)
class Exchanged:
    """The two passes, given the way of the rows."""

    route: Route
    options: Options
    local: Local

    def _arrived(self, call: Call, rows: Tensor, probs: Tensor | None) -> Call:
        """Return the call of this rank's experts on its arrivals, one expert each."""
        if probs is None:
            probs = torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
        ids = self.route.ids[:, None]
        return call._replace(x=rows, topk_ids=ids, topk_probs=probs[:, None], num_valid_tokens=None)

    def _probs(self, call: Call) -> Tensor:
        """Return the probability of each arrival; a collective."""
        return self.route.go(take(call.topk_probs.reshape(-1), self.route.slots, None), None)

    def forward(self, call: Call, rows: Tensor, *, save: bool) -> tuple[Tensor, Tensor]:
        """Return ``(out, z)`` for the arrivals ``rows``; a collective.

        Determinism: see ``parallel_experts``.
        """
        route, placed = self.route, {self.options.placement: call.topk_probs}
        on_hidden = self.options.placement == ProbPlacement.FC2_INPUT
        there = self._arrived(call, rows, self._probs(call) if on_hidden else None)
        y, z = self.local.forward(there, save=save)
        out = combine(
            route.back(y, keep=False),
            route.inverse,
            route.topk,
            placed.get(ProbPlacement.FC2_OUTPUT),
            out_dtype=self.options.out_dtype,
        )
        return self.local.whole(out), z

    def backward(
        self, call: Call, rows: Tensor, z: Tensor, dout: Tensor, wanted: dict[str, bool]
    ) -> Gradients:
        """Return the wanted gradients; a collective.

        Determinism: see ``parallel_experts``.
        """
        route, on_input = self.route, self.options.placement == ProbPlacement.FC1_INPUT
        if self.options.backend != "reference":
            dout = dout.to(call.x.dtype)
        probs = None if on_input else self._probs(call)
        if route.way is not None:
            dout = route.go_from(dout, keep=self.local.keeps)
        else:
            dout = route.go(permute(dout.contiguous(), route.inverse, route.topk), None)
        there = self._arrived(call, rows, probs)
        x_travels = bool(route.wishes & (X | PROBS if on_input else X))
        probs_travel = bool(route.wishes & PROBS) and not on_input
        local = {**wanted, "x": x_travels, "topk_probs": probs_travel}
        grads = self.local.backward(there, z, dout, [local[n] for n in DIFFERENTIABLE])
        dx, dprobs = grads.x, None
        if dx is not None:
            dx, dprobs = self._input_gradients(
                call, route.back(dx, keep=False), wanted["topk_probs"]
            )
        if grads.topk_probs is not None:
            back = route.back(grads.topk_probs)
            dprobs = take(back, route.inverse, 0.0).view(call.topk_probs.shape)
        return grads._replace(x=dx, topk_probs=dprobs)

    def _input_gradients(
        self, call: Call, rows: Tensor, want_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and, where they scaled it, of the probabilities."""
        route = self.route
        if self.options.placement != ProbPlacement.FC1_INPUT:
            return self.local.whole(combine(rows, route.inverse, route.topk)), None
        rows = self.local.whole(rows)
        on_host = call.x.device.type == "cpu" and not self.local.in_blocks
        x = call.x if want_probs and not on_host else None
        dx, dprobs = torch.ops.samebits.permute_backward(
            rows, route.inverse, call.topk_probs, x, route.topk
        )
        if want_probs and on_host:
            # Without kernels, dp is torch's own sum (CONTRACT section 5).
            wide = torch.promote_types(rows.dtype, torch.float32)
            slots = take(rows, route.inverse, 0.0).to(wide)
            tokens = call.x.repeat_interleave(route.topk, 0)
            sums = (slots * tokens).sum(-1)
            # Tokens of dropped slots may hold anything.
            dropped = route.inverse == route.inverse.shape[0]
            dprobs = sums.masked_fill(dropped, 0.0).view(call.topk_probs.shape)
        return dx, dprobs.to(call.topk_probs.dtype) if want_probs else None

"""The peers: the usual formulas in plain torch, eager and compiled, and Liger's kernel.

The activation's backward is the explicit one that trainers compile: split, clamp, one expression
for each part, masks, and the two parts concatenated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from samebits.activation import Activation

Function = Callable[..., tuple[Tensor, ...]]


def compiled(function: Function, device: str) -> Function:
    """Return ``function`` compiled whole: static in its columns, for any number of rows.

    What was compiled before is forgotten: one function over many shapes is more than torch keeps.
    On a CPU it is only traced: building C++ would take longer than all the rest of a smoke run.
    """
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    whole = torch.compile(function, fullgraph=True, backend=backend)

    def call(*inputs: Any) -> tuple[Tensor, ...]:
        for value in inputs:
            if isinstance(value, Tensor):
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return whole(*inputs)

    return call


@dataclass(frozen=True)
class Formula:
    """A gated activation written out, gate and up in halves or in pairs."""

    activation: Activation
    pairs: bool

    def _split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.pairs:
            return z[..., ::2], z[..., 1::2]
        gate, up = z.chunk(2, -1)
        return gate, up

    def _clamp(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        limit = self.activation.limit
        if limit is None:
            return gate, up
        return gate.clamp(max=limit), up.clamp(-limit, limit)

    def forward(self, z: Tensor, probs: Tensor | None) -> tuple[Tensor]:
        """Return ``(h,)``."""
        gate, up = self._clamp(*self._split(z))
        if self.activation.linear_offset:
            up = up + self.activation.linear_offset
        alpha = self.activation.alpha
        h = (silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)) * up
        return (h if probs is None else (h.float() * probs[:, None]).to(z.dtype),)

    def backward(self, dh: Tensor, z: Tensor, probs: Tensor | None) -> tuple[Tensor, ...]:
        """Return ``(dz,)``, with dp where there are probabilities."""
        alpha, limit = self.activation.alpha, self.activation.limit
        raw_gate, raw_up = self._split(z)
        gate, up = self._clamp(raw_gate, raw_up)
        up = up + self.activation.linear_offset
        scaled = dh if probs is None else (dh.float() * probs[:, None]).to(dh.dtype)
        sigmoid = torch.sigmoid(alpha * gate)
        dgate = scaled * up * sigmoid * (1 + alpha * gate * (1 - sigmoid))
        dup = scaled * gate * sigmoid
        if limit is not None:
            dgate = torch.where(raw_gate <= limit, dgate, 0.0)
            dup = torch.where(raw_up.abs() <= limit, dup, 0.0)
        if self.pairs:
            dz = torch.stack((dgate, dup), -1).flatten(-2)
        else:
            dz = torch.cat((dgate, dup), -1)
        if probs is None:
            return (dz,)
        return dz, (dh.float() * (gate * sigmoid * up).float()).sum(-1)


def liger() -> Any | None:
    """Return Liger's SwiGLU module, or None where it is not installed."""
    try:
        from liger_kernel.ops import swiglu
    except ImportError:
        return None
    return swiglu


def sort(topk_ids: Tensor, experts: int) -> tuple[Tensor, ...]:
    """Return ``(slots, offsets, inverse)`` by a stable argsort."""
    ordered, slots = topk_ids.reshape(-1).sort(stable=True)
    bounds = torch.arange(experts + 1, device=slots.device)
    offsets = torch.searchsorted(ordered, bounds).int()
    inverse = torch.empty_like(slots)
    inverse[slots] = torch.arange(slots.shape[0], device=slots.device)
    return slots.int(), offsets, inverse.int()


def gather(x: Tensor, slots: Tensor, topk: int, probs: Tensor | None) -> tuple[Tensor]:
    """Return ``(rows,)`` by indexing."""
    rows = x[slots // topk]
    if probs is not None:
        rows = (rows.float() * probs.reshape(-1)[slots][:, None]).to(x.dtype)
    return (rows,)


def combine(rows: Tensor, inverse: Tensor, topk: int, probs: Tensor | None) -> tuple[Tensor]:
    """Return ``(out,)``: index, scale, sum."""
    terms = rows[inverse].view(-1, topk, rows.shape[1]).float()
    if probs is not None:
        terms = terms * probs[..., None]
    return (terms.sum(1).to(rows.dtype),)

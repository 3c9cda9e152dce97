"""The products of a layer one by one, on either kind of device: what tensor parallelism is made of.

Everything is over rows sorted by expert, R = T * K of them; rows past ``offsets[E]`` belong to no
slot and mean nothing. ``gate_up``, its gradient and z hold gate and up as halves.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from samebits import activation as act
from samebits import env
from samebits.activation import Activation
from samebits.errors import UnsupportedError
from samebits.ops.permute import Metadata, sort_slots
from samebits.problem import DTYPE_NAMES
from samebits.weights import Layout, merge_gate_up, split_gate_up

# Columns of one sum of dp (CONTRACT section 5), and of one product on a CPU.
COLUMNS = 64
_HALVES = Layout()


class Hidden(NamedTuple):
    """Gradients behind the product with ``down``, by row."""

    # (R, 2F or F), dtype of z.
    dz: Tensor
    # (R, F), the activation times its factor, dtype of z.
    h: Tensor
    # (R, F / 64) sums of dh * h without the factor, fp32 (fp64 for fp64).
    partial: Tensor


class Stages(Protocol):
    """The products over the rows of one routing."""

    metadata: Metadata

    def product(
        self, rows: Tensor, w: Tensor, bias: Tensor | None = None, probs: Tensor | None = None
    ) -> Tensor:
        """Return ``D(rows · w[e]ᵀ + bias[e] [· p])`` for ``w`` ``(E, N, K)``; ``probs`` (T, K)."""

    def hidden(
        self, dy: Tensor, down: Tensor, z: Tensor, activation: Activation, probs: Tensor | None
    ) -> Hidden:
        """Return the gradients behind ``down`` ``(E, H, F)``; ``probs`` (T, K), factors of h."""

    def outer(self, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """Return ``Σ_r a[r] ⊗ b[r]`` over each expert's rows, as a gradient of ``like``."""

    def total(self, rows: Tensor, probs: Tensor | None, like: Tensor) -> Tensor:
        """Return the sum of each expert's rows [times p], as a gradient of ``like``."""

    def probs_gradient(
        self, partial: Tensor, dout: Tensor, down_bias: Tensor | None, topk_ids: Tensor
    ) -> Tensor:
        """Return dp ``(T, K)`` from its sums by row and, with a bias, from ``dout`` (T, H)."""


def stages_of(x: Tensor, topk_ids: Tensor, experts: int, counted: Tensor | None) -> Stages:
    """Return the stages for the device of ``x``.

    Raises:
        UnsupportedError: There are none.

    Determinism: exact integers.
    """
    if x.device.type == "cpu":
        return HostStages(x, topk_ids, experts, counted)
    if x.device.type == "cuda":
        return DeviceStages(x, topk_ids, experts, counted)
    raise UnsupportedError(f"tensor parallel experts run on cpu and cuda, not on {x.device.type}")


class HostStages:
    """Torch's products, one expert after the other, over blocks of columns of one size.

    A matrix library may add in another order for another number of columns, which here is a matter
    of the number of ranks: blocks keep that out.
    """

    def __init__(self, x: Tensor, topk_ids: Tensor, experts: int, counted: Tensor | None) -> None:
        self.metadata = sort_slots(topk_ids, experts, num_valid_tokens=counted)
        self.spans = [slice(*bounds) for bounds in pairwise(self.metadata.offsets.tolist())]
        self.kept = self.spans[-1].stop
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.topk = topk_ids.shape[1]

    def _by_row(self, probs: Tensor) -> Tensor:
        """Return ``(R, 1)``; 0 for rows of no slot."""
        by_row = torch.zeros(probs.numel(), 1, dtype=self.wide)
        by_row[: self.kept, 0] = probs.reshape(-1)[self.metadata.slots[: self.kept]].to(self.wide)
        return by_row

    def _unrounded(self, rows: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros(rows.shape[0], w.shape[1], dtype=self.wide)
        for expert, span in enumerate(self.spans):
            out[span] = _in_blocks(rows[span].to(self.wide), w[expert].to(self.wide))
        return out

    def product(
        self, rows: Tensor, w: Tensor, bias: Tensor | None = None, probs: Tensor | None = None
    ) -> Tensor:
        """See ``Stages``."""
        y = self._unrounded(rows, w)
        if bias is not None:
            factor = torch.ones(len(y), 1) if probs is None else self._by_row(probs)
            for expert, span in enumerate(self.spans):
                y[span] += bias[expert].to(self.wide) * factor[span]
        return y.to(rows.dtype)

    def hidden(
        self, dy: Tensor, down: Tensor, z: Tensor, activation: Activation, probs: Tensor | None
    ) -> Hidden:
        """See ``Stages``."""
        dh = self._unrounded(dy, down.transpose(1, 2))
        rows = z.to(self.wide)
        parts = split_gate_up(rows, _HALVES) if activation.gated else (rows, None)
        local = act.derivative(activation, *parts)
        p = torch.ones(len(z), 1) if probs is None else self._by_row(probs)
        dz = dh * p * local.gate
        if local.up is not None:
            dz = merge_gate_up(dz, dh * p * local.up, _HALVES)
        sums = pad(dh * local.h, (0, -dh.shape[1] % COLUMNS)).unflatten(1, (-1, COLUMNS)).sum(2)
        return Hidden(dz.to(z.dtype), (local.h * p).to(z.dtype), sums)

    def outer(self, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """See ``Stages``."""
        grad = torch.zeros_like(like)
        for expert, span in enumerate(self.spans):
            left, right = (t[span].to(self.wide).T.contiguous() for t in (a, b))
            # Either side may be split over ranks.
            parts = [_in_blocks(part, right) for part in _blocks_of(left)]
            grad[expert] = torch.cat(parts)[: left.shape[0]]
        return grad

    def total(self, rows: Tensor, probs: Tensor | None, like: Tensor) -> Tensor:
        """See ``Stages``."""
        scaled = rows.to(self.wide) if probs is None else rows.to(self.wide) * self._by_row(probs)
        grad = torch.zeros_like(like)
        for expert, span in enumerate(self.spans):
            # Row by row: the order of torch's sum is a matter of the width.
            total = torch.zeros(rows.shape[1], dtype=self.wide)
            for row in scaled[span]:
                total += row
            grad[expert] = total
        return grad

    def probs_gradient(
        self, partial: Tensor, dout: Tensor, down_bias: Tensor | None, topk_ids: Tensor
    ) -> Tensor:
        """See ``Stages``."""
        dp = torch.zeros(topk_ids.numel(), dtype=self.wide)
        slots = self.metadata.slots[: self.kept].long()
        by_row = torch.zeros(self.kept, dtype=self.wide)
        for column in partial[: self.kept].unbind(1):
            by_row += column
        if down_bias is not None:
            for expert, span in enumerate(self.spans):
                dy = dout[slots[span] // self.topk].to(self.wide)
                by_row[span] += (dy * down_bias[expert].to(self.wide)).sum(-1)
        dp[slots] = by_row
        return dp.view(topk_ids.shape)


def _blocks_of(w: Tensor) -> tuple[Tensor, ...]:
    return tuple(pad(w, (0, 0, 0, -w.shape[0] % COLUMNS)).split(COLUMNS))


def _in_blocks(rows: Tensor, w: Tensor) -> Tensor:
    """Return ``rows · wᵀ`` for ``w`` ``(N, K)``, 64 of its rows at a time, the last ones padded."""
    return torch.cat([rows @ block.T for block in _blocks_of(w)], 1)[:, : w.shape[0]]


class DeviceStages:
    """The kernels of the backends, hence their bits."""

    def __init__(self, x: Tensor, topk_ids: Tensor, experts: int, counted: Tensor | None) -> None:
        from samebits.ops.grouped_gemm.tuning import config_of
        from samebits.ops.permute.kernel import launch_metadata

        self.topk, self.experts, self.rows = topk_ids.shape[1], experts, topk_ids.numel()
        self.fp32 = x.dtype == torch.float32
        # Kernels interpreted on a CPU take the tiles of the architecture that has evidence.
        self.arch = env.architecture(x.device) if x.device.type == "cuda" else "sm_90"
        self.config = config_of(self.rows, experts, self.arch, DTYPE_NAMES[x.dtype])
        self.metadata = launch_metadata(
            topk_ids, experts, self.config.block_r, num_valid_tokens=counted
        )

    def product(
        self, rows: Tensor, w: Tensor, bias: Tensor | None = None, probs: Tensor | None = None
    ) -> Tensor:
        """See ``Stages``."""
        from samebits.ops.grouped_gemm.kernel import launch_grouped_gemm

        return launch_grouped_gemm(rows, self.metadata, w, bias, probs, self.config, self.arch)

    def hidden(
        self, dy: Tensor, down: Tensor, z: Tensor, activation: Activation, probs: Tensor | None
    ) -> Hidden:
        """See ``Stages``."""
        from samebits.ops.hidden_gradient import tuning
        from samebits.ops.hidden_gradient.kernel import launch_hidden_gradient
        from samebits.ops.permute.kernel import launch_tiles

        config = tuning.heuristic(max(self.rows, 1), self.experts, self.arch)
        config = config.for_fp32() if self.fp32 else config
        dz, h, partial = launch_hidden_gradient(
            dy,
            down,
            z,
            self.metadata.slots,
            launch_tiles(self.metadata.offsets, self.rows, config.block_r),
            probs,
            activation,
            _HALVES,
            config,
            topk=self.topk,
            gather=False,
            want_dz=True,
            want_h=True,
            want_partial=True,
        )
        assert dz is not None
        assert h is not None
        assert partial is not None
        return Hidden(dz, h, partial)

    def outer(self, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """See ``Stages``."""
        from samebits.ops.weight_gradient import tuning
        from samebits.ops.weight_gradient.kernel import launch_order, launch_weight_gradient

        config = tuning.heuristic(max(self.rows, 1), self.experts, self.arch)
        config = config.for_fp32() if self.fp32 else config
        offsets = self.metadata.offsets
        grad = torch.empty_like(like)
        return launch_weight_gradient(a, b, offsets, launch_order(offsets), grad, config)

    def total(self, rows: Tensor, probs: Tensor | None, like: Tensor) -> Tensor:
        """See ``Stages``."""
        from samebits.ops.weight_gradient.kernel import launch_bias_gradient

        offsets, slots = self.metadata.offsets, self.metadata.slots
        return launch_bias_gradient(rows, offsets, slots, probs, torch.empty_like(like))

    def probs_gradient(
        self, partial: Tensor, dout: Tensor, down_bias: Tensor | None, topk_ids: Tensor
    ) -> Tensor:
        """See ``Stages``."""
        from samebits.ops.hidden_gradient.kernel import launch_probs_gradient

        ids, inverse = topk_ids.contiguous(), self.metadata.inverse
        return launch_probs_gradient(partial, dout, down_bias, ids, inverse, 0)

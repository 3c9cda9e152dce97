"""Each expert spread over ranks that see the same tokens, without splitting a contraction.

``gate_up`` is cut along F (gate and up each), ``down`` along H. With ``[·]`` a gather over the
ranks and r this one's part::

    forward     z_r  = D(x · gate_up_rᵀ)        h = [h_r] by F        (R, F)
                y_r  = D(h · down_rᵀ)           out = [Σ y_r] by H    (T, H)
    backward    dh_r = dout · down[:, F_r]      down from H to F      (E, H, F / W)
                dz   = [dz_r] by 2F             gate_up from F to H   (E, 2F, H / W)
                dx   = [Σ D(dz · gate_up[:, H_r])] by H               (T, H)
                d down_r    = doutᵀ[H_r] · h    h = [p · h_r] by F    (R, F)
                d gate_up_r = dz_rᵀ · x         dp = [64 columns of F]

Every sum runs over its whole range, in one order, on one rank; the last column is what travels. A
rank multiplies 1 / W of what one rank would.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.activation import Activation
from samebits.ops.activation import activate
from samebits.ops.permute import combine, permute
from samebits.parallel.exchange import take
from samebits.parallel.stages import Hidden, Stages, stages_of
from samebits.problem import ProbPlacement
from samebits.weights import Layout, merge_gate_up, split_gate_up

_HALVES = Layout()


class CutTensors(NamedTuple):
    """The differentiable tensors of a call, or their gradients; parameters are this rank's part."""

    x: Tensor
    topk_probs: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, eq=False)
class CutPasses:
    """The two passes."""

    group: dist.ProcessGroup
    activation: Activation
    placement: ProbPlacement
    # Order of gate and up where one rank holds everything, and in the rows of this rank.
    layout: Layout
    part_layout: Layout
    # Of the output; None means that of x.
    out_dtype: torch.dtype | None = None
    # Leave the output and the gradient of x as this rank's columns, for ``columns`` later.
    apart: bool = False

    def for_arrivals(self) -> "CutPasses":
        """Return the passes over rows that arrived from other ranks, and go back there."""
        on_input = self.placement == ProbPlacement.FC1_INPUT
        placement = ProbPlacement.FC2_OUTPUT if on_input else self.placement
        return replace(self, placement=placement, out_dtype=None, apart=True)

    def forward(
        self, given: CutTensors, ids: Tensor, counted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(out, z)``; a collective.

        Determinism: see ``tensor_parallel_experts``.
        """
        stages = stages_of(given.x, ids, given.down.shape[0], counted)
        slots, offsets, inverse, _ = stages.metadata
        placed, topk = {self.placement: given.topk_probs}, ids.shape[1]
        on_hidden = placed.get(ProbPlacement.FC2_INPUT)
        z = self._first(stages, given, topk)
        h = activate(
            z,
            self.activation,
            self.part_layout,
            row_probs=None if on_hidden is None else take(on_hidden.reshape(-1), slots, 0.0),
            num_rows=offsets[-1:],
        )
        y = stages.product(self.columns(h), given.down, given.down_bias, on_hidden)
        out = combine(
            y, inverse, topk, placed.get(ProbPlacement.FC2_OUTPUT), out_dtype=self.out_dtype
        )
        return (out if self.apart else self.columns(out)), z

    def _rows(self, stages: Stages, given: CutTensors, topk: int) -> Tensor:
        """Return the input of each row."""
        on_input = self.placement == ProbPlacement.FC1_INPUT
        inverse = stages.metadata.inverse
        return permute(given.x, inverse, topk, given.topk_probs if on_input else None)

    def _first(self, stages: Stages, given: CutTensors, topk: int) -> Tensor:
        """Return z of each row, this rank's part of it."""
        return stages.product(self._rows(stages, given, topk), given.gate_up, given.gate_up_bias)

    def backward(
        self,
        given: CutTensors,
        ids: Tensor,
        counted: Tensor | None,
        z: Tensor | None,
        dout: Tensor,
    ) -> CutTensors:
        """Return every gradient; a collective. Without z, it is computed again.

        Determinism: see ``tensor_parallel_experts``.
        """
        stages = stages_of(given.x, ids, given.down.shape[0], counted)
        inverse, topk = stages.metadata.inverse, ids.shape[1]
        on_input = self.placement == ProbPlacement.FC1_INPUT
        factor = None if on_input else given.topk_probs.contiguous()
        dy = permute(dout, inverse, topk)
        z = self._first(stages, given, topk) if z is None else z
        down = self._down_by_columns(given.down)
        hidden = stages.hidden(dy, down, self._halves(z), self.activation, factor)
        width = given.down.shape[1]
        mine = dy[:, dist.get_rank(self.group) * width :][:, :width]
        h = self.columns(hidden.h)
        rows = self._rows(stages, given, topk)
        dx, dprobs = self._input_gradients(given, ids, stages, hidden, dout)
        up, bias = given.gate_up_bias, given.down_bias
        dz = self._as_stored(hidden.dz)
        return CutTensors(
            dx,
            dprobs.to(given.topk_probs.dtype),
            stages.outer(dz, rows, given.gate_up),
            stages.outer(mine, h, given.down),
            None if up is None else stages.total(dz, None, up),
            None if bias is None else stages.total(mine, factor, bias),
        )

    def _input_gradients(
        self, given: CutTensors, ids: Tensor, stages: Stages, hidden: Hidden, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the probabilities."""
        inverse, topk = stages.metadata.inverse, ids.shape[1]
        dz = self._merged([part.unflatten(1, (self._parts, -1)) for part in self._all(hidden.dz)])
        slots = stages.product(dz, self._gate_up_by_inputs(given.gate_up).transpose(1, 2))
        if self.placement == ProbPlacement.FC1_INPUT:
            found: tuple[Tensor, Tensor] = torch.ops.samebits.permute_backward(
                self.columns(slots), inverse, given.topk_probs, given.x, topk
            )
            return found
        bias = given.down_bias
        bias = None if bias is None else self.columns(bias)
        sums = self.columns(hidden.partial)
        dprobs = stages.probs_gradient(sums, dout, bias, ids)
        dx = combine(slots, inverse, topk)
        return (dx if self.apart else self.columns(dx)), dprobs

    @property
    def _parts(self) -> int:
        return self.activation.columns

    def _halves(self, part: Tensor) -> Tensor:
        """Return this rank's gate, then its up, from ``(…, 2F / W or F / W)`` as stored."""
        if self._parts == 1 or self.part_layout == _HALVES:
            return part
        return torch.cat(split_gate_up(part, self.part_layout), -1)

    def _as_stored(self, halves: Tensor) -> Tensor:
        """Return the inverse of ``_halves``."""
        if self._parts == 1 or self.part_layout == _HALVES:
            return halves
        gate, up = halves.chunk(2, -1)
        return merge_gate_up(gate, up, self.part_layout)

    def _merged(self, parts: list[Tensor]) -> Tensor:
        """Return the ``(…, 2F or F)`` of one rank, from ``(…, 2 or 1, F / W)`` of each."""
        whole = torch.cat(parts, -1)
        if self._parts == 1:
            return whole.squeeze(-2)
        return merge_gate_up(whole.select(-2, 0), whole.select(-2, 1), self.layout)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; a collective."""
        tensor = tensor.contiguous()
        every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(
            [one.view(torch.uint8) for one in every], tensor.view(torch.uint8), group=self.group
        )
        return every

    def columns(self, tensor: Tensor) -> Tensor:
        """Return the columns of all ranks, side by side; a collective.

        Determinism: exact copies.
        """
        return torch.cat(self._all(tensor), 1)

    def _traded(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """Return this rank's share along ``dim`` of every rank's tensor; a collective."""
        size = dist.get_world_size(self.group)
        given = torch.stack(tensor.chunk(size, dim))
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken.view(torch.uint8), given.view(torch.uint8), group=self.group)
        return list(taken)

    def _down_by_columns(self, down: Tensor) -> Tensor:
        """Return ``(E, H, F / W)`` from ``(E, H / W, F)``; a collective."""
        return torch.cat(self._traded(down, 2), 1)

    def _gate_up_by_inputs(self, gate_up: Tensor) -> Tensor:
        """Return ``(E, 2F, H / W)`` in the order of one rank; a collective."""
        parts = [self._halves(part.transpose(1, 2)) for part in self._traded(gate_up, 2)]
        merged = self._merged([part.unflatten(2, (self._parts, -1)) for part in parts])
        return merged.transpose(1, 2)

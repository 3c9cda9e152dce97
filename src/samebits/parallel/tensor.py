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

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.autograd import refuse_second_derivatives
from samebits.backends.call import Call
from samebits.backends.operator import autocast_dtype, check_ids, on_device, outside_autocast
from samebits.errors import must
from samebits.ops.activation import activate
from samebits.ops.permute import combine, permute
from samebits.parallel.route import take
from samebits.parallel.stages import Hidden, Stages, stages_of
from samebits.parallel.tensor_weights import TensorParallelWeights
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import Layout, merge_gate_up

_PLAIN = Activation()


def tensor_parallel_experts(
    x: Tensor,
    routing: Routing,
    weights: TensorParallelWeights,
    activation: Activation = _PLAIN,
    *,
    group: dist.ProcessGroup,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts, each of them spread over ranks.

    A collective: every rank gives the same tokens, routing and wishes for gradients, gets the same
    output, and runs the same backward with the same gradient of it.

    Args:
        x: ``(T, H)``, the same on every rank.
        routing: Experts and probabilities, the same on every rank.
        weights: This rank's part.
        activation: See ``samebits.experts``.
        group: The ranks.
        placement: See ``samebits.experts``.
        num_valid_tokens: See ``samebits.experts``.

    Returns:
        ``(T, H)`` in the dtype of ``x``; differentiable in ``x``, the probabilities (the same
        gradient on every rank) and the parameters (of this rank's part).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes, dtypes or ids disagree.
        UnsupportedError: The device has no kernels for this.

    Determinism: the bits do not depend on the number of ranks; on a GPU they are those of
    ``samebits.experts``, on a CPU those of one rank here (torch's products follow shapes).
    """
    require_type("group", group, dist.ProcessGroup)
    require_type("routing", routing, Routing)
    require_type("weights", weights, TensorParallelWeights)
    require_type("activation", activation, Activation)
    given = _cast(_Given(x, routing.topk_probs, **_tensors(weights)))
    _check(given, routing, activation)
    layer = _Layer(group, activation, ProbPlacement(placement), weights.layout)
    out: Tensor = _TensorParallel.apply(  # type: ignore[no-untyped-call]
        layer, routing.topk_ids, num_valid_tokens, *given
    )
    return out


class _Given(NamedTuple):
    """The differentiable tensors of a call."""

    x: Tensor
    topk_probs: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _tensors(weights: TensorParallelWeights) -> dict[str, Any]:
    return {n: getattr(weights, n) for n in _Given._fields[2:]}


def _cast(given: _Given) -> _Given:
    """Return what autocast makes of the tensors; see ``samebits.experts``."""
    dtype = autocast_dtype(given.x.device)
    if dtype is None or torch.float64 in (given.x.dtype, given.down.dtype):
        return given
    narrowed = {n: t.to(dtype) for n, t in given._asdict().items() if t is not None}
    return given._replace(**{**narrowed, "topk_probs": given.topk_probs})


def _check(given: _Given, routing: Routing, activation: Activation) -> None:
    x, down, ids = given.x, given.down, routing.topk_ids
    if x.dim() != 2 or x.shape[0] != ids.shape[0]:
        rule = f"have shape (T, H) with T = topk_ids.shape[0] = {ids.shape[0]}"
        raise ValueError(must("x", rule, tuple(x.shape)))
    for name, tensor in (("gate_up", given.gate_up), ("down", down)):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            rule = f"be {x.dtype} on {x.device}, as x"
            raise ValueError(must(name, rule, f"{tensor.dtype} on {tensor.device}"))
    if given.gate_up.shape[1] % activation.columns or given.gate_up.shape[2] != x.shape[1]:
        rule = f"have shape (E, {activation.columns} * F / W, {x.shape[1]})"
        raise ValueError(must("gate_up", rule, tuple(given.gate_up.shape)))
    experts = down.shape[0]
    if routing.num_experts not in (None, experts):
        raise ValueError(must("num_experts", f"be E = {experts}", routing.num_experts))
    call = Call(x, ids, given.topk_probs, given.gate_up, down, None, None, None, None)
    check_ids(call, experts)


@dataclass(frozen=True, eq=False)
class _Layer:
    """The two passes."""

    group: dist.ProcessGroup
    activation: Activation
    placement: ProbPlacement
    layout: Layout

    def forward(self, given: _Given, ids: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``(out, z)``; a collective."""
        stages = stages_of(given.x, ids, given.down.shape[0], counted)
        slots, offsets, inverse, _ = stages.metadata
        placed, topk = {self.placement: given.topk_probs}, ids.shape[1]
        on_hidden = placed.get(ProbPlacement.FC2_INPUT)
        rows = permute(given.x, inverse, topk, placed.get(ProbPlacement.FC1_INPUT))
        z = stages.product(rows, given.gate_up, given.gate_up_bias)
        h = activate(
            z,
            self.activation,
            row_probs=None if on_hidden is None else take(on_hidden.reshape(-1), slots, 0.0),
            num_rows=offsets[-1:],
        )
        y = stages.product(self._columns(h), given.down, given.down_bias, on_hidden)
        out = combine(y, inverse, topk, placed.get(ProbPlacement.FC2_OUTPUT))
        return self._columns(out), z

    def backward(
        self, given: _Given, ids: Tensor, counted: Tensor | None, z: Tensor, dout: Tensor
    ) -> _Given:
        """Return every gradient; a collective."""
        stages = stages_of(given.x, ids, given.down.shape[0], counted)
        inverse, topk = stages.metadata.inverse, ids.shape[1]
        on_input = self.placement == ProbPlacement.FC1_INPUT
        factor = None if on_input else given.topk_probs.contiguous()
        dy = permute(dout, inverse, topk)
        hidden = stages.hidden(dy, self._down_by_columns(given.down), z, self.activation, factor)
        width = given.down.shape[1]
        mine = dy[:, dist.get_rank(self.group) * width :][:, :width]
        h = self._columns(hidden.h)
        rows = permute(given.x, inverse, topk, given.topk_probs if on_input else None)
        dx, dprobs = self._input_gradients(given, ids, stages, hidden, dout)
        up, bias = given.gate_up_bias, given.down_bias
        return _Given(
            dx,
            dprobs.to(given.topk_probs.dtype),
            stages.outer(hidden.dz, rows, given.gate_up),
            stages.outer(mine, h, given.down),
            None if up is None else stages.total(hidden.dz, None, up),
            None if bias is None else stages.total(mine, factor, bias),
        )

    def _input_gradients(
        self, given: _Given, ids: Tensor, stages: Stages, hidden: Hidden, dout: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the probabilities."""
        inverse, topk = stages.metadata.inverse, ids.shape[1]
        dz = self._merged([part.unflatten(1, (self._parts, -1)) for part in self._all(hidden.dz)])
        slots = stages.product(dz, self._gate_up_by_inputs(given.gate_up).transpose(1, 2))
        if self.placement == ProbPlacement.FC1_INPUT:
            found: tuple[Tensor, Tensor] = torch.ops.samebits.permute_backward(
                self._columns(slots), inverse, given.topk_probs, given.x, topk
            )
            return found
        bias = given.down_bias
        bias = None if bias is None else self._columns(bias)
        sums = self._columns(hidden.partial)
        dprobs = stages.probs_gradient(sums, dout, bias, ids)
        return self._columns(combine(slots, inverse, topk)), dprobs

    @property
    def _parts(self) -> int:
        return self.activation.columns

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

    def _columns(self, tensor: Tensor) -> Tensor:
        """Return the columns of all ranks, side by side; a collective."""
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
        parts = [part.transpose(1, 2) for part in self._traded(gate_up, 2)]
        merged = self._merged([part.unflatten(2, (self._parts, -1)) for part in parts])
        return merged.transpose(1, 2)


class _TensorParallel(torch.autograd.Function):
    """Tie the two passes together; saves the inputs and this rank's part of z."""

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, ids: Tensor, counted: Tensor | None, *tensors: Any
    ) -> Tensor:
        given = _Given(*tensors)
        with outside_autocast(given.x.device), on_device(given.x.device):
            out, z = layer.forward(given, ids, counted)
        ctx.save_for_backward(ids, counted, z, *tensors)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        ids, counted, z, *tensors = ctx.saved_tensors
        given = _Given(*tensors)
        dout = douts[0].to(given.x.dtype).contiguous()
        with outside_autocast(given.x.device), on_device(given.x.device):
            grads = ctx.layer.backward(given, ids, counted, z, dout)
        return None, None, None, *grads

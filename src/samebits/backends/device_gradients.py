"""The backward of a layer on a GPU, from z by row: shared by the backends that keep it.

The derivative stands behind the product with ``down``; then come the products for the input and for
the parameters, each over rows in their order. Only z is kept between forward and backward: the
metadata, h and the permuted rows are made again.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samebits.backends import recorder
from samebits.backends.call import DIFFERENTIABLE, Call, Gradients
from samebits.backends.matrices import dense_of
from samebits.backends.norm_gradients import Normed
from samebits.backends.stages import by_row, metadata_of
from samebits.ops.permute.tuning import Metadata
from samebits.problem import Problem, ProbPlacement
from samebits.weight_gradients import Buffer


def backward(
    problem: Problem,
    call: Call,
    z: Tensor,
    dout: Tensor,
    wanted: tuple[bool, ...],
    into: Mapping[str, Buffer],
    *,
    spend: bool = False,
) -> Gradients:
    """Return the wanted gradients from ``z``; recomputes h.

    ``spend``: z is not needed again, its memory may be given back before the end.

    Determinism: repeatable; rows ascend in every sum over rows; dx is independent of T and of the
    other rows.
    """
    from samebits.ops.hidden_gradient import tuning as hidden_tuning
    from samebits.ops.hidden_gradient.kernel import launch_hidden_gradient, launch_probs_gradient

    want = {name for name, asked in zip(DIFFERENTIABLE, wanted, strict=True) if asked}
    topk, total = problem.K, call.topk_ids.numel()
    on_input = problem.placement == ProbPlacement.FC1_INPUT
    probs = call.topk_probs.contiguous()
    tile = hidden_tuning.heuristic(max(total, 1), problem.E, problem.device)
    config = tile.for_fp32() if problem.dtype == "fp32" else tile
    metadata = metadata_of(problem, call, config.block_r)
    dout = dout.to(call.x.dtype).contiguous()
    normed = None if problem.norm_eps is None else Normed(problem, call, z, metadata, dout)
    in_rows = True
    if normed is not None:
        dy = normed.dy
    elif want & {"down", "down_bias"} or call.offsets is not None:
        dy = by_row(problem, call, dout, metadata.inverse)
    else:
        dy, in_rows = dout, False
    # Of what follows from dy; the norm has made use of a probability behind it.
    factor = None if on_input or (normed and not normed.needs_partial) else probs
    want_dz = bool(want & {"x", "gate_up", "gate_up_bias"}) or (on_input and "topk_probs" in want)
    want_partial = "topk_probs" in want and factor is not None
    dz = h = partial = None
    # The bias of the second projection alone needs no product.
    if want_dz or want_partial or "down" in want:
        dz, h, partial = launch_hidden_gradient(
            dy,
            dense_of(problem, call, "down", metadata.offsets),
            z,
            metadata.slots,
            metadata.tiles,
            factor,
            problem.activation,
            problem.layout,
            config,
            topk=topk,
            gather=not in_rows,
            want_dz=want_dz,
            want_h="down" in want,
            want_partial=want_partial,
        )
    if spend:
        recorder.spend(z)
    products = _Products(problem, call, metadata, want, into)
    grads: dict[str, Tensor] = {}
    if dz is not None and products.first_comes_first():
        grads |= products.of_first(dz, probs if on_input else None)
        dz = None
    grads |= products.of_second(dy, h, factor)
    # Their memory serves the next products.
    del dy, h
    if normed is not None:
        grads |= normed.others(want, into, partial)
    elif partial is not None:
        bias = None if call.down_bias is None else call.down_bias.contiguous()
        grads["topk_probs"] = launch_probs_gradient(
            partial,
            dout,
            bias,
            call.topk_ids.contiguous(),
            metadata.inverse,
            problem.expert_start,
            call.topk_probs.dtype,
        )
    if dz is not None:
        grads |= products.of_first(dz, probs if on_input else None)
    if "topk_probs" in grads:
        # Sums that follow the first projection come in fp32.
        grads["topk_probs"] = grads["topk_probs"].to(call.topk_probs.dtype)
    return Gradients(**{name: grad for name, grad in grads.items() if name not in into})


class _Products:
    """The products of a backward that follow the gradients of z and y."""

    def __init__(
        self,
        problem: Problem,
        call: Call,
        metadata: Metadata,
        want: set[str],
        into: Mapping[str, Buffer],
    ) -> None:
        from samebits.ops.weight_gradient import tuning
        from samebits.ops.weight_gradient.kernel import launch_order

        self.problem, self.call, self.metadata, self.want = problem, call, metadata, want
        self.into, self.total = into, call.topk_ids.numel()
        config = tuning.heuristic(max(self.total, 1), problem.E, problem.device)
        self.config = config.for_fp32() if problem.dtype == "fp32" else config
        self.order = launch_order(metadata.offsets) if want & {"gate_up", "down"} else None

    def first_comes_first(self) -> bool:
        """Return whether memory peaks lower with the gradients of the first projection first.

        Whatever comes last has every gradient beside its operands: dz and rows of x, or h and rows
        of dout. But what comes first has the operands of both.
        """
        if self.into or not {"gate_up", "down"} <= self.want:
            return False
        rows, (_, width, hidden) = self.total, self.call.gate_up.shape
        columns, down = self.call.down.shape[2], self.call.down.numel()
        both = rows * (width + columns + 2 * hidden) - down
        return max(rows * (columns + hidden), both) < rows * (width + hidden)

    def of_second(self, dy: Tensor, h: Tensor | None, probs: Tensor | None) -> dict[str, Tensor]:
        """Return the gradients of the parameters of the second projection."""
        grads = {}
        if h is not None:
            grads["down"] = self._weight("down", dy, h, self.call.down)
        if "down_bias" in self.want and self.call.down_bias is not None:
            grads["down_bias"] = self._bias("down_bias", dy, probs, self.call.down_bias)
        return grads

    def of_first(self, dz: Tensor, probs: Tensor | None) -> dict[str, Tensor]:
        """Return the other gradients; ``probs`` where the input was scaled by them."""
        from samebits.ops.permute.kernel import launch_permute, launch_permute_backward

        call, topk, inverse, grads = self.call, self.problem.K, self.metadata.inverse, {}
        want_probs = probs is not None and "topk_probs" in self.want
        if "gate_up_bias" in self.want and call.gate_up_bias is not None:
            grads["gate_up_bias"] = self._bias("gate_up_bias", dz, None, call.gate_up_bias)
        if "x" in self.want or want_probs:
            rows = self._input(dz)
            x = call.x if want_probs else None
            dx, dprobs = launch_permute_backward(rows, inverse, topk, probs, x)
            del rows
            if "x" in self.want:
                grads["x"] = dx
            if dprobs is not None:
                grads["topk_probs"] = dprobs
        if "gate_up" in self.want:
            if probs is None:
                x = by_row(self.problem, call, call.x, inverse)
            else:
                x = launch_permute(call.x, inverse, topk, probs)
            grads["gate_up"] = self._weight("gate_up", dz, x, call.gate_up)
        return grads

    def _input(self, dz: Tensor) -> Tensor:
        """Return the gradient of each row's input."""
        from samebits.ops.indirect_gemm.kernel import launch_second_projection
        from samebits.ops.indirect_gemm.tuning import input_gradient_heuristic
        from samebits.ops.permute.kernel import launch_tiles

        sizes = max(self.total, 1), self.problem.E
        config = input_gradient_heuristic(*sizes, self.problem.device)
        if self.problem.dtype == "fp32":
            config = config.for_fp32()
        tiles = launch_tiles(self.metadata.offsets, self.total, config.block_r)
        offsets = self.metadata.offsets
        matrices = dense_of(self.problem, self.call, "gate_up", offsets).transpose(1, 2)
        return launch_second_projection(
            dz, self.metadata.slots, tiles, matrices, None, None, config
        )

    def _weight(self, name: str, a: Tensor, b: Tensor, parameter: Tensor) -> Tensor:
        from samebits.ops.weight_gradient.kernel import launch_weight_gradient

        assert self.order is not None
        buffer = self.into.get(name)
        return launch_weight_gradient(
            a,
            b,
            self.metadata.offsets,
            self.order,
            torch.empty_like(parameter) if buffer is None else buffer.tensor,
            self.config,
            accumulate=buffer is not None and buffer.accumulate,
        )

    def _bias(self, name: str, rows: Tensor, probs: Tensor | None, parameter: Tensor) -> Tensor:
        from samebits.ops.weight_gradient.kernel import launch_bias_gradient

        buffer = self.into.get(name)
        return launch_bias_gradient(
            rows,
            self.metadata.offsets,
            self.metadata.slots,
            probs,
            torch.empty_like(parameter) if buffer is None else buffer.tensor,
            accumulate=buffer is not None and buffer.accumulate,
        )

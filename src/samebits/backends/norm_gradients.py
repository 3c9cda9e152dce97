"""The backward of a post-expert norm on a GPU: from the gradient of the output to that of y."""

from collections.abc import Mapping

import torch
from torch import Tensor

from samebits.backends.call import Call
from samebits.backends.matrices import dense_of
from samebits.backends.stages import factors
from samebits.ops.indirect_gemm import tuning
from samebits.ops.permute.tuning import Metadata
from samebits.problem import Problem, ProbPlacement
from samebits.weight_gradients import Buffer


class Normed:
    """The gradients at the norm of one call, from which all others follow."""

    def __init__(
        self, problem: Problem, call: Call, z: Tensor, metadata: Metadata, dout: Tensor
    ) -> None:
        # Imported here: naming a backend must not need Triton.
        from samebits.ops.row_norm.kernel import launch_row_norm_backward

        assert call.norm_scale is not None
        assert problem.norm_eps is not None
        placed = factors(problem, call)
        self._call, self._metadata = call, metadata
        bias = None if call.down_bias is None else call.down_bias.contiguous()
        self._found = launch_row_norm_backward(
            _second_output(problem, call, z, metadata),
            call.norm_scale,
            dout,
            metadata.offsets,
            metadata.slots,
            metadata.inverse,
            problem.norm_eps,
            y_probs=placed[ProbPlacement.FC2_OUTPUT],
            h_probs=placed[ProbPlacement.FC2_INPUT],
            bias=bias,
        )
        # By row, in D; the probability of FC2_OUTPUT is in it.
        self.dy = self._found.y
        # Whether the gradient of the probabilities waits for that of h.
        self.needs_partial = placed[ProbPlacement.FC2_INPUT] is not None

    def others(
        self, want: set[str], into: Mapping[str, Buffer], partial: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the wanted gradients of the scale and of probabilities behind the input.

        Args:
            want: Names in ``Call``.
            into: Where gradients of parameters are stored.
            partial: Sums of the gradient of the probabilities by row, where it waits for them.

        Determinism: fixed order; for the scale, rows ascending, 64 at a time, then these sums.
        """
        grads = {}
        if "norm_scale" in want:
            grads["norm_scale"] = self._scale(into)
        if "topk_probs" in want and self._found.probs is not None:
            grads["topk_probs"] = self._probs(self._found.probs, partial)
        return grads

    def _probs(self, found: Tensor, partial: Tensor | None) -> Tensor:
        from samebits.ops.row_norm.kernel import launch_row_norm_probs

        if partial is None:
            return found
        assert self._found.done is not None
        return launch_row_norm_probs(partial, self._metadata.inverse, found, self._found.done)

    def _scale(self, into: Mapping[str, Buffer]) -> Tensor:
        from samebits.ops.weight_gradient.kernel import launch_bias_gradient

        assert self._call.norm_scale is not None
        buffer = into.get("norm_scale")
        grad = torch.empty_like(self._call.norm_scale) if buffer is None else buffer.tensor
        launch_bias_gradient(
            self._found.terms,
            self._found.bounds,
            self._metadata.slots,
            None,
            grad[None],
            accumulate=buffer is not None and buffer.accumulate,
        )
        return grad


def _second_output(problem: Problem, call: Call, z: Tensor, metadata: Metadata) -> Tensor:
    """Return the second projection's output, (R, H) fp32, with the bits of the forward."""
    from samebits.ops.activation.kernel import launch_activation_forward
    from samebits.ops.activation.operands import Operands
    from samebits.ops.indirect_gemm.kernel import launch_second_projection
    from samebits.ops.permute.kernel import launch_permute, launch_tiles

    total = call.topk_ids.numel()
    on_hidden = factors(problem, call)[ProbPlacement.FC2_INPUT]
    row_probs = None
    if on_hidden is not None:
        row_probs = launch_permute(on_hidden.view(-1, 1), metadata.inverse, 1, None).view(-1)
    h = launch_activation_forward(
        Operands(z, row_probs=row_probs, num_rows=metadata.offsets[-1:]),
        problem.activation,
        problem.layout,
    )
    _, config = tuning.heuristic(max(total, 1), problem.E, problem.device)
    if problem.dtype == "fp32":
        config = config.for_fp32()
    return launch_second_projection(
        h,
        metadata.slots,
        launch_tiles(metadata.offsets, total, config.block_r),
        dense_of(problem, call, "down", metadata.offsets),
        call.down_bias,
        on_hidden,
        config,
        dtype=torch.float32,
    )

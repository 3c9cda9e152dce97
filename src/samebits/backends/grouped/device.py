"""The stages on a GPU: permute, grouped product, activation, grouped product, combine.

Every shape is a function of T and nothing waits for the device, so a call can be captured in a CUDA
graph. Each stage has the rounding points of the contract, hence the bits of the fused backend.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.backends.call import Call, why_no_kernels
from samebits.backends.matrices import matrix_of, tiles_of
from samebits.backends.stages import by_row, combined, factors, metadata_of, second_dtype
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.tuning import Metadata
from samebits.problem import Problem, ProbPlacement


def why_not(problem: Problem) -> str | None:
    """Return why a GPU cannot run ``problem``, or None.

    Determinism: pure function of the problem.
    """
    if not problem.device.startswith("sm_"):
        return f"it has kernels for NVIDIA GPUs and for cpu, not for {problem.device}"
    return why_no_kernels(problem)


class First(NamedTuple):
    """The first projection, and what the second goes on from."""

    z: Tensor
    metadata: Metadata
    config: Config
    # Whether the tile upcasts quantised weights itself.
    upcast: bool


def first_projection(problem: Problem, call: Call) -> First:
    """Return z by row, (R, 2F or F).

    Determinism: repeatable; each row independent of T and of the other rows.
    """
    # Imported here: naming the backend must not need Triton.
    from samebits.ops.grouped_gemm.kernel import launch_grouped_gemm
    from samebits.ops.grouped_gemm.tuning import config_of
    from samebits.ops.permute.kernel import launch_permute

    _, config, upcast = tiles_of(problem, call)
    if not upcast:
        config = config_of(call.topk_ids.numel(), problem.E, problem.device, problem.dtype)
    metadata = metadata_of(problem, call, config.block_r)
    on_input = factors(problem, call)[ProbPlacement.FC1_INPUT]
    if on_input is None:
        rows = by_row(problem, call, call.x, metadata.inverse)
    else:
        rows = launch_permute(call.x, metadata.inverse, problem.K, on_input)
    z = launch_grouped_gemm(
        rows,
        metadata,
        matrix_of(problem, call, "gate_up", metadata.offsets, upcast=upcast),
        call.gate_up_bias,
        None,
        config,
        problem.device,
    )
    return First(z, metadata, config, upcast)


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; each row independent of T and of the other rows.
    """
    # Imported here: naming the backend must not need Triton.
    from samebits.ops.activation.kernel import launch_activation_forward
    from samebits.ops.activation.operands import Operands
    from samebits.ops.grouped_gemm.kernel import launch_grouped_gemm

    z, metadata, config, upcast = first_projection(problem, call)
    on_hidden = factors(problem, call)[ProbPlacement.FC2_INPUT]
    operands = Operands(
        z,
        row_probs=None if on_hidden is None else probs_by_row(on_hidden, metadata.slots),
        num_rows=metadata.offsets[-1:],
    )
    h = launch_activation_forward(operands, problem.activation, problem.layout)
    down = matrix_of(problem, call, "down", metadata.offsets, upcast=upcast)
    y = launch_grouped_gemm(
        h,
        metadata,
        down,
        call.down_bias,
        on_hidden,
        config,
        problem.device,
        dtype=second_dtype(problem),
    )
    out = combined(problem, call, y, metadata)
    return out, z if save else z.new_empty(0, z.shape[1])


def probs_by_row(probs: Tensor, slots: Tensor) -> Tensor:
    """Return the probability of each row; rows of no slot get any slot's.

    Determinism: exact.
    """
    flat = probs.reshape(-1)
    return torch.index_select(flat, 0, slots.clamp(max=max(flat.shape[0] - 1, 0)))

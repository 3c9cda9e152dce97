"""The stages with activations in 8 bits: rows and h are quantised where they are written.

FP8 rows are multiplied as they are with FP8 weights (``samebits.ops.scaled_gemm``). MXFP8 rows
become the numbers that they stand for, which bf16 holds exactly, and the products are those of 16
bits: the same numbers on every architecture.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebits.backends import eight_bits
from samebits.backends.call import Call, quantized
from samebits.backends.grouped.device import probs_by_row
from samebits.backends.matrices import matrix_of, tiles_of
from samebits.backends.stages import combined, factors, metadata_of, second_dtype
from samebits.ops.grouped_gemm.tuning import config_of
from samebits.ops.permute.tuning import Metadata
from samebits.ops.scaled_gemm.tuning import heuristic
from samebits.problem import DTYPES, Problem, ProbPlacement

# Columns of the blocks that the kernels take: those of the contract.
_COLUMNS = 128


def why_not(problem: Problem) -> str | None:
    """Return why the kernels cannot have the activations of ``problem`` in 8 bits, or None.

    Determinism: pure function of the problem.
    """
    rows = problem.row_format
    reason = eight_bits.why_not(problem)
    if rows is None or reason is not None:
        return reason
    if rows.scales == "e8m0":
        if problem.dtype == "fp16":
            return "numbers of mxfp8 rows may be beyond fp16"
        return None
    if rows.columns != _COLUMNS:
        return f"its kernels take blocks of {_COLUMNS} columns, not {rows.columns}"
    # Weights in E4M3 were refused before sm_89, where the matrix unit has no products of them.
    return None


def forward(problem: Problem, call: Call) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. Nothing of ``z`` is kept.

    Determinism: repeatable; each row independent of T and of the other rows.
    """
    # Imported here: naming the backend must not need Triton.
    from samebits.ops.quantize.kernel import (
        launch_activation_and_quantize,
        launch_permute_and_quantize,
    )

    rows = problem.row_format
    assert rows is not None
    numbers = rows.scales == "e8m0"
    metadata, product = (_exact if numbers else _scaled)(problem, call)
    kept, placed = metadata.offsets[-1:], factors(problem, call)
    on_input, on_hidden = placed[ProbPlacement.FC1_INPUT], placed[ProbPlacement.FC2_INPUT]
    x = launch_permute_and_quantize(
        call.x, metadata.inverse, problem.K, on_input, kept, rows, numbers=numbers
    )
    z = product("gate_up", x, None, None)
    h = launch_activation_and_quantize(
        z,
        problem.activation,
        problem.layout,
        None if on_hidden is None else probs_by_row(on_hidden, metadata.slots),
        kept,
        rows,
        numbers=numbers,
    )
    y = product("down", h, on_hidden, second_dtype(problem))
    return combined(problem, call, y, metadata), z.new_empty(0, z.shape[1])


# Of a projection's name, rows, the factor of its bias by slot, and a dtype that is not D.
_Product = Callable[[str, Any, Tensor | None, torch.dtype | None], Tensor]


def _scaled(problem: Problem, call: Call) -> tuple[Metadata, _Product]:
    """Return the metadata, and the products of FP8 rows."""
    from samebits.ops.scaled_gemm.kernel import launch_scaled_gemm

    config = heuristic(call.topk_ids.numel(), problem.E, problem.device)
    metadata = metadata_of(problem, call, config.block_r)

    def product(name: str, rows: Any, probs: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        return launch_scaled_gemm(
            rows.values,
            rows.scales,
            metadata.slots,
            metadata.tiles,
            quantized(problem, call, name),
            getattr(call, f"{name}_bias"),
            probs,
            DTYPES[problem.dtype] if dtype is None else dtype,
            config,
        )

    return metadata, product


def _exact(problem: Problem, call: Call) -> tuple[Metadata, _Product]:
    """Return the metadata, and the products of the numbers that MXFP8 rows stand for."""
    from samebits.ops.grouped_gemm.kernel import launch_grouped_gemm

    _, config, upcast = tiles_of(problem, call)
    if not upcast:
        config = config_of(call.topk_ids.numel(), problem.E, problem.device, problem.dtype)
    metadata = metadata_of(problem, call, config.block_r)

    def product(name: str, rows: Any, probs: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        matrix = matrix_of(problem, call, name, metadata.offsets, upcast=upcast)
        bias = getattr(call, f"{name}_bias")
        return launch_grouped_gemm(
            rows.values, metadata, matrix, bias, probs, config, problem.device, dtype=dtype
        )

    return metadata, product

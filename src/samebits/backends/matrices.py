"""The projections of a call as kernels take them: dense, quantised, or made dense for the call."""

from torch import Tensor

from samebits.backends.call import Call, quantized
from samebits.formats.matrix import QuantizedMatrix
from samebits.ops.indirect_gemm import tuning
from samebits.ops.indirect_gemm.tuning import Config
from samebits.problem import DTYPES, Problem


def tiles_of(problem: Problem, call: Call) -> tuple[Config, Config, bool]:
    """Return the tiles of both projections, and whether they upcast quantised weights themselves.

    Quantised weights that no such tile takes are made dense, once for the call (``matrix_of``).

    Determinism: pure function of shapes, strides and addresses; no choice changes bits.
    """
    total = max(call.topk_ids.numel(), 1)
    if problem.format is not None:
        from samebits.ops._triton.operand import words

        tiles = tuning.quantized_heuristic(total, problem)
        matrices = [quantized(problem, call, name) for name in ("gate_up", "down")]
        if tiles is not None and all(words(matrix) is not None for matrix in matrices):
            return *tiles, True
    first, second = tuning.heuristic(total, problem.E, problem.device)
    if problem.dtype == "fp32":
        return first.for_fp32(), second.for_fp32(), False
    return first, second, False


def matrix_of(
    problem: Problem, call: Call, name: str, offsets: Tensor, *, upcast: bool = False
) -> Tensor | QuantizedMatrix:
    """Return the projection ``name`` as it is held, if ``upcast``, or dense; see ``dense_of``.

    Determinism: that of ``dense_of``.
    """
    if upcast:
        return quantized(problem, call, name)
    return dense_of(problem, call, name, offsets)


def dense_of(problem: Problem, call: Call, name: str, offsets: Tensor) -> Tensor:
    """Return the projection ``name`` in the working dtype.

    Args:
        problem: The call's.
        call: Its tensors.
        name: "gate_up" or "down".
        offsets: ``(E + 1,)`` rows of the experts. Where weights are quantised, those of experts
            without rows are not made, and not read.

    Determinism: elementwise.
    """
    if problem.format is None:
        matrix: Tensor = getattr(call, name)
        return matrix
    # Imported here: naming a backend must not need Triton.
    from samebits.ops.dequantize.kernel import launch_dequantize

    return launch_dequantize(quantized(problem, call, name), DTYPES[problem.dtype], offsets)

"""What a kernel loads an expert's matrices through: a tensor descriptor, or pointers."""

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from samebits.formats.matrix import QuantizedMatrix


class MatrixOperand(NamedTuple):
    """The arguments of a projection's kernel that stand for (E, N, K) matrices."""

    # A descriptor, or a tensor.
    source: Any
    # Of the tensor; zeros for a descriptor.
    strides: tuple[int, ...]
    # True where source is a descriptor.
    described: bool
    # True where rows are not contiguous.
    transposed: bool
    # Where quantised: scales, their three strides, the factor of each expert or None.
    scales: tuple[Any, ...] = (None,) * 5
    # Where quantised: FORMAT of ``samebits.ops._triton.quantized``.
    format: tuple[Any, ...] | None = None


def matrix_operand(
    w: Tensor, box: tuple[int, int] | None, *, halves: bool = False
) -> MatrixOperand:
    """Return the operand of dense matrices; see ``weight_operand``."""
    source, strides, described = weight_operand(w, box, halves=halves)
    return MatrixOperand(source, strides, described, transposed=w.stride(2) != 1)


def quantized_operand(
    matrix: QuantizedMatrix, box: tuple[int, int], num_warps: int
) -> MatrixOperand:
    """Return the operand of quantised matrices whose ``words`` a descriptor can read.

    Args:
        matrix: The matrices.
        box: Rows and contraction of a tile.
        num_warps: Of the launch, where weights are the first operand; otherwise 0.

    Raises:
        ValueError: The hardware's rules forbid a descriptor of the words.

    Determinism: pure function of addresses and strides.
    """
    held, values = matrix.format, words(matrix)
    each = 8 if held.shuffled else 4
    descriptor = (
        None if values is None else _descriptor(values, box[0], box[1] // each, halves=False)
    )
    if descriptor is None:
        raise ValueError(f"no descriptor reads {held} values of strides {matrix.values.stride()}")
    if held.shuffled:
        exponents = scale_words(matrix)
        strides = (exponents.stride(0), exponents.stride(2), exponents.stride(1))
        scales = (exponents, *strides, None)
        return MatrixOperand(descriptor, (0, 0, 0), True, False, scales, ("shuffled", num_warps))
    scales = (stored_scales(matrix), *matrix.scales.stride(), matrix.global_scale)
    kinds = (held.values, held.scales, held.rows, held.columns, _near(scales[0]))
    return MatrixOperand(descriptor, (0, 0, 0), True, False, scales, kinds)


def stored_scales(matrix: QuantizedMatrix) -> Tensor:
    """Return the scales as kernels load them: bytes, or fp32."""
    scales = matrix.scales
    return scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


def scale_words(matrix: QuantizedMatrix) -> Tensor:
    """Return the scales of an ``mxfp4_shuffled`` matrix four in a word, (E, ⌈K/128⌉, N) int32."""
    return matrix.scales.view(torch.int32).squeeze(3)


def _near(scales: Tensor) -> int:
    """Return how many scales of a row can be loaded at once, from every multiple of that number."""
    if scales.element_size() != 1 or scales.stride(2) != 1:
        return 1
    return gcd(8, scales.data_ptr(), scales.stride(0), scales.stride(1), scales.shape[2])


def words(matrix: QuantizedMatrix) -> Tensor | None:
    """Return the values as (E, N, K / 4) words of four columns, or None where they are none.

    int32 words of E4M3, int16 words of E2M1; a descriptor of them has to be possible. Shuffled ones
    are (E, N, K / 8) int32, and their ``scale_words`` have to be words too.
    """
    values = matrix.values
    if matrix.format.shuffled and not _are_words(matrix.scales):
        return None
    strides = [s * values.element_size() for s in values.stride()[:2]]
    if matrix.columns % 4 or values.stride(2) != 1 or values.numel() == 0:
        return None
    if values.data_ptr() % 16 or any(s % 16 for s in strides):
        return None
    wide = matrix.format.values == "e4m3" or matrix.format.shuffled
    return values.view(torch.int32 if wide else torch.int16)


def _are_words(scales: Tensor) -> bool:
    """Return whether bytes (…, 4) can be seen as words."""
    outer = scales.stride()[:-1]
    return scales.stride(3) == 1 and not any(n % 4 for n in (scales.data_ptr(), *outer))


def weight_operand(
    w: Tensor, box: tuple[int, int] | None, *, halves: bool = False
) -> tuple[Any, tuple[int, ...], bool]:
    """Return ``(operand, strides, described)`` of (E, N, K) matrices for ``weight_tile``.

    Args:
        w: Matrices, any strides.
        box: Rows and contraction of a tile to load through a descriptor; None asks for pointers,
            which are also the answer where the hardware's rules forbid a descriptor.
        halves: A box holds ``box[0] / 2`` rows of each half of the N rows.

    Determinism: pure function of the tensor's address and strides.
    """
    descriptor = None if box is None else _descriptor(w, *box, halves=halves)
    if descriptor is None:
        return w, w.stride(), False
    return descriptor, (0, 0, 0), True


def row_operand(rows: Tensor, box: tuple[int, int] | None) -> tuple[Any, bool]:
    """Return ``(operand, described)`` of contiguous (R, K) rows; see ``weight_operand``."""
    unit = 16 // rows.element_size()
    if (
        box is None
        or rows.numel() == 0
        or rows.data_ptr() % 16
        or rows.stride(0) % unit
        or rows.stride(1) != 1
    ):
        return rows, False
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), list(box)), True


def _descriptor(w: Tensor, block_n: int, block_k: int, *, halves: bool) -> TensorDescriptor | None:
    """Return a descriptor, or None: base address and strides must be multiples of 16 bytes."""
    experts, rows, contraction = w.shape
    stride_e, stride_n, stride_k = w.stride()
    unit = 16 // w.element_size()
    if stride_k == 1:
        shape, strides, box = [rows, contraction], [stride_n, 1], [block_n, block_k]
        if halves:
            shape, strides = [2, rows // 2, contraction], [rows // 2 * stride_n, stride_n, 1]
            box = [2, block_n // 2, block_k]
    elif stride_n == 1:
        shape, strides, box = [contraction, rows], [stride_k, 1], [block_k, block_n]
        if halves:
            shape, strides = [contraction, 2, rows // 2], [stride_k, rows // 2, 1]
            box = [block_k, 2, block_n // 2]
    else:
        return None
    if w.data_ptr() % 16 or stride_e % unit or any(s % unit for s in strides[:-1]):
        return None
    return TensorDescriptor(w, [experts, *shape], [stride_e, *strides], [1, *box])

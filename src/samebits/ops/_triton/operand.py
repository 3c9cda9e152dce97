"""What a kernel loads an expert's matrices through: a tensor descriptor, or pointers."""

from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


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

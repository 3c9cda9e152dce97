"""The expert function between the two projections, over rows: ``[R, 2F] → [R, F]``, and back."""

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.ops.activation.contract import backward, run
from samebits.ops.activation.operands import Backward, Operands, Wanted
from samebits.weights import Layout

__all__ = ["Backward", "Operands", "Wanted", "activate", "activate_backward", "validate"]

SWIGLU = Activation()
HALVES = Layout()
NOTHING = Wanted()
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Shape(NamedTuple):
    rows: int
    width: int


def validate(operands: Operands, activation: Activation, layout: Layout) -> None:
    """Raise unless ``operands`` fit the activation, the layout and one another.

    Raises:
        TypeError: A dtype is not one of the allowed ones.
        ValueError: Shapes or devices disagree; the message names both.
        UnsupportedError: fp64 on a device other than the CPU.

    Determinism: reads no data.
    """
    z = operands.z
    if z.dim() != 2:
        raise ValueError(must("z", "have shape (R, 2F) or (R, F)", tuple(z.shape)))
    if z.dtype not in DTYPES:
        raise TypeError(must("z", "be bf16, fp16, fp32 or fp64", z.dtype))
    if z.dtype == torch.float64 and z.device.type != "cpu":
        raise UnsupportedError(f"the activation kernels have no fp64; z is fp64 on {z.device}")
    shape = _Shape(z.shape[0], z.shape[1])
    if shape.width == 0:
        raise ValueError(must("z", "have at least one column", tuple(z.shape)))
    if activation.gated:
        if shape.width % 2:
            raise ValueError(must("z", "have an even number of columns, 2F", shape.width))
        layout.block(shape.width // 2)
    elif layout != HALVES:
        raise ValueError(must("layout", "be halves for an activation without a gate", layout.key))
    _validate_bias(operands, shape)
    _validate_rows(operands, shape)
    for name, tensor in zip(Operands._fields, operands, strict=True):
        if tensor is not None and tensor.device != z.device:
            raise ValueError(must(name, f"be on {z.device}, where z is", tensor.device))


def _validate_bias(operands: Operands, shape: _Shape) -> None:
    bias, offsets = operands.bias, operands.offsets
    if bias is None or bias.dim() != 2:
        if offsets is not None:
            raise ValueError(must("offsets", "come with a bias of shape (E, 2F)", "offsets alone"))
        if bias is None:
            return
    if bias.dim() not in (1, 2) or bias.shape[-1] != shape.width:
        rule = f"have shape ({shape.width},) or (E, {shape.width}), the columns of z"
        raise ValueError(must("bias", rule, tuple(bias.shape)))
    if bias.dtype not in (operands.z.dtype, torch.float32):
        raise TypeError(must("bias", f"be {operands.z.dtype} (as z) or fp32", bias.dtype))
    if bias.dim() == 2:
        if bias.shape[0] == 0:
            raise ValueError(must("bias", "have at least one expert", tuple(bias.shape)))
        expected = (bias.shape[0] + 1,)
        if offsets is None or offsets.shape != expected:
            actual = None if offsets is None else tuple(offsets.shape)
            rule = f"have shape {expected} = (E + 1,) with the E of bias"
            raise ValueError(must("offsets", rule, actual))
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(must("offsets", "be int32 or int64", offsets.dtype))


def _validate_rows(operands: Operands, shape: _Shape) -> None:
    probs, count = operands.row_probs, operands.num_rows
    if probs is not None:
        if probs.dim() != 1 or probs.shape[0] != shape.rows:
            rule = f"have shape (R,) with R = z.shape[0] = {shape.rows}"
            raise ValueError(must("row_probs", rule, tuple(probs.shape)))
        if probs.dtype not in DTYPES:
            raise TypeError(must("row_probs", "be bf16, fp16, fp32 or fp64", probs.dtype))
    if count is not None:
        if count.shape != (1,):
            raise ValueError(must("num_rows", "have shape (1,)", tuple(count.shape)))
        if count.dtype not in (torch.int32, torch.int64):
            raise TypeError(must("num_rows", "be int32 or int64", count.dtype))


def activate(
    z: Tensor,
    activation: Activation = SWIGLU,
    layout: Layout = HALVES,
    *,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
    row_probs: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Apply the expert function to rows.

    ``z' = D(z + bias[e(r)])`` (one rounding, only with a bias), then
    ``h[r] = D(glu(gate(z'[r]), up(z'[r])) * row_probs[r])``; everything between in fp32.

    Args:
        z: First projection, ``(R, 2F)``, or ``(R, F)`` without a gate; any row stride.
        activation: The function.
        layout: Order of gate and up in the columns of ``z`` and ``bias``.
        bias: ``(2F,)`` for all rows, or ``(E, 2F)`` with ``offsets``; dtype of ``z`` or fp32.
        offsets: ``(E + 1,)``, row bounds of the experts from 0 on; rows from ``offsets[E]`` on
            are neither read nor written.
        row_probs: Factor of each row, ``(R,)``; None means no factor.
        num_rows: ``(1,)`` int32 or int64 on the device; rows from there on are neither read nor
            written (their content in the result is unspecified). None means all.

    Returns:
        ``(R, F)`` in ``z.dtype``, contiguous; differentiable in z, bias and row_probs. Gradient
        rows past the count are unspecified for z and 0 for row_probs.

    Raises:
        TypeError: A dtype is not one of the allowed ones.
        ValueError: Shapes or devices disagree; the message names both.
        UnsupportedError: fp64 on a device other than the CPU.

    Determinism: elementwise; gradients repeat bit for bit (sums have one order).
    """
    operands = Operands(z, bias, offsets, row_probs, num_rows)
    validate(operands, activation, layout)
    return run(operands, activation.key, layout.key)


def activate_backward(
    dh: Tensor,
    operands: Operands,
    activation: Activation = SWIGLU,
    layout: Layout = HALVES,
    wanted: Wanted = NOTHING,
) -> Backward:
    """Return the gradients of ``activate`` for ``dh``, recomputing what it needs from ``z``.

    With ``a`` the activation without the factor: ``dz = D(dh * p * a')``,
    ``dp[r] = Σ dh[r] * a[r]`` (sums of 64 columns, added in ascending order), ``h = D(a * p)``,
    ``dbias[e] = Σ dz`` over the expert's rows (chunks of 64 rows, added in ascending order).
    The same formulas serve a probability that is applied after the second projection: pass the
    gradient without it.

    Args:
        dh: Gradient of h, ``(R, F)``, dtype of ``z`` or fp32, any row stride.
        operands: Tensors of the forward call.
        activation: The function.
        layout: Order of gate and up in the columns of ``z``.
        wanted: Which of dp, h and dbias to compute.

    Returns:
        The gradients; see ``Backward``.

    Raises:
        TypeError: A dtype is not one of the allowed ones.
        ValueError: Shapes or devices disagree, or dbias is wanted without a bias.
        UnsupportedError: fp64 on a device other than the CPU.

    Determinism: repeatable; every sum has one order, whatever the tile.
    """
    validate(operands, activation, layout)
    z = operands.z
    expected = (z.shape[0], z.shape[1] // activation.columns)
    if dh.shape != expected:
        raise ValueError(must("dh", f"have shape {expected} = (R, F)", tuple(dh.shape)))
    if dh.dtype not in (z.dtype, torch.float32):
        raise TypeError(must("dh", f"be {z.dtype} (as z) or fp32", dh.dtype))
    if dh.device != z.device:
        raise ValueError(must("dh", f"be on {z.device}, where z is", dh.device))
    if wanted.dbias and operands.bias is None:
        raise ValueError(must("wanted.dbias", "be False without a bias", True))
    return backward(dh, operands, activation.key, layout.key, wanted)

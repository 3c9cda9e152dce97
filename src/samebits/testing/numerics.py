"""The error budget of CONTRACT section 6 and the bitwise assert; the only two ways to compare.

For a set of elements with exact values e, ``error = rms(value - e) / scale``. A value passes where,
over the whole tensor and over its worst row (parameter gradients: its worst expert, since one
rounded value on the other side of a clamp moves a whole row of a weight gradient),

    error(value) <= 2 * error(plain) + 2 * eps(D)

with ``plain`` the reference's plain loop in D, the worst row of each taken on its own, and eps the
unit roundoff; in fp64, where the oracle is no better, 64 eps instead of 2.

The scale is max|e|, of a row its own, but at least a 16th of the tensor's: a sum that cancels keeps
the rounding errors of its terms. Rows of fewer than 16 elements (gradients of probabilities, single
sums that may cancel to anything) take the tensor's. A row that is 0 throughout in the oracle and in
the plain loop (a dropped token, an expert that nobody chose) must be exactly 0. Where the oracle is
infinite or NaN the value must be the same; where it is finite the value must be.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_SHORT_ROW = 16
# Smallest scale of a row, as a share of the tensor's.
_FLOOR = 1 / 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Judgement(NamedTuple):
    """The verdict on one tensor: the errors measured, what was allowed, and where it was worst."""

    passed: bool
    # error over the whole tensor, and what the budget allows; inf where a value that must be 0 is
    # not, or one is finite where it must not be, or the reverse.
    measured: float
    allowed: float
    # error of the worst row (or expert), what the budget allows there, and which row it is.
    worst_row: float
    worst_allowed: float
    row: int

    def __str__(self) -> str:
        verdict = "within" if self.passed else "over"
        return (
            f"{verdict} budget: error {self.measured:.2e} (allowed {self.allowed:.2e}), "
            f"worst row {self.row}: {self.worst_row:.2e} (allowed {self.worst_allowed:.2e})"
        )


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return eps(D): half the distance from 1 to the next number of ``dtype``."""
    return torch.finfo(dtype).eps / 2


def judge(
    value: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, *, per_expert: bool = False
) -> Judgement:
    """Compare ``value`` with ``exact`` under the error budget.

    Args:
        value: What is judged; any shape, float.
        plain: The same quantity by the plain loop in ``dtype``.
        exact: The same quantity in fp64.
        dtype: D, the working dtype.
        per_expert: Take index 0 as the expert and judge each expert instead of each row.

    Returns:
        The judgement.

    Raises:
        ValueError: The three have different shapes.

    Determinism: pure function of its arguments.
    """
    if value.shape != exact.shape or plain.shape != exact.shape:
        shapes = f"{tuple(value.shape)}, {tuple(plain.shape)}, {tuple(exact.shape)}"
        raise ValueError(f"value, plain and exact must have one shape, got {shapes}")
    if exact.numel() == 0:
        return Judgement(
            passed=True, measured=0.0, allowed=0.0, worst_row=0.0, worst_allowed=0.0, row=0
        )
    value, plain, exact = (tensor.detach().double() for tensor in (value, plain, exact))
    slack = (64 if dtype == torch.float64 else 2) * unit_roundoff(dtype)
    if per_expert:
        value, plain, exact = (t.flatten(1) for t in (value, plain, exact))
    whole, whole_plain = _errors(*(t.reshape(1, -1) for t in (value, plain, exact)))
    rows, rows_plain = _errors(*(_rows(t) for t in (value, plain, exact)))
    whole_allowed = 2 * float(whole_plain[0]) + slack
    rows_allowed = 2 * float(rows_plain.amax()) + slack
    worst = int(rows.argmax())
    measured, worst_row = float(whole[0]), float(rows[worst])
    passed = measured <= whole_allowed and worst_row <= rows_allowed
    return Judgement(passed, measured, whole_allowed, worst_row, rows_allowed, worst)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return the normwise error ``‖value − exact‖ / ‖exact‖``; 0 where both are 0."""
    value, exact = value.detach(), exact.detach()
    difference = (value.double() - exact.double()).norm()
    norm = exact.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value.reshape(1, -1)


def _errors(value: Tensor, plain: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the error of each row of ``value`` and of ``plain`` (module docstring)."""
    finite = exact.isfinite()
    same = (value == exact) | (value.isnan() & exact.isnan())
    wrong = torch.where(finite, ~value.isfinite(), ~same).any(-1)
    error, noise = (_rms(t, exact, finite & t.isfinite()) for t in (value, plain))
    scale = torch.where(finite, exact.abs(), 0.0).amax(-1)
    zero = (scale == 0) & (noise == 0)
    # Where everything must cancel, what the plain loop leaves is the only scale there is.
    largest = torch.where(scale.amax() > 0, scale.amax(), noise.amax())
    floor = largest if exact.shape[-1] < _SHORT_ROW else _FLOOR * largest
    scale = torch.maximum(scale, floor)
    wrong = wrong | (zero & (error > 0))
    # A scale of 0 is one of rows that are 0.
    scale = torch.where(scale > 0, scale, 1.0)
    return torch.where(wrong, float("inf"), error / scale), noise / scale


def _rms(value: Tensor, exact: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, value - exact, 0.0).square().mean(-1).sqrt()


def assert_within_budget(
    value: Tensor,
    plain: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    what: str = "value",
    *,
    per_expert: bool = False,
) -> None:
    """Raise ``AssertionError`` unless ``value`` is within the error budget; see ``judge``."""
    judgement = judge(value, plain, exact, dtype, per_expert=per_expert)
    if not judgement.passed:
        raise AssertionError(f"{what}: {judgement}")


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """Raise ``AssertionError`` unless every byte agrees, signed zeros and NaN payloads included.

    The message names the number of differing elements, the first coordinate and both values.
    """
    for name in ("shape", "dtype"):
        if getattr(actual, name) != getattr(expected, name):
            pair = f"{getattr(actual, name)} and {getattr(expected, name)}"
            raise AssertionError(f"{what}: {name} differs: {pair}")
    bits = [_bits(t.detach()) for t in (actual, expected)]
    different = (bits[0] != bits[1].to(bits[0].device)).nonzero()
    if different.numel():
        first = tuple(int(i) for i in different[0])
        pair = f"{actual[first].item()!r} and {expected[first].item()!r}"
        count = f"{different.shape[0]} of {actual.numel()} elements differ"
        raise AssertionError(f"{what}: {count}, first at {first}: {pair}")


def bitwise_equal(actual: Tensor, expected: Tensor) -> bool:
    """Return whether shape, dtype and every byte agree."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return bool(torch.equal(_bits(actual.detach()), _bits(expected.detach())))


def _bits(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])

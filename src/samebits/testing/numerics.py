"""The error budget of CONTRACT section 6 and the bitwise assert; the only two ways to compare.

For a set S of elements with exact values e, ``error(S) = rms(value - e) / max|e|``. A value passes
where, over the whole tensor and over its worst row (parameter gradients: its worst expert, since
one rounded value on the other side of a clamp moves a whole row of a weight gradient),

    error(value) <= 2 * error(plain) + 2 * eps(D)

with ``plain`` the reference's plain loop in D, the worst row of each taken on its own, and eps the
unit roundoff; in fp64, where the oracle is no better, 64 eps instead of 2. Where the exact values
of a row are all 0 the value must be exactly 0. A row's scale is its own max|e|; only rows of fewer
than 16 elements (gradients of probabilities, single sums that may cancel to anything) take the
tensor's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_SHORT_ROW = 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Judgement(NamedTuple):
    """The verdict on one tensor: the errors measured, what was allowed, and where it was worst."""

    passed: bool
    # error over the whole tensor, and what the budget allows.
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
        The judgement; NaN or Inf in ``value`` where ``exact`` is finite never passes.

    Determinism: pure function of its arguments.
    """
    if value.shape != exact.shape or plain.shape != exact.shape:
        shapes = f"{tuple(value.shape)}, {tuple(plain.shape)}, {tuple(exact.shape)}"
        raise ValueError(f"value, plain and exact must have one shape, got {shapes}")
    if exact.numel() == 0:
        return Judgement(
            passed=True, measured=0.0, allowed=0.0, worst_row=0.0, worst_allowed=0.0, row=0
        )
    value, plain, exact = value.detach(), plain.detach(), exact.detach()
    slack = (64 if dtype == torch.float64 else 2) * unit_roundoff(dtype)
    if per_expert:
        value, plain, exact = (t.flatten(1) for t in (value, plain, exact))
    whole = _errors(value.reshape(1, -1), exact.reshape(1, -1))[0]
    whole_allowed = 2 * _errors(plain.reshape(1, -1), exact.reshape(1, -1))[0] + slack
    rows = _errors(_rows(value), _rows(exact))
    rows_allowed = 2 * _finite_max(_errors(_rows(plain), _rows(exact))) + slack
    worst = int(torch.nan_to_num(rows, nan=float("inf")).argmax())
    passed = bool(whole <= whole_allowed) and bool(rows[worst] <= rows_allowed)
    return Judgement(
        passed, float(whole), float(whole_allowed), float(rows[worst]), float(rows_allowed), worst
    )


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return the normwise error ``‖value − exact‖ / ‖exact‖``; 0 where both are 0."""
    value, exact = value.detach(), exact.detach()
    difference = (value.double() - exact.double()).norm()
    norm = exact.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value.reshape(1, -1)


def _errors(value: Tensor, exact: Tensor) -> Tensor:
    """Return rms error over max of each row; a row that must be 0 and is not has error inf."""
    value, exact = value.double(), exact.double()
    rms = (value - exact).square().mean(-1).sqrt()
    scale = exact.abs().amax(-1)
    if exact.shape[-1] < _SHORT_ROW:
        scale = torch.where(scale > 0, scale.amax(), scale)
    relative = torch.where(scale > 0, rms / scale, torch.where(rms == 0, 0.0, float("inf")))
    return torch.where(torch.isnan(rms), float("inf"), relative)


def _finite_max(errors: Tensor) -> Tensor:
    return torch.where(torch.isfinite(errors), errors, 0.0).amax()


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

"""Is a result the one of its own value? By norm, and by which value's result it is nearest to.

For a tensor, ``distance(a, b) = |a - b| / max(|a|, |b|)`` in the Euclidean norm. A result is wrong
where its distance to the eager result passes what the dtype allows, or where it is clearly nearer
to the eager result of another value than to its own: small effects are seen too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Compiled and eager code may round differently; fused half-precision code rounds less often.
_ALLOWED: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
# A result may be this many times as far off as the first call, whose code is always its own.
_OVER_FIRST = 8.0
# "Clearly nearer": four times.
_NEARER = 0.25

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The worst tensor of a result."""

    wrong: bool
    # Name of the tensor ("out", "out[1]", "grad x"), its distance, and what was allowed.
    tensor: str
    distance: float
    allowed: float
    # Index of the other expected result that it is nearest to, -1 where its own is nearest.
    nearest: int = -1


def distance(a: Tensor, b: Tensor) -> float:
    """Return ``|a - b| / max(|a|, |b|)``; equal places count as equal where they are not finite.

    Determinism: as torch's sums.
    """
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((a[~same].isfinite() & b[~same].isfinite()).all()):
        return math.inf
    zero = torch.zeros((), dtype=torch.float64, device=a.device)
    difference = torch.where(same, zero, a - b).norm()
    scale = torch.maximum(*(torch.where(t.isfinite(), t, zero).norm() for t in (a, b)))
    return float(difference / scale)


def effect(a: Tensors, b: Tensors) -> float:
    """Return the largest distance between tensors of one name; infinite where names differ."""
    if a.keys() != b.keys():
        return math.inf
    return max((distance(a[name], b[name]) for name in a), default=0.0)


def compare(
    actual: Tensors, expected: Tensors, others: Sequence[Tensors], first: Mapping[str, float]
) -> Comparison:
    """Return the worst comparison of the tensors of a result.

    Args:
        actual: What the compiled function gave.
        expected: What the eager one gives for the same values.
        others: What the eager one gives for other values, same shape.
        first: Distances of the first call by tensor: what rounding alone does.
    """
    if actual.keys() != expected.keys():
        return Comparison(True, f"{sorted(actual)} instead of {sorted(expected)}", math.inf, 0.0)
    worst = Comparison(False, "", 0.0, 0.0)
    for name, value in actual.items():
        judged = _compare_one(name, value, expected[name], others, first.get(name, 0.0))
        if (judged.wrong, _share(judged)) > (worst.wrong, _share(worst)) or not worst.tensor:
            worst = judged
    return worst


def _compare_one(
    name: str, value: Tensor, own: Tensor, others: Sequence[Tensors], first: float
) -> Comparison:
    off = distance(value, own)
    allowed = max(allowed_for(own.dtype), _OVER_FIRST * first)
    rounding = max(_OVER_FIRST * first, torch.finfo(_float(own.dtype)).eps)
    distances = [distance(value, other[name]) if name in other else math.inf for other in others]
    nearest = min(range(len(distances)), key=distances.__getitem__, default=-1)
    nearer = nearest >= 0 and distances[nearest] < _NEARER * off and off > rounding
    return Comparison(off > allowed or nearer, name, off, allowed, nearest if nearer else -1)


def allowed_for(dtype: torch.dtype) -> float:
    """Return the distance that rounding alone may cause between eager and compiled code."""
    return _ALLOWED.get(dtype, _ALLOWED[torch.float32] if dtype.is_floating_point else 0.0)


def _float(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float64


def _share(comparison: Comparison) -> float:
    if comparison.allowed == 0.0:
        return math.inf if comparison.distance else 0.0
    return comparison.distance / comparison.allowed


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, a sparse one as a dense one."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def named_tensors(value: Any, name: str = "out") -> dict[str, Tensor]:
    """Return the tensors and numbers in a result by readable name; everything else is left out."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(float(value), dtype=torch.float64)}
    found: dict[str, Tensor] = {}
    if isinstance(value, Mapping):
        for key in value:
            found |= named_tensors(value[key], f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            found |= named_tensors(item, f"{name}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        for field in value.__dataclass_fields__:
            found |= named_tensors(getattr(value, field), f"{name}.{field}")
    return found

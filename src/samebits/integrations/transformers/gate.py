"""Find the ``Activation`` that a function of transformers computes, by its values.

A class of transformers says nothing about its gate but the code of ``_apply_gate``. So that code is
run on chosen values, in fp64, and compared with every activation that the scalars it reads can
form. One that agrees everywhere, gradients included, is the answer; if none does, the class is
refused.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from samebits.activation import ACTIVATIONS, Activation, apply
from samebits.errors import UnsupportedError
from samebits.integrations.transformers.oracle import Float64Casts
from samebits.weights import Layout, merge_gate_up

# Two functions closer than this, relative to max(|value|, 1), are one function in fp32: it is a
# sixty-fourth of fp32's unit roundoff.
TOLERANCE = 2.0**-30

# Slopes that code may hold as a literal: 1, and the sigmoid approximation of gelu.
_ALPHAS = (1.0, 1.702)
_OFFSETS = (0.0, 1.0)
_GRID = (-40.0, -9.0, -3.0, -1.0, -0.3, -1e-3, 0.0, 1e-3, 0.2, 0.7, 1.5, 4.0, 6.0, 12.0, 45.0)
# Multiples of each scalar: inside, next to, at and beyond the bound it may be.
_AROUND = (-3.0, -1.25, -1.001, -1.0, -0.999, 0.5, 0.999, 1.0, 1.001, 1.25, 3.0)
_COLUMNS = 4
# More scalars than this would make the candidates too many, and no known gate has them.
_MOST_SCALARS = 8


def candidates(scalars: Sequence[float], *, gated: bool) -> Iterator[Activation]:
    """Yield every activation that ``scalars`` can form, simplest first.

    Determinism: a function of its arguments.
    """
    positive = [s for s in dict.fromkeys(scalars) if s > 0]
    if not gated:
        for kind, row in ACTIVATIONS.items():
            if row.ungated:
                alphas = dict.fromkeys((*_ALPHAS, *positive)) if "alpha" in row.options else (1.0,)
                yield from (Activation(kind=kind, gated=False, alpha=a) for a in alphas)
        return
    found = [*_clamped(scalars, positive), *_softcapped(scalars, positive)]
    yield from sorted(found, key=lambda activation: activation.key.count("="))


def _clamped(scalars: Sequence[float], positive: Sequence[float]) -> Iterator[Activation]:
    limits: list[float | None] = [None, *positive]
    offsets = dict.fromkeys((*_OFFSETS, *scalars))
    for kind, row in ACTIVATIONS.items():
        if "limit" not in row.options:
            continue
        alphas = dict.fromkeys((*_ALPHAS, *positive)) if "alpha" in row.options else (1.0,)
        for alpha, limit, offset in itertools.product(alphas, limits, offsets):
            yield Activation(kind=kind, alpha=alpha, limit=limit, linear_offset=offset)
            if limit is not None:
                yield Activation(
                    kind=kind,
                    alpha=alpha,
                    limit=limit,
                    limit_position="post",
                    linear_offset=offset,
                )


def _softcapped(scalars: Sequence[float], positive: Sequence[float]) -> Iterator[Activation]:
    caps: list[float | None] = [None, *positive]
    offsets = dict.fromkeys((*_OFFSETS, *scalars))
    for gate, up, offset in itertools.product(positive, caps, offsets):
        yield Activation(kind="situ", gate_softcap=gate, up_softcap=up, linear_offset=offset)


def identify(
    function: Callable[[Tensor], Tensor],
    scalars: Sequence[float],
    layout: Layout,
    *,
    gated: bool,
    name: str,
) -> tuple[Activation, float]:
    """Return the activation that ``function`` computes, and the error measured.

    Args:
        function: Maps the first projection, ``(rows, 2F)`` gated or ``(rows, F)``, to ``h``.
        scalars: Numbers that the function reads; the options of the answer come from them.
        layout: Order of gate and up in the last dimension.
        gated: Whether there is an up part.
        name: How messages call the function.

    Returns:
        The simplest activation within ``TOLERANCE``, and its largest error over all values,
        relative to max(|value|, 1).

    Raises:
        UnsupportedError: No activation agrees; the message names the closest.

    Determinism: a function of its arguments; no random numbers.
    """
    scalars = [float(s) for s in dict.fromkeys(scalars) if math.isfinite(s)]
    if len(scalars) > _MOST_SCALARS:
        raise UnsupportedError(
            f"{name} reads {len(scalars)} numbers, more than any known gate: {scalars}"
        )
    gate, up = _probes(scalars, gated=gated)
    value, slopes = _evaluate(
        lambda g, u: function(g if u is None else merge_gate_up(g, u, layout)), gate, up
    )
    closest: tuple[float, str] = (math.inf, "none")
    for activation in candidates(scalars, gated=gated):
        expected, expected_slopes = _evaluate(partial(apply, activation), gate, up)
        error = _error(value, expected)
        if error <= TOLERANCE:
            # Next to a bound a gradient may be either of two values: judge the others.
            smooth = _smooth(activation, gate, up, scalars)
            error = max(
                error,
                *(
                    _error(s[smooth], e[smooth])
                    for s, e in zip(slopes, expected_slopes, strict=True)
                ),
            )
        if error <= TOLERANCE:
            return activation, error
        closest = min(closest, (error, activation.key))
    raise UnsupportedError(
        f"{name} is no activation that samebits knows with the numbers it reads, {scalars}: "
        f"the closest is {closest[1]}, off by {closest[0]:.1e}"
    )


def _probes(scalars: Sequence[float], *, gated: bool) -> tuple[Tensor, Tensor | None]:
    values = list(dict.fromkeys([*_GRID, *(s * a for s in scalars for a in _AROUND)]))
    points = torch.tensor(values, dtype=torch.float64, device="cpu")
    if not gated:
        gate = torch.cat([points, points.new_full((1,), math.nan)])
        return _table(gate), None
    gate, up = (axis.flatten() for axis in torch.meshgrid(points, points, indexing="ij"))
    nan = points.new_tensor([math.nan])
    one = points.new_ones(1)
    return _table(torch.cat([gate, nan, one])), _table(torch.cat([up, one, nan]))


def _table(points: Tensor) -> Tensor:
    """Return ``points`` as rows of a few columns, so that mixing columns changes the values."""
    missing = -points.numel() % _COLUMNS
    return torch.cat([points, points.new_zeros(missing)]).reshape(-1, _COLUMNS)


def _evaluate(
    function: Callable[[Tensor, Tensor | None], Tensor], gate: Tensor, up: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [t.clone().requires_grad_() for t in (gate, up) if t is not None]
    with torch.enable_grad(), Float64Casts():
        value = function(leaves[0], leaves[1] if up is not None else None)
        if value.shape != gate.shape:
            raise UnsupportedError(
                f"the gate maps {tuple(gate.shape)} gates to shape {tuple(value.shape)}"
            )
        slopes = torch.autograd.grad(value.sum(), leaves, allow_unused=True, materialize_grads=True)
    return value.detach().double(), slopes


def _error(value: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to max(|expected|, 1); inf where NaN is not shared."""
    if not torch.equal(value.isnan(), expected.isnan()):
        return math.inf
    error = (value - expected).abs() / expected.abs().clamp(min=1.0)
    return float(error.nan_to_num(nan=0.0, posinf=math.inf).max()) if error.numel() else 0.0


def _smooth(
    activation: Activation, gate: Tensor, up: Tensor | None, scalars: Sequence[float]
) -> Tensor:
    kinks = torch.tensor([0.0, *scalars, *(-s for s in scalars)], dtype=torch.float64, device="cpu")
    parts = [gate] if up is None else [gate, up]
    if activation.limit_position == "post":
        act = apply(
            Activation(kind=activation.kind, alpha=activation.alpha), gate, torch.ones_like(gate)
        )
        parts.append(act)
    smooth = torch.ones_like(gate, dtype=torch.bool)
    for part in parts:
        away = ((part[..., None] - kinks).abs() > 1e-6).all(-1)
        smooth &= away & ~part.isnan()
    return smooth

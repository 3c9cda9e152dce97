"""The description of an expert's function: its spelling, its refusals, its values and slopes."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import Activation
from samebits.activation import ACTIVATIONS, Derivative, apply, derivative
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = pytest.mark.reference

POSITIVE = st.floats(1e-3, 1e3)
MAYBE = st.none() | POSITIVE


@st.composite
def activations(draw: st.DrawFn) -> Activation:
    kind = draw(st.sampled_from(sorted(ACTIVATIONS)))
    row = ACTIVATIONS[kind]
    if row.ungated and draw(st.booleans()):
        alpha = draw(POSITIVE) if "alpha" in row.options else 1.0
        return Activation(kind=kind, gated=False, alpha=alpha)
    values: dict[str, Any] = {"linear_offset": draw(st.floats(-4, 4))}
    if "alpha" in row.options:
        values["alpha"] = draw(POSITIVE)
    if "limit" in row.options:
        values["limit"] = draw(MAYBE)
        if values["limit"] is not None:
            values["limit_position"] = draw(st.sampled_from(["pre", "post"]))
    if "gate_softcap" in row.options:
        values |= {"gate_softcap": draw(POSITIVE), "up_softcap": draw(MAYBE)}
    return Activation(kind=kind, **values)


@settings(derandomize=True, deadline=None)
@given(activations())
def test_key_round_trip(activation: Activation) -> None:
    assert Activation.parse(activation.key) == activation
    assert Activation.parse(activation.key).key == activation.key


@settings(derandomize=True, deadline=None)
@given(activations(), activations())
def test_one_function_one_key(first: Activation, second: Activation) -> None:
    assert (first == second) == (first.key == second.key)


def test_integers_and_negative_zero_have_the_spelling_of_the_number() -> None:
    assert Activation(limit=7, linear_offset=-0.0) == Activation(limit=7.0)
    assert Activation(limit=7, linear_offset=-0.0).key == "silu(limit=7.0)"


def test_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Activation().limit = 1.0  # type: ignore[misc]


REFUSED = [
    ({"kind": "swish"}, ValueError, "unknown activation kind 'swish'; expected one of 'gelu'"),
    ({"limit": 0}, ValueError, r"limit must be finite and > 0 \(None means no clamp\), got 0"),
    ({"limit": -1.0}, ValueError, r"limit must be finite and > 0 .*, got -1.0"),
    ({"limit": float("nan")}, ValueError, r"limit must be finite and > 0 .*, got nan"),
    ({"limit": float("inf")}, ValueError, r"limit must be finite and > 0 .*, got inf"),
    ({"limit": True}, TypeError, "limit must be a plain Python number, got True"),
    (
        {"limit": torch.tensor(7.0)},
        TypeError,
        r"limit must be a plain Python number, got tensor\(7.\)",
    ),
    ({"linear_offset": float("inf")}, ValueError, "linear_offset must be finite, got inf"),
    ({"gated": 1}, TypeError, "gated must be a bool, got 1"),
    ({"limit_position": "mid", "limit": 1.0}, ValueError, "unknown limit_position 'mid'"),
    ({"limit_position": "post"}, ValueError, "limit must be given with limit_position='post'"),
    (
        {"kind": "gelu", "alpha": 1.702},
        ValueError,
        "alpha must be 1.0 for kind 'gelu', which does not",
    ),
    ({"kind": "silu", "up_softcap": 5.0}, ValueError, "up_softcap must be None for kind 'silu'"),
    ({"kind": "situ"}, ValueError, "gate_softcap must be given for kind 'situ', got None"),
    (
        {"kind": "situ", "gate_softcap": 4.0, "limit": 7.0},
        ValueError,
        "limit must be None for kind 'situ'",
    ),
    (
        {"kind": "situ", "gate_softcap": 4.0, "gated": False},
        ValueError,
        "gated must be True for kind 'situ'",
    ),
    (
        {"gated": False, "limit": 7.0},
        ValueError,
        "limit must be None for kind 'silu' without a gate",
    ),
    (
        {"gated": False, "linear_offset": 1.0},
        ValueError,
        "linear_offset must be 0.0 for kind 'silu' without",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_an_option_out_of_range_or_without_effect_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Activation(**options)


@pytest.mark.parametrize(
    "key", ["", "silu(", "silu(limit=1.0", "silu(speed=1.0)", "silu limit=1.0"]
)
def test_a_key_of_the_wrong_form_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"key must look like|unknown activation option"):
        Activation.parse(key)


# (activation, gate, up, h): formulas of CONTRACT section 2, evaluated in fp64 by hand.
VALUES = [
    (Activation(), 1.0, 3.0, 2.193175735890015),
    (Activation(alpha=1.702), 1.0, 3.0, 2.537387297798464),
    (Activation(linear_offset=1.0), 1.0, 3.0, 2.9242343145200196),
    # Clamped before act: silu(1) * 1; after it: min(silu(3), 1) * 1.
    (Activation(limit=1.0), 3.0, 3.0, 0.7310585786300049),
    (Activation(limit=1.0, limit_position="post"), 3.0, 3.0, 1.0),
    # The gate has no lower bound, up has both.
    (Activation(limit=1.0), -5.0, 2.0, -0.03346425462142428),
    (Activation(limit=1.0), 2.0, -5.0, -0.7310585786300049),
    (Activation(kind="relu2", gated=False), 2.0, None, 4.0),
    (Activation(kind="relu2", gated=False), -2.0, None, 0.0),
    # The three things called gelu differ at 2 by much more than a rounding.
    (Activation(kind="gelu", gated=False), 2.0, None, 1.9544997361036416),
    (Activation(kind="gelu_tanh", gated=False), 2.0, None, 1.954597694087775),
    (Activation(alpha=1.702, gated=False), 2.0, None, 1.9356586231442083),
    (Activation(kind="situ", gate_softcap=4.0, up_softcap=25.0), 8.0, 50.0, 92.90375177797013),
]


@pytest.mark.parametrize(("activation", "gate", "up", "expected"), VALUES)
def test_values(activation: Activation, gate: float, up: float | None, expected: float) -> None:
    h = apply(
        activation,
        *(None if v is None else torch.tensor([v], dtype=torch.float64) for v in (gate, up)),
    )

    exact = torch.tensor([expected], dtype=torch.float64)
    assert_within_budget(h, exact, exact, torch.float64)


def _leaves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.clone().requires_grad_(), values.flip(0).clone().requires_grad_()


BOUND = 1.5
SLOPES = [
    Activation(),
    Activation(alpha=1.702, limit=BOUND, linear_offset=1.0),
    Activation(limit=BOUND, limit_position="post"),
    Activation(kind="gelu", limit=BOUND),
    Activation(kind="gelu_tanh", limit=BOUND, limit_position="post", linear_offset=0.25),
    Activation(kind="relu"),
    Activation(kind="relu2"),
    Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0, linear_offset=-0.5),
]


@pytest.mark.parametrize("activation", SLOPES, ids=str)
def test_closed_form_slopes_equal_autograd_at_and_beyond_every_bound(
    activation: Activation,
) -> None:
    points = torch.cat([torch.linspace(-6, 6, 49), torch.tensor([-BOUND, BOUND, -0.0])]).double()
    gate, up = _leaves(points)
    h = apply(activation, gate, up)
    expected = torch.autograd.grad(h.sum(), (gate, up))

    closed: Derivative = derivative(activation, gate.detach(), up.detach())

    assert closed.up is not None
    assert_bitwise_equal(closed.h, h.detach())
    for value, exact in zip((closed.gate, closed.up), expected, strict=True):
        assert_within_budget(value, exact, exact, torch.float64)


@pytest.mark.parametrize("kind", [k for k, row in ACTIVATIONS.items() if row.ungated])
def test_closed_form_slope_without_a_gate(kind: str) -> None:
    z = torch.linspace(-6, 6, 49).double().requires_grad_()
    activation = Activation(kind=kind, gated=False)
    (expected,) = torch.autograd.grad(apply(activation, z, None).sum(), z)

    closed = derivative(activation, z.detach(), None)

    assert closed.up is None
    assert_within_budget(closed.gate, expected, expected, torch.float64)


def test_gradient_of_a_clamp_is_one_at_the_bound_and_zero_outside() -> None:
    limit = 7.0
    up = torch.tensor([-8.0, -7.0, 0.0, 7.0, 8.0, float("nan")], requires_grad=True)
    gate = torch.ones_like(up)

    (slope,) = torch.autograd.grad(apply(Activation(kind="relu", limit=limit), gate, up).sum(), up)

    assert slope.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("activation", [a for a in SLOPES if a.limit is not None], ids=str)
def test_nan_passes_every_clamp(activation: Activation) -> None:
    nan, one = torch.tensor([float("nan")]), torch.tensor([1.0])

    assert apply(activation, nan, one).isnan().all()
    assert apply(activation, one, nan).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", SLOPES, ids=str)
def test_bits_do_not_depend_on_the_place_of_an_element(
    activation: Activation, dtype: torch.dtype
) -> None:
    gate = torch.linspace(-9, 9, 1009, dtype=dtype)
    whole = derivative(activation, gate, gate)
    assert whole.up is not None

    for first in range(0, 1009, 7):
        # Fewer than a vector of any instruction set, so that all of it is tail.
        part = gate[first : first + 3].clone()
        alone = derivative(activation, part, part)
        assert alone.up is not None
        assert_bitwise_equal(alone.h, whole.h[first : first + 3])
        assert_bitwise_equal(alone.gate, whole.gate[first : first + 3])
        assert_bitwise_equal(alone.up, whole.up[first : first + 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [88.0, 104.0, 710.0, 1e4])
def test_gradients_are_finite_far_from_zero(dtype: torch.dtype, size: float) -> None:
    gate = torch.tensor([-size, size], dtype=dtype, requires_grad=True)
    h = apply(Activation(alpha=1.702), gate, torch.ones_like(gate))

    (slope,) = torch.autograd.grad(h.sum(), gate)
    closed = derivative(Activation(alpha=1.702), gate.detach(), torch.ones_like(gate))

    for value in (h, slope, closed.gate):
        assert value.isfinite().all()
    assert slope[1] == 1.0

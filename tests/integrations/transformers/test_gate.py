import pytest
import torch

from samebits.activation import Activation, apply
from samebits.errors import UnsupportedError
from samebits.integrations.transformers.gate import candidates, identify
from samebits.weights import Layout, split_gate_up

pytestmark = pytest.mark.reference

_HALVES = Layout()
KEYS = [
    "silu",
    "silu(alpha=1.702)",
    "silu(limit=10.0)",
    "silu(limit=10.0,limit_position=post)",
    "silu(limit=4.0,limit_position=post)",
    "silu(alpha=1.702,limit=7.0,linear_offset=1.0)",
    "silu(alpha=2.5,limit=0.5)",
    "gelu",
    "gelu_tanh",
    "gelu_tanh(limit=5.0)",
    "relu",
    "relu2(limit=3.0)",
    "situ(gate_softcap=4.0)",
    "situ(gate_softcap=4.0,up_softcap=25.0)",
    "situ(gate_softcap=25.0,up_softcap=4.0)",
    "silu(gated=False)",
    "gelu(gated=False)",
    "gelu_tanh(gated=False)",
    "relu2(gated=False)",
]


def scalars_of(activation):
    names = ("alpha", "limit", "linear_offset", "gate_softcap", "up_softcap")
    return [v for n in names if (v := getattr(activation, n)) not in (None, 0.0, 1.0)]


def function_of(activation, layout):
    def function(z):
        parts = split_gate_up(z, layout) if activation.gated else (z, None)
        return apply(activation, *parts)

    return function


def find(function, scalars, layout=_HALVES, *, gated=True):
    return identify(function, scalars, layout, gated=gated, name="its gate")[0]


@pytest.mark.parametrize("key", KEYS)
def test_every_function_is_found_among_its_neighbours(key):
    activation = Activation.parse(key)
    layout = Layout(interleave=1) if activation.gated else Layout()
    # Two numbers that the function does not use must not be taken for one of its options.
    scalars = [13.0, *scalars_of(activation), 0.3]
    found = find(function_of(activation, layout), scalars, layout, gated=activation.gated)
    assert found == activation


def test_candidates_start_with_the_simplest():
    assert next(iter(candidates([7.0, 1.702], gated=True))) == Activation()


def plain(z):
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swapped(z):
    up, gate = z.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def interleaved(z):
    return torch.nn.functional.silu(z[..., ::2]) * z[..., 1::2]


def clamped_below(z):
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(-7, 7)) * up.clamp(-7, 7)


def literal_limit(z):
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=6.5)) * up.clamp(-6.5, 6.5)


def without_nan(z):
    return plain(z.nan_to_num())


def straight_through(z):
    gate, up = z.chunk(2, -1)
    return torch.nn.functional.silu(gate.detach()) * up


def mixing_columns(z):
    return plain(z).flip(-1)


def slightly_off(z):
    return plain(z) * (1 + 1e-7)


def narrow(z):
    return plain(z)[..., :1]


@pytest.mark.parametrize(
    "function",
    [
        swapped,
        interleaved,
        clamped_below,
        literal_limit,
        without_nan,
        straight_through,
        mixing_columns,
        slightly_off,
        narrow,
    ],
)
def test_a_function_that_no_activation_is_gets_refused(function):
    with pytest.raises(UnsupportedError, match=r"the closest is|maps"):
        find(function, [7.0])


def test_casts_inside_the_gate_do_not_blur_the_answer():
    def casting(z):
        gate, up = z.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)

    activation, error = identify(casting, [], Layout(), gated=True, name="its gate")
    assert activation == Activation()
    assert error < 1e-14


def test_too_many_numbers_are_refused():
    with pytest.raises(UnsupportedError, match="more than any known gate"):
        find(plain, list(range(2, 20)))

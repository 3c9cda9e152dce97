"""Targets of the audit's tests: where a number can live; programs known to be right or wrong."""

import dataclasses
import enum
import functools
import os
from typing import Annotated

import torch
import torch.nn.functional as F
from stale_programs import Adapter, Layers

SCALE = 0.5


def clamped_swiglu(x: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = torch.chunk(x, 2, -1)
    return F.silu(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)


def multiply(x, limit):
    return x * limit


multiply_compiled = torch.compile(multiply)


def with_global(x):
    return x * SCALE


def with_default(x, eps=1e-3, *, flag=False):
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def make_closure(limit):
    def with_closure(x):
        return clamped_swiglu(x, limit)

    return with_closure


@dataclasses.dataclass(frozen=True)
class Options:
    limit: float = 0.5
    rows: int = 3
    name: str = "options"


def with_options(x, options, table):
    return clamped_swiglu(x, options.limit) * table["scale"][0]


OPTIONS = Options()
TABLE = {"scale": [0.5]}


def with_global_objects(x):
    return clamped_swiglu(x, OPTIONS.limit) * TABLE["scale"][0]


class WithClassNumber:
    limit = 0.5
    mode = enum.IntEnum("Mode", "ON OFF").ON

    def run(self, x):
        return x.clamp(max=self.limit) * self.mode


class Callable:
    """An object that is called, with numbers of its own and of its class."""

    factor = 2.0

    def __init__(self):
        self.limit = 0.5

    def __call__(self, x):
        return x.clamp(max=self.limit) * self.factor

    def run(self, x):
        return self(x)

    @classmethod
    def of_class(cls, x):
        return x * cls.factor


class WithSlots:
    __slots__ = ("limit", "unset")

    def __init__(self):
        self.limit = 0.5


def with_attribute(x, options):
    return x.clamp(max=options.limit)


def limit_first(limit, x):
    return x.clamp(max=limit)


def positional_only(x, limit=0.5, /):
    return x.clamp(max=limit)


kept = torch.zeros(8)


def keeps_its_graph(x, s):
    global kept
    kept = kept + x.mean(0) * s
    return kept


def sparse(x, s):
    return (x * s).to_sparse()


def imaginary(x, limit):
    return x * complex(1.0, limit)


def annotated(x: Annotated[torch.Tensor, "rows"], limit: float, offset=SCALE):
    return x.clamp(max=limit) + offset


forward_compiled = torch.compile(clamped_swiglu)


@torch.compile
def clamped_swiglu_backward(grad, x, limit):
    """The gradient written out, with comparisons: stale without any autograd."""
    gate, up = torch.chunk(x, 2, -1)
    act = F.silu(gate)
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid)) * (act <= limit).to(x.dtype)
    inside = ((up >= -limit) & (up <= limit)).to(x.dtype)
    d_gate = grad * slope * up.clamp(min=-limit, max=limit)
    return torch.cat((d_gate, grad * act.clamp(max=limit) * inside), -1)


class FusedSwiGLU(torch.autograd.Function):
    """The form of a trainer's fused activation: both directions compiled by themselves."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return forward_compiled(x, limit)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return clamped_swiglu_backward(grad, x, ctx.limit), None


def fused_swiglu(x, limit):
    return FusedSwiGLU.apply(x, limit)


_launched = {}


def forgetful_launch(x, step: int):
    """A launcher whose cache knows the shape and forgets the number (helion#2793's kind)."""
    key = (tuple(x.shape), x.dtype)
    if key not in _launched:
        _launched[key] = step
    return x + _launched[key]


def careful_launch(x, step: int):
    return x + step


def random_eager(x, scale):
    return x * scale + torch.randn(4, 8, generator=_GENERATOR)


_GENERATOR = torch.Generator()


def tensor_argument(x, limit):
    return clamped_swiglu(x, limit)


def leaves(x, limit):
    os._exit(9)


def leaves_well(x, limit):
    os._exit(0)


def text_argument(x, limit):
    return clamped_swiglu(x, float(limit))


def failing_inputs():
    raise KeyError("no such data")


def two_floats():
    return (torch.randn(4, 8), 0.5), {}


def float_and_gradient():
    return (torch.randn(4, 4), torch.randn(4, 8), 0.5), {}


def with_objects():
    return (torch.randn(4, 8), Options(), {"scale": [2.0, "text"]}), {}


def one_tensor():
    return (torch.randn(4, 8),), {}


def with_slots():
    return (torch.randn(4, 8), WithSlots()), {}


def tensor_and_infinity():
    return (torch.randn(4, 8), float("inf")), {}


def tensor_and_int():
    return (torch.randn(4, 8), 3), {}


def inputs_by_cuda():
    if torch.cuda._is_in_bad_fork():
        torch.cuda._lazy_init()
    return tensor_and_int()


_IMPORTED_BY = os.getpid()


def inputs_by_a_library_that_no_fork_can_use():
    if os.getpid() != _IMPORTED_BY:
        raise RuntimeError("CUDA error: initialization error")
    return tensor_and_int()


def tensor_limit():
    return (torch.randn(4, 8), torch.tensor(0.5)), {}


def text_limit():
    return (torch.randn(4, 8), "0.5"), {}


closure = make_closure(0.5)
frozen = functools.partial(clamped_swiglu, limit=0.5)
layers = Layers()
adapter = Adapter()

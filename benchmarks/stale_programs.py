"""Small programs with Python numbers, which ``stale_battery.py`` audits, and their inputs.

``stale_table.py`` says which of them go stale.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


def clamped_swiglu(x, s):
    gate, up = torch.chunk(x, 2, -1)
    return F.silu(gate).clamp(max=s) * up.clamp(min=-s, max=s)


def clamped_interleaved_swiglu(x, s):
    gate, up = x[..., ::2].clamp(max=s), x[..., 1::2].clamp(-s, s)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


def rms_norm_scaled(x, s):
    return F.rms_norm(x * s, (8,), eps=s + 1e-3)


def rms_norm(x, s):
    return F.rms_norm(x, (8,), eps=s)


def huber_scaled(x, s):
    return F.huber_loss(x * s, torch.ones_like(x), delta=s + 1)


def attention_scale(x, s):
    rows = x.view(1, 1, -1, 8)
    return F.scaled_dot_product_attention(rows * s, rows, rows, scale=s + 0.1)


def multiply(x, s):
    return x * s


def leaky_relu(x, s):
    return F.leaky_relu(x, s) * s


def power(x, s):
    return x.abs() ** s * s


def add_alpha(x, s):
    return torch.add(x, x, alpha=s) * s


def full(x, s):
    return x + torch.full((8,), s, device=x.device)


def where(x, s):
    return torch.where(x > s, x, s)


def softplus(x, s):
    return F.softplus(x, beta=s) * s


def addcmul(x, s):
    return torch.addcmul(x, x, x, value=s) * s


def masked_fill(x, s):
    return x.masked_fill(x > 0, s) * s


def hardtanh(x, s):
    return F.hardtanh(x, -s, s) * s


def layer_norm_scaled(x, s):
    return F.layer_norm(x * s, (8,), eps=s + 1e-3)


def label_smoothing(x, s):
    target = torch.arange(x.shape[0], device=x.device) % 8
    return F.cross_entropy(x * s, target, label_smoothing=s / 4)


def interpolate(x, s):
    return F.interpolate((x * s)[None], scale_factor=s + 1.5)


def graph_break(x, s):
    """Python goes on with an expression of the number, after a call that is not compiled."""
    y, t = x * s, s + 0.1
    torch._dynamo.graph_break()
    return y * t


class Layers(nn.Module):
    """Two layers, each with its own limit."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(limit) for limit in (0.5, 0.25))

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([layer(x), x[..., : x.shape[-1] // 2]], -1)
        return x


class Layer(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return clamped_swiglu(x * self.weight, self.limit)


class Adapter(nn.Module):
    """A linear layer with a low-rank part that is switched on and off, and scaled."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))
        self.enabled, self.scale = True, 0.5

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.enabled:
            y = y + F.linear(F.linear(x, self.down), self.up) * self.scale
        return F.rms_norm(y, (8,), eps=self.scale + 1e-3)


@dataclasses.dataclass
class Options:
    limit: float = 0.5


def swapped_options(x, options):
    return clamped_swiglu(x, options.limit)


def make_closure(limit):
    def in_closure(x):
        return clamped_swiglu(x, limit)

    return in_closure


@torch.compile
def clamped_swiglu_backward(grad, x, s):
    """The gradient written out, as trainers compile it: stale without any autograd."""
    gate, up = torch.chunk(x, 2, -1)
    act, sigmoid = F.silu(gate), torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid)) * (act <= s).to(x.dtype)
    inside = ((up >= -s) & (up <= s)).to(x.dtype)
    d_gate = grad * slope * up.clamp(min=-s, max=s)
    return torch.cat((d_gate, grad * act.clamp(max=s) * inside), -1)


@torch.library.custom_op("stale_programs::scaled", mutates_args=())
def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
    return x * s


@scaled.register_fake
def _(x, s):  # noqa: ARG001  # signature of the operator
    return torch.empty_like(x)


def _keep(ctx, inputs, output):  # noqa: ARG001  # torch's signature
    ctx.s = inputs[1]


scaled.register_autograd(lambda ctx, grad: (grad * ctx.s, None), setup_context=_keep)


def custom_op_expression(x, s):
    return scaled(x * s, s + 0.1)


def custom_op_bare(x, s):
    return scaled(x, s)


_launched: dict = {}


def launcher_forgets(x, step: int):
    """A launcher whose cache knows the shape and forgets the number (helion#2793)."""
    return x + _launched.setdefault((tuple(x.shape), x.dtype), step)


def launcher_forgets_one(x, step: int):
    """A launcher that drops a factor of 1 from its code, and forgets that it did."""
    is_one = _launched.setdefault((tuple(x.shape), "one"), step == 1)
    return x if is_one else x * step


def integer(x, n: int):
    return (x * n).clamp(-n / 4, n / 4)


def branches(x, s):
    """Two ways through it are one graph: code of another value is reused, and rightly."""
    y = x * s
    if s in (0.25, 0.3):
        return y + 1
    return y + 1 if s > 0.7 else y


def tensor_inside(x, s):
    limit = x.new_ones(()) * s
    return torch.minimum(x * s, limit)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x)
        ctx.s = s
        return x.clamp(-s, s)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0].abs() <= ctx.s), None


def autograd_function(x, s):
    return Clamp.apply(x, s)


layers, adapter, closure = Layers(), Adapter(), make_closure(0.5)


def on_cpu():
    return (torch.randn(4, 8), 0.5), {}


def on_cuda():
    return (torch.randn(4, 8, device="cuda"), 0.5), {}


def one_tensor():
    return (torch.randn(4, 8),), {}


def with_options():
    return (torch.randn(4, 8), Options()), {}


def with_gradient():
    return (torch.randn(4, 4), torch.randn(4, 8), 0.5), {}


def with_integer():
    return (torch.randn(4, 8), 3), {}

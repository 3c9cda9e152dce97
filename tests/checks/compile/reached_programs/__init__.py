"""A package whose numbers are reached through modules, classes, methods, hooks and decorators."""

import functools

import torch
from torch import nn

from reached_programs import activations, settings

SCALE = 0.5


def by_module(x):
    return x.clamp(max=settings.LIMIT)


def by_class(x):
    return x.clamp(max=settings.Namespace.limit)


def by_function_of_a_module(x):
    return activations.scaled(x)


TABLE = {"scaled": (activations.scaled, "a note")}


def by_table(x, kind="scaled"):
    return TABLE[kind][0](x)


def by_default(x, options={"limit": 0.5}):  # noqa: B006  # as people write it
    return x.clamp(max=options["limit"])


class Clamp(torch.autograd.Function):
    LIMIT = 0.5

    @staticmethod
    def forward(ctx, x):
        return x.clamp(max=Clamp.LIMIT)


def by_autograd_function(x):
    return Clamp.apply(x)


class Activation:
    def __init__(self):
        self.limit = 0.5

    def __call__(self, x):
        return x.clamp(max=self.limit)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = Activation()

    def forward(self, x):
        return self._scaled(self.activation(x))

    def _scaled(self, x):
        return x * SCALE


class CompiledBlock(Block):
    @torch.compile
    def forward(self, x):
        return self._scaled(x)


def hooked():
    limit, module = 0.5, nn.Sequential(Block())
    module.register_forward_hook(lambda module, args, out: out.clamp(max=limit))
    return module


def compiled_in_place():
    module = Block()
    module.compile()
    return module


def compiling(function):
    compiled = torch.compile(function)

    @functools.wraps(function)
    def with_compiler(*args, **kwargs):
        return compiled(*args, **kwargs)

    return with_compiler


@compiling
def decorated(x, limit: float):
    return x.clamp(max=limit)

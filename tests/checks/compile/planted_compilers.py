"""Compilers with a fault of their own: what an audit must say of each, without inductor's price."""

import os
import time

import programs
import torch


def _dies(module, example_inputs):
    os._exit(7)


def _hangs(module, example_inputs):
    time.sleep(600)


def _raises(module, example_inputs):
    raise RuntimeError("this compiler cannot")


def _off_by_a_half(module, example_inputs):
    return lambda *args: tuple(out * 1.5 for out in module.forward(*args))


right = torch.compile(programs.clamped_swiglu, backend="aot_eager")
dies = torch.compile(programs.clamped_swiglu, backend=_dies)
hangs = torch.compile(programs.clamped_swiglu, backend=_hangs)
raises = torch.compile(programs.clamped_swiglu, backend=_raises)
wrong_at_once = torch.compile(programs.clamped_swiglu, backend=_off_by_a_half)
# Not compiled at all, as where a decorator was bound before a switch.
nothing_to_compile = torch._dynamo.disable(programs.clamped_swiglu)


def make_inputs():
    return programs.two_floats()

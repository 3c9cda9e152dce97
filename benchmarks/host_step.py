"""Time the host's own part of a repeated training step: on a CPU, with launches that do nothing.

    python benchmarks/host_step.py [--options] [--profile] [--main-grad] [--out FILE]

The layer believes to be on an H200, every kernel is a C function that ignores its arguments, and
buffers are the CPU's: what is left is Python, autograd, allocation, the kinds' look-up. The driver
adds some 5 µs a launch on a GPU, and a thread of its own for the backward. Figures are the least of
many single steps: a busy machine makes the others.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from samebits import Activation, ExpertWeights, Layout, Routing, WeightGradients, env, experts
from samebits.backends import operator, passes
from samebits.backends.recorder import Pass
from samebits.ops._triton import launch
from samebits.ops._triton.launch import Launch, Recordable
from samebits.weight_gradients import Owner

TOKENS, HIDDEN, COLUMNS, EXPERTS, TOPK = 300, 64, 32, 4, 2
STEPS = 3000
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)


def pretend():
    """Make this process believe that CPU tensors are an H200's, and that kernels run."""
    compiled = SimpleNamespace(function=1, packed_metadata=2, run="".format)

    def noted(self, grid, *arguments, **constants):
        record = launch._RECORD.get()
        if record is not None:
            rest = (constants[name] for name in self.fn.arg_names[len(arguments) :])
            record.count(None)
            record.launches.append(record.keep(Launch(compiled, grid, (*arguments, *rest))))

    active = SimpleNamespace(get_current_stream=lambda _: 7, get_current_device=lambda: -1)
    launch.driver = SimpleNamespace(active=active)
    Recordable._launch = noted
    operator._device_name = lambda _: "sm_90"
    Tensor.is_cuda = property(lambda _: True)


def step_of(*, options, main_grad):
    """Return functions of no arguments: a forward, and a whole step."""

    def leaf(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)

    biases = {"gate_up_bias": leaf(EXPERTS, 2 * COLUMNS), "down_bias": leaf(EXPERTS, HIDDEN)}
    weights = ExpertWeights(
        gate_up=leaf(EXPERTS, 2 * COLUMNS, HIDDEN), down=leaf(EXPERTS, HIDDEN, COLUMNS),
        layout=Layout(interleave=1) if options else Layout(), **(biases if options else {}),
    )  # fmt: skip
    destination = None
    if main_grad:
        owners = {}
        for name, parameter in weights.named_tensors().items():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32).detach()
            owners[name] = Owner(parameter)
        destination = WeightGradients(main_grad=True).of(owners)
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids, probs = torch.zeros(TOKENS, TOPK, dtype=torch.int64), torch.zeros(TOKENS, TOPK)
    activation = GPT_OSS if options else Activation()
    leaves = [] if main_grad else list(weights.named_tensors().values())
    dout = torch.zeros_like(x)

    def forward():
        inputs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        routing = Routing(ids, inputs[1], EXPERTS)
        out = experts(
            inputs[0], routing, weights, activation, backend="fused", weight_gradients=destination
        )
        return out, inputs

    def step():
        out, inputs = forward()
        return torch.autograd.grad(out, [*inputs, *leaves], dout)

    return forward, step


def least_us(function):
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        kept = function()
        times.append(time.perf_counter() - start)
        del kept
    return min(times) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--options", action="store_true", help="gpt-oss' options and biases")
    parser.add_argument("--main-grad", action="store_true", help="gradients into buffers")
    parser.add_argument("--profile", action="store_true", help="where Python's time goes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append a row of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pretend()
    forward, step = step_of(options=args.options, main_grad=args.main_grad)
    for _ in range(5):
        step()
    for known in passes.passes():
        steps = len(known.steps) if isinstance(known, Pass) else known
        print("launches", steps)
    row = {"options": args.options, "main_grad": args.main_grad}
    row |= {"forward_us": round(least_us(forward)), "step_us": round(least_us(step))}
    print(f"forward {row['forward_us']} µs, forward and backward {row['step_us']} µs")
    if args.out:
        command = " ".join(["python benchmarks/host_step.py", *sys.argv[1:]])
        with args.out.open("a") as file:
            file.write(json.dumps(row | {"command": command, "versions": env.versions()}) + "\n")
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(STEPS):
            step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()

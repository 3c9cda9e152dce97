"""Run as a program: one compiled clamped SwiGLU called with three limits in turn, beside ours.

Prints one JSON object. It runs in a process and a cache directory of its own, because the fault
that it shows is one of caches.
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from samebits.functional import clamped_swiglu

# (shape, limit, with gradient): the third call repeats the first limit in another shape.
CALLS = (((1, 2), 1.0, False), ((1, 4), 0.5, True), ((1, 4), 1.0, True))
VALUE = 0.75


def plain_swiglu(z: Tensor, limit: float) -> Tensor:
    """Return the clamped SwiGLU as training code writes it."""
    gate, up = z.chunk(2, -1)
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def run(function: Callable[[Tensor, float], Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the value and gradient of every call of ``CALLS``."""
    results: list[tuple[Tensor, Tensor | None]] = []
    for shape, limit, with_gradient in CALLS:
        z = torch.full(shape, VALUE, requires_grad=with_gradient)
        with torch.set_grad_enabled(with_gradient):
            out = function(z, limit)
        gradient = torch.autograd.grad(out.sum(), z)[0] if with_gradient else None
        results.append((out.detach(), gradient))
    return results


def errors(function: Callable[[Tensor, float], Tensor]) -> dict[str, float]:
    """Return how far compiled code is from the same code uncompiled, in the last call."""
    expected = run(function)[-1]
    actual = run(torch.compile(function, fullgraph=True))[-1]
    names = ("forward", "gradient")
    return {
        name: float((a - e).abs().max())
        for name, a, e in zip(names, actual, expected, strict=True)
        if a is not None and e is not None
    }


def main() -> None:
    """Print the errors of the plain code and of ours as JSON."""
    print(json.dumps({"plain": errors(plain_swiglu), "samebits": errors(clamped_swiglu)}))


if __name__ == "__main__":
    main()

"""Tiny FP8 experts of transformers, as its quantizer makes them, with weights."""

from samebits.checks.models.protocol import Sizes
from samebits.integrations.transformers import fp8_case


def build(*, hidden=128, columns=128, options=None, **arguments):
    """Return a module; ``options`` are fields of its configuration, the rest goes to its class."""
    sizes = Sizes(T=7, K=2, E=5, H=hidden, F=columns)
    arguments = {"block_size": (128, 128)} | arguments
    module = fp8_case.build(sizes, options or {}, arguments)
    module.config._experts_implementation = "samebits"
    fp8_case.fill(module, 2 * hidden**-0.5)
    return module

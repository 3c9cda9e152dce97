"""What an audit must say of each program of the battery.

A program that goes stale names the torch that mended it; ``OPEN`` means that none has so far. The
table of the group "battery" was measured with a plain loop of four values, without samebits.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import stale_programs

OPEN = (99, 0)
MENDED_CLAMP = (2, 15)


@dataclass(frozen=True)
class Program:
    """What is audited, and what an audit must say of it."""

    name: str
    # The first torch that computes it right, without a gradient and with one; None: never wrong.
    mended: tuple = (None, None)
    _: KW_ONLY
    # The first torch that computes it wrong, likewise; None: as far back as was looked.
    begun: tuple = (None, None)
    inputs: Callable = stale_programs.on_cpu
    # Paths of the numbers to vary; empty takes all.
    only: tuple[str, ...] = ()
    # Whether it is run without a gradient, and with one: kernels of one's own may have none.
    gradients: tuple[bool, ...] = (False, True)
    # Versions of torch that do not compile it with a gradient, once its number is dynamic.
    refused: tuple = ()

    def stale(self, version: tuple[int, ...], gradient: bool) -> bool:
        """Return whether this torch is known to compute it wrong."""
        mended, begun = self.mended[gradient], self.begun[gradient]
        return mended is not None and (begun or version) <= version < mended


GROUPS: dict[str, tuple[Program, ...]] = {
    "battery": (
        Program("clamped_swiglu", (None, MENDED_CLAMP)),
        Program("clamped_interleaved_swiglu", (None, MENDED_CLAMP)),
        Program("rms_norm_scaled", (OPEN, OPEN)),
        Program("rms_norm"),
        Program("huber_scaled", (OPEN, OPEN)),
        Program("attention_scale", (OPEN, OPEN)),
        Program("multiply"),
        Program("leaky_relu"),
        Program("power", (MENDED_CLAMP, None), refused=((2, 11),)),
        Program("add_alpha", (MENDED_CLAMP, MENDED_CLAMP)),
        Program("full"),
        Program("where", (MENDED_CLAMP, MENDED_CLAMP)),
        Program("softplus"),
        # Without a gradient right on 2.11 (a plain loop says so, too), wrong on 2.13.
        Program("addcmul", (MENDED_CLAMP, MENDED_CLAMP), begun=((2, 12), None)),
        Program("masked_fill", (MENDED_CLAMP, MENDED_CLAMP)),
        Program("hardtanh", (MENDED_CLAMP, MENDED_CLAMP)),
    ),
    "families": (
        Program("layer_norm_scaled", (OPEN, OPEN)),
        Program("label_smoothing", (OPEN, OPEN)),
        Program("interpolate", (OPEN, OPEN)),
        Program("custom_op_expression", (OPEN, OPEN)),
        Program("graph_break", (MENDED_CLAMP, MENDED_CLAMP)),
        Program(
            "layers",
            (None, MENDED_CLAMP),
            inputs=stale_programs.one_tensor,
            only=("target.layers.1.limit",),
        ),
        Program("adapter", (OPEN, OPEN), inputs=stale_programs.one_tensor),
        Program("swapped_options", (None, MENDED_CLAMP), inputs=stale_programs.with_options),
        Program("closure", (None, MENDED_CLAMP), inputs=stale_programs.one_tensor),
        Program(
            "clamped_swiglu_backward", (MENDED_CLAMP, None), inputs=stale_programs.with_gradient
        ),
        Program("launcher_forgets", (OPEN, None), inputs=stale_programs.with_integer),
        Program("launcher_forgets_one", (OPEN, None), inputs=stale_programs.with_integer),
    ),
    # On a GPU, measured with 2.11. The key of a launch counts the launches of its process, so that
    # only another process reuses code: there the expression is stale. A constant is in the key.
    "triton": (
        Program("triton:launch_bare", inputs=stale_programs.on_cuda, gradients=(False,)),
        Program(
            "triton:launch_expression",
            (OPEN, None),
            inputs=stale_programs.on_cuda,
            gradients=(False,),
        ),
        Program("triton:launch_constant", inputs=stale_programs.on_cuda, gradients=(False,)),
    ),
    "clean": (
        Program("integer", inputs=stale_programs.with_integer),
        Program("tensor_inside"),
        Program("branches"),
        Program("custom_op_bare"),
        Program("autograd_function"),
    ),
}

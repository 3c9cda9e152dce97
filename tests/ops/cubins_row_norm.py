"""Compile the norm of rows without a GPU and print what each cubin uses, as JSON.

``python tests/ops/cubins_row_norm.py [width …]`` prints ``{width: {sm: [registers, stack, shared,
vector]}}``, see ``cubins.py``.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cubins
from cubins_indirect_gemm import _Collect
from samebits.ops.row_norm import kernel

# A size of 1 is a constant to Triton.
CASES = {
    "1": (1, False),
    "40": (40, False),
    "backward-40": (40, True),
    "backward-7168": (7168, True),
}


def build(case: tuple[int, bool], sm: int) -> Any:
    """Return the compiled kernel of rows of so many elements for ``sm``, or its backward."""
    hidden, backward = case
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", sm, 32),
            get_current_device=lambda: sm,
            get_current_stream=lambda _: 0,
        )
    )
    name = "_row_norm_backward_kernel" if backward else "_row_norm_kernel"
    function = getattr(kernel, name)
    collect = function if isinstance(function, _Collect) else _Collect(function)
    setattr(kernel, name, collect)
    y = torch.empty(5, hidden, device="meta")
    scale = torch.empty(hidden, dtype=torch.bfloat16, device="meta")
    kept = torch.empty(1, dtype=torch.int32, device="meta")
    if not backward:
        kernel.launch_row_norm(y, scale, kept, 1e-6, torch.bfloat16)
        return collect.compiled
    dout = torch.empty(5, hidden, dtype=torch.bfloat16, device="meta")
    offsets, index = (torch.empty(n, dtype=torch.int32, device="meta") for n in (65, 5))
    probs, bias = torch.empty(5, 1, device="meta"), torch.empty(64, hidden, device="meta")
    kernel.launch_row_norm_backward(
        y, scale, dout, offsets, index, index, 1e-6, y_probs=None, h_probs=probs, bias=bias
    )
    return collect.compiled


if __name__ == "__main__":
    cubins.main(__file__, CASES, build, sys.argv[1:], targets=lambda _: (90,))

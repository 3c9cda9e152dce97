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
CASES = {"1": 1, "40": 40}


def build(hidden: int, sm: int) -> Any:
    """Return the compiled kernel of rows of ``hidden`` elements for ``sm``."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", sm, 32),
            get_current_device=lambda: sm,
            get_current_stream=lambda _: 0,
        )
    )
    function = kernel._row_norm_kernel
    collect = function if isinstance(function, _Collect) else _Collect(function)
    kernel._row_norm_kernel = collect
    y = torch.empty(5, hidden, device="meta")
    scale = torch.empty(hidden, dtype=torch.bfloat16, device="meta")
    kept = torch.empty(1, dtype=torch.int32, device="meta")
    kernel.launch_row_norm(y, scale, kept, 1e-6, torch.bfloat16)
    return collect.compiled


if __name__ == "__main__":
    cubins.main(__file__, CASES, build, sys.argv[1:], targets=lambda _: (90,))

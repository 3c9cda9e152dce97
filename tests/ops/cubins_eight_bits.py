"""Compile what quantises rows, and the scaled product, without a GPU; print what each cubin uses.

``python tests/ops/cubins_eight_bits.py [case …]`` prints ``{case: {sm: [registers, stack, shared,
vector, conversions, asynchronous, in registers, merges]}}``: whether the hardware converts to E4M3,
the number of asynchronous products, how many of these have an operand in registers, and how many
conversions merge a register into their result, as those of constants do, wrongly (CUDA 12.8).
``--record`` writes this Triton version's table.
"""

import re
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cubins
from cubins_indirect_gemm import _Collect
from samebits.activation import Activation
from samebits.formats import FP8, MXFP8, ROWS_FP8
from samebits.formats.matrix import QuantizedMatrix
from samebits.ops.permute.tuning import buffer_size, unpack
from samebits.ops.quantize import kernel as quantize
from samebits.ops.scaled_gemm import kernel as product
from samebits.ops.scaled_gemm.specialized import kernel as specialized
from samebits.ops.scaled_gemm.tuning import CANDIDATES, TABLE, UNMEASURED, Config
from samebits.weights import Layout

EXPERTS, TOPK, HIDDEN, COLUMNS, TOKENS = 32, 4, 2880, 2880, 64
GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)


class Case(NamedTuple):
    """One binary: which kernel, with which options, for which architectures."""

    kernel: str
    options: Any
    targets: tuple[int, ...] = cubins.TARGETS


# Products of E4M3 start with sm_89.
_OTHERS = (89, 100, 120)


def _named(config: Config) -> str:
    tile = f"{config.block_r}x{config.block_n}-{config.num_warps}w-{config.num_stages}s"
    return f"product-{tile}" + ("" if config.tma else "-pointers")


def _cases() -> dict[str, Case]:
    found = {}
    for op in ("permute", "activation"):
        found[f"{op}-fp8"] = Case(op, {"row_format": ROWS_FP8})
        found[f"{op}-mxfp8-tiles"] = Case(op, {"row_format": MXFP8, "swizzle": True})
        found[f"{op}-mxfp8-numbers"] = Case(op, {"row_format": MXFP8, "numbers": True})
    for config in (*(config for _, config in TABLE), CANDIDATES[-1]):
        found[_named(config)] = Case("product", config, (90,))
    found[_named(UNMEASURED)] = Case("product", UNMEASURED, _OTHERS)
    # Rows at multiples of no 16 bytes: read byte by byte.
    for _, config in (TABLE[0], TABLE[-1]):
        found[f"odd-product-{config.block_r}"] = Case("odd", config, (90,))
    return found


CASES = _cases()


def _made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _collected(module: Any, name: str) -> _Collect:
    function = getattr(module, name)
    collect = function if isinstance(function, _Collect) else _Collect(function)
    setattr(module, name, collect)
    return collect


def build(case: Case, sm: int) -> Any:
    """Return the compiled kernel of ``case`` for ``sm``."""
    # A device of its own for each architecture: compiled kernels are kept by device.
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", sm, 32),
            get_current_device=lambda: sm,
            get_current_stream=lambda _: 0,
        )
    )
    total = TOKENS * TOPK
    kept = _made(1, dtype=torch.int32)
    if case.kernel in ("product", "odd"):
        return _product(case.options, total, HIDDEN + 2 * (case.kernel == "odd"))
    options = dict(case.options)
    if options.pop("swizzle", False):
        options["swizzle"] = _made(EXPERTS + 1, dtype=torch.int32)
    collect = _collected(quantize, f"_{case.kernel}_and_quantize_kernel")
    if case.kernel == "permute":
        inverse = _made(total, dtype=torch.int32)
        quantize.launch_permute_and_quantize(
            _made(TOKENS, HIDDEN), inverse, TOPK, None, kept, **options
        )
    else:
        z, probs = _made(total, 2 * COLUMNS), _made(total, dtype=torch.float32)
        quantize.launch_activation_and_quantize(
            z, GPT_OSS, Layout(interleave=1), probs, kept, **options
        )
    return collect.compiled


def _product(config: Config, total: int, hidden: int) -> Any:
    collect = _collected(product, "_scaled_product_kernel")
    if config.specialized and hidden % 16 == 0:
        collect = _collected(specialized, "_specialized_product_kernel")
    shapes = FP8.shapes((EXPERTS, 2 * COLUMNS, hidden))
    weight = QuantizedMatrix(
        format=FP8,
        columns=hidden,
        values=_made(*shapes["values"], dtype=torch.float8_e4m3fn),
        scales=_made(*shapes["scales"], dtype=torch.float32),
    )
    size = buffer_size(total, EXPERTS, config.block_r)
    table = unpack(_made(size, dtype=torch.int32), total, EXPERTS, config.block_r)
    product.launch_scaled_gemm(
        _made(total, hidden, dtype=torch.float8_e4m3fn),
        _made(total, -(-hidden // 128), dtype=torch.float32),
        table.slots, table.tiles, weight, _made(EXPERTS, 2 * COLUMNS), None, torch.bfloat16, config,
    )  # fmt: skip
    return collect.compiled


def measure(compiled: Any) -> list[int]:
    """Return what ``cubins.measure`` does, and what the docstring of the module says."""
    ptx = compiled.asm["ptx"]
    dots = re.findall(r"warp_group_dot %.*", compiled.asm["ttgir"])
    # Operands in shared memory are descriptors of it.
    registers = sum(dot.count("!ttg.memdesc") < 2 for dot in dots)
    converts = int("e4m3x2.f32" in ptx)
    # The last operand is what is merged: RZ is nothing.
    merges = re.findall(
        r"F2FP\.SATFINITE\.E4M3\S* [^;]*, (?!RZ)\w+(?:\.\w+)* *;", compiled.asm["sass"]
    )
    asynchronous = ptx.count("wgmma.mma_async")
    return [*cubins.measure(compiled), converts, asynchronous, registers, len(merges)]


if __name__ == "__main__":
    cubins.main(
        __file__, CASES, build, sys.argv[1:], measure=measure, targets=lambda case: case.targets
    )

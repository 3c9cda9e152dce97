"""Compile what reads quantised weights without a GPU and print what each cubin uses, as JSON.

``python tests/ops/cubins_quantized.py [case …]`` prints ``{case: {sm: [registers, stack, shared,
vector, kwidth, asynchronous]}}``: how many neighbours of the contraction a thread of ``mma.sync``
holds, and the number of asynchronous products. ``--record`` writes this Triton version's table
(some three minutes).
"""

import re
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cubins
from cubins_indirect_gemm import _Collect, spelled
from samebits.activation import Activation
from samebits.formats import FP8, MXFP4, MXFP4_SHUFFLED, MXFP8, NVFP4, WeightFormat
from samebits.formats.matrix import QuantizedMatrix
from samebits.ops.dequantize import kernel as dequantize
from samebits.ops.indirect_gemm import kernel as projection
from samebits.ops.indirect_gemm.tuning import QUANTIZED_FEW, QUANTIZED_TABLE
from samebits.ops.permute.tuning import buffer_size, unpack
from samebits.weights import Layout

EXPERTS, TOPK, HIDDEN, COLUMNS, TOKENS = 32, 4, 2880, 2880, 16
FORMATS = (FP8, MXFP8, MXFP4, MXFP4_SHUFFLED, NVFP4)


class Case(NamedTuple):
    """One binary: which kernel, of which format, with which tile, for which architectures."""

    kernel: str
    held: WeightFormat
    config: Any = None
    layout: Layout = Layout()
    targets: tuple[int, ...] = (90,)


def _cases() -> dict[str, Case]:
    found = {}
    for held in FORMATS:
        e4m3 = "e4m3" in (held.values, held.scales)
        # Triton converts E4M3 from sm_89 on.
        targets = tuple(sm for sm in cubins.TARGETS if sm >= 89 or not e4m3)
        found[f"dequantize-{held}"] = Case("dequantize", held, targets=targets)
        for entry in (*QUANTIZED_TABLE[held.name], QUANTIZED_FEW[held.name]):
            for which, config in (("first", entry.first), ("second", entry.second)):
                found[f"{which}-{held}-{spelled(config)}"] = Case(which, held, config)
    config = QUANTIZED_TABLE["mxfp4"][0].first
    found["first-mxfp4-gpt-oss"] = Case("first", MXFP4, config, Layout(interleave=1))
    config = QUANTIZED_TABLE["mxfp4_shuffled"][0].first
    found["first-mxfp4_shuffled-gpt-oss"] = Case(
        "first", MXFP4_SHUFFLED, config, Layout(interleave=1)
    )
    return found


CASES = _cases()


def _matrix(held: WeightFormat, rows: int, columns: int) -> QuantizedMatrix:
    dtypes = {
        "values": held.value.dtype,
        "scales": held.scale_dtype,
        "global_scale": torch.float32,
    }
    parts = {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in held.shapes((EXPERTS, rows, columns)).items()
    }
    return QuantizedMatrix(format=held, columns=columns, **parts)


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
    if case.kernel == "dequantize":
        words = "_words" if case.held.values == "e2m1" else ""
        words = "_shuffled" if case.held.shuffled else words
        collect = _collected(dequantize, f"_dequantize{words}_kernel")
        offsets = torch.empty(EXPERTS + 1, dtype=torch.int32, device="meta")
        dequantize.launch_dequantize(_matrix(case.held, HIDDEN, COLUMNS), torch.bfloat16, offsets)
        return collect.compiled
    slots, block_r = TOKENS * TOPK, case.config.block_r
    size = buffer_size(slots, EXPERTS, block_r)
    table = unpack(torch.empty(size, dtype=torch.int32, device="meta"), slots, EXPERTS, block_r)

    def made(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")

    collect = _collected(projection, f"_{case.kernel}_projection_kernel")
    if case.kernel == "first":
        weights = projection.First(_matrix(case.held, 2 * COLUMNS, HIDDEN), None, case.layout)
        projection.launch_first_projection(
            made(TOKENS, HIDDEN), table.slots, table.tiles, weights, Activation(), None,
            case.config, topk=TOPK, gather=True, save=False,
        )  # fmt: skip
    else:
        projection.launch_second_projection(
            made(slots, COLUMNS), table.slots, table.tiles,
            _matrix(case.held, HIDDEN, COLUMNS), None, None, case.config,
        )  # fmt: skip
    return collect.compiled


def measure(compiled: Any) -> list[int]:
    """Return what ``cubins.measure`` does, the kwidth, and the number of asynchronous products."""
    widths = {int(width) for width in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])}
    kwidth = 0 if not widths else widths.pop() if len(widths) == 1 else -1
    return [*cubins.measure(compiled), kwidth, compiled.asm["ptx"].count("wgmma.mma_async")]


if __name__ == "__main__":
    cubins.main(
        __file__, CASES, build, sys.argv[1:], measure=measure, targets=lambda case: case.targets
    )

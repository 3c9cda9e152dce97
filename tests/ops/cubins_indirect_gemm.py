"""Compile the projections without a GPU and print what each cubin uses, as JSON.

``python tests/ops/cubins_indirect_gemm.py [case …]`` prints ``{case: {sm: [registers, stack,
shared, vector, kwidth]}}``; the last is how many neighbours of the contraction a thread of
``mma.sync`` holds (0 where every operand comes from shared memory, -1 where there are several).
``--record`` writes this Triton version's table (about three minutes). The launchers themselves run,
on tensors without memory, so a case is compiled as a call would compile it. The grouped product is
the second projection.
"""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cubins
from samebits.activation import Activation
from samebits.ops._triton.launch import Recordable
from samebits.ops.indirect_gemm import kernel
from samebits.ops.indirect_gemm.tuning import TABLE, UNMEASURED, Config
from samebits.ops.permute.tuning import buffer_size, unpack
from samebits.problem import DTYPES, Problem
from samebits.weights import ExpertWeights, Layout


class Case(NamedTuple):
    """One binary: which projection, which tile, which options, for which architectures."""

    projection: str
    config: Config
    problem: Problem
    targets: tuple[int, ...] = (90,)


_PLAIN = Problem(H=2880, F=2880, E=32, K=4, dtype="bf16")
_GPT_OSS = replace(
    _PLAIN,
    activation=Activation(alpha=1.702, limit=7.0, linear_offset=1.0),
    layout=Layout(interleave=1),
    gate_up_bias="bf16",
    down_bias="bf16",
)


def spelled(config: Config) -> str:
    """Return a name that no other tile has."""
    tile = f"{config.block_r}x{config.block_n}x{config.block_k}"
    flags = ("-swap" if config.swap else "") + ("" if config.tma else "-pointers")
    flags += f"-short{config.short}" if config.short else ""
    return f"{tile}-{config.num_warps}w-{config.num_stages}s{flags}"


def _cases() -> dict[str, Case]:
    found = {}
    for entry in TABLE:
        for projection, config in zip(("first", "second"), entry[1:], strict=True):
            # Groups and programs are arguments of a launch.
            found[f"{projection}-{spelled(config)}"] = Case(projection, config, _PLAIN)
    largest = TABLE[-1].first
    found["first-gpt-oss"] = Case("first", largest, _GPT_OSS)
    found["first-pointers"] = Case("first", replace(largest, tma=False, num_stages=3), _PLAIN)
    found["first-fp16"] = Case("first", largest, replace(_PLAIN, dtype="fp16"))
    fp32 = replace(_PLAIN, dtype="fp32")
    for projection in ("first", "second"):
        name = f"{projection}-unmeasured"
        found[name] = Case(projection, UNMEASURED, _PLAIN, cubins.TARGETS)
        found[f"{name}-fp32"] = Case(projection, UNMEASURED.for_fp32(), fp32, cubins.TARGETS)
    return found


CASES = _cases()


class _Collect:
    """Stands for a kernel: compiles what it would launch."""

    def __init__(self, function: Any) -> None:
        self.function = function.fn if isinstance(function, Recordable) else function
        self.compiled: Any = None

    def __getitem__(self, grid: Any) -> Any:
        def compile_(*arguments: Any, **constants: Any) -> None:
            self.compiled = self.function.warmup(*arguments, grid=grid, **constants)

        return compile_


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
    name = f"_{case.projection}_projection_kernel"
    function = getattr(kernel, name)
    collect = function if isinstance(function, _Collect) else _Collect(function)
    setattr(kernel, name, collect)
    problem, config = case.problem, case.config
    tokens = 1000
    slots = tokens * problem.K

    def made(*shape: int) -> Any:
        return torch.empty(shape, dtype=DTYPES[problem.dtype], device="meta")

    rows = problem.activation.columns * problem.F
    biased = problem.gate_up_bias is not None
    weights = ExpertWeights(
        gate_up=made(problem.E, rows, problem.H),
        down=made(problem.E, problem.H, problem.F),
        gate_up_bias=made(problem.E, rows) if biased else None,
        down_bias=made(problem.E, problem.H) if biased else None,
        layout=problem.layout,
    )
    size = buffer_size(slots, problem.E, config.block_r)
    metadata = unpack(
        torch.empty(size, dtype=torch.int32, device="meta"), slots, problem.E, config.block_r
    )
    if case.projection == "first":
        kernel.launch_first_projection(
            made(tokens, problem.H), metadata.slots, metadata.tiles, weights, problem.activation,
            None, config, topk=problem.K, gather=True, save=False,
        )  # fmt: skip
    else:
        kernel.launch_second_projection(
            made(slots, problem.F), metadata.slots, metadata.tiles,
            weights.down, weights.down_bias, None, config,
        )  # fmt: skip
    return collect.compiled


def measure(compiled: Any) -> list[int]:
    """Return what ``cubins.measure`` does, and the kwidth."""
    widths = {int(width) for width in re.findall(r"kWidth = (\d+)", compiled.asm["ttgir"])}
    kwidth = 0 if not widths else widths.pop() if len(widths) == 1 else -1
    return [*cubins.measure(compiled), kwidth]


if __name__ == "__main__":
    cubins.main(
        __file__, CASES, build, sys.argv[1:], measure=measure, targets=lambda case: case.targets
    )

"""Compile the kernels of the gradients without a GPU and print what each cubin uses, as JSON.

``python tests/ops/cubins_gradients.py [case …]`` prints ``{case: {sm: [registers, stack, shared,
vector, register operands]}}``; the last counts asynchronous products whose first operand is in
registers (docs/projections.md: such products were wrong). ``--record`` writes this Triton version's
table (some two minutes). The launchers themselves run, on tensors without memory.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cubins
from cubins_indirect_gemm import _Collect, spelled
from samebits.activation import Activation
from samebits.ops.hidden_gradient import kernel as hidden
from samebits.ops.hidden_gradient import tuning as hidden_tuning
from samebits.ops.indirect_gemm import kernel as projection
from samebits.ops.indirect_gemm import tuning as projection_tuning
from samebits.ops.permute.tuning import buffer_size, unpack
from samebits.ops.weight_gradient import kernel as weight
from samebits.ops.weight_gradient import tuning as weight_tuning
from samebits.ops.weight_gradient.specialized import kernel as specialized
from samebits.weights import Layout

EXPERTS, TOPK, HIDDEN, COLUMNS, TOKENS = 32, 4, 2880, 2880, 1000
ROWS = TOKENS * TOPK


class Case(NamedTuple):
    """One binary: which product, tile, dtype and activation, for which architectures."""

    product: str
    config: Any
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = Activation()
    layout: Layout = Layout()
    targets: tuple[int, ...] = (90,)


def _cases() -> dict[str, Case]:
    found = {}
    for _, config in hidden_tuning.TABLE:
        found[f"hidden-{spelled(config)}"] = Case("hidden", config)
    largest = hidden_tuning.TABLE[-1][1]
    gpt_oss = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
    found["hidden-gpt-oss"] = Case(
        "hidden", largest, activation=gpt_oss, layout=Layout(interleave=1)
    )
    situ = Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0)
    found["hidden-situ"] = Case("hidden", largest, activation=situ)
    for _, config in projection_tuning.INPUT_GRADIENT_TABLE:
        found[f"input-{spelled(config)}"] = Case("input", config)
    for _, config in weight_tuning.TABLE:
        tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
        plain = replace(config, specialized=None)
        found[f"weight-{tile}-{config.num_warps}w"] = Case("weight", plain)
        if config.specialized is not None:
            tile = config.specialized
            shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}-{tile.num_stages}s"
            found[f"weight-specialized-{shape}"] = Case("specialized", config)
    for product, config in (
        ("hidden", hidden_tuning.UNMEASURED),
        ("weight", weight_tuning.UNMEASURED),
    ):
        found[f"{product}-unmeasured"] = Case(product, config, targets=cubins.TARGETS)
        found[f"{product}-unmeasured-fp32"] = Case(
            product, config.for_fp32(), torch.float32, targets=cubins.TARGETS
        )
    return found


CASES = _cases()
_KERNELS = {
    "hidden": (hidden, "_hidden_gradient_kernel"),
    "input": (projection, "_second_projection_kernel"),
    "weight": (weight, "_weight_gradient_kernel"),
    "specialized": (specialized, "_specialized_weight_gradient_kernel"),
}
_COLLECTED = {}
for _product, (_module, _name) in _KERNELS.items():
    _kernel = getattr(_module, _name)
    _COLLECTED[_product] = _kernel if isinstance(_kernel, _Collect) else _Collect(_kernel)
    setattr(_module, _name, _COLLECTED[_product])


def build(case: Case, sm: int) -> Any:
    """Return the compiled kernel of ``case`` for ``sm``."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", sm, 32),
            get_current_device=lambda: sm,
            get_current_stream=lambda _: 0,
        )
    )

    def made(*shape: int, dtype: torch.dtype = case.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    integers = {"dtype": torch.int32}
    width = 2 * COLUMNS
    if case.product in ("weight", "specialized"):
        weight.launch_weight_gradient(
            made(ROWS, width), made(ROWS, HIDDEN), made(EXPERTS + 1, **integers),
            made(EXPERTS, **integers), made(EXPERTS, width, HIDDEN), case.config,
        )  # fmt: skip
        return _COLLECTED[case.product].compiled
    block_r = case.config.block_r
    buffer = made(buffer_size(ROWS, EXPERTS, block_r), **integers)
    metadata = unpack(buffer, ROWS, EXPERTS, block_r)
    if case.product == "input":
        matrices = made(EXPERTS, width, HIDDEN).transpose(1, 2)
        projection.launch_second_projection(
            made(ROWS, width), metadata.slots, metadata.tiles, matrices, None, None, case.config
        )
        return _COLLECTED["input"].compiled
    hidden.launch_hidden_gradient(
        made(ROWS, HIDDEN), made(EXPERTS, HIDDEN, COLUMNS), made(ROWS, width),
        metadata.slots, metadata.tiles, made(TOKENS, TOPK, dtype=torch.float32),
        case.activation, case.layout, case.config,
        topk=TOPK, gather=False, want_dz=True, want_h=True, want_partial=True,
    )  # fmt: skip
    return _COLLECTED["hidden"].compiled


def register_operands(compiled: Any) -> int:
    """Return how many asynchronous products take their first operand from registers."""
    lines = compiled.asm["ttgir"].splitlines()
    products = [line for line in lines if "warp_group_dot %" in line and "isAsync = true" in line]
    return sum("dot_op<{opIdx = 0" in line for line in products)


def measure(compiled: Any) -> list[int]:
    """Return what ``cubins.measure`` does, and the register operands."""
    return [*cubins.measure(compiled), register_operands(compiled)]


if __name__ == "__main__":
    cubins.main(
        __file__, CASES, build, sys.argv[1:], measure=measure, targets=lambda case: case.targets
    )

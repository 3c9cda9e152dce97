"""Compile the activation kernels without a GPU and print what each cubin uses, as JSON.

``python tests/ops/cubins_activation.py [case …]`` prints ``{case: {sm: [registers, stack, shared,
vector]}}``: registers and stack bytes per thread, shared bytes, and the widest global access in
bytes. With ``--record`` the table of this Triton version is written to ``cubins_activation.json``.
A process of its own, because kernels imported for the interpreter cannot be compiled.
"""

import sys
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import cubins
from samebits.activation import Activation
from samebits.ops.activation import kernel
from samebits.ops.activation.tiles import TileOptions
from samebits.ops.activation.tuning import backward_heuristic, forward_heuristic
from samebits.problem import DTYPES
from samebits.weights import Layout

_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
_ROWS = 1 << 16


class Case(NamedTuple):
    """One binary: which kernel, which options, which operands."""

    kernel: str
    activation: Activation
    layout: Layout = Layout()
    dtype: str = "bf16"
    columns: int = 2048
    bias: bool = False
    experts: int = 0
    probs: bool = False
    count: bool = False
    h: bool = False


_GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
_SITU = Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0)
CASES = {
    "forward-plain": Case("forward", Activation(), columns=768),
    "forward-fp32": Case("forward", Activation(), dtype="fp32"),
    "forward-weighted": Case("forward", Activation(limit=7.0), probs=True, count=True),
    "forward-gpt-oss": Case(
        "forward", _GPT_OSS, Layout(interleave=1), columns=2880, bias=True, experts=128
    ),
    "forward-interleave-32": Case("forward", _GPT_OSS, Layout(interleave=32), columns=2880),
    "forward-situ": Case("forward", _SITU, dtype="fp16"),
    "forward-relu2": Case("forward", Activation(kind="relu2", gated=False), probs=True),
    "backward-plain": Case("backward", Activation(), columns=768),
    "backward-fp32": Case("backward", Activation(kind="gelu"), dtype="fp32"),
    "backward-clamped": Case("backward", Activation(limit=7.0)),
    "backward-weighted": Case("backward", Activation(limit=7.0), probs=True, h=True),
    "backward-weighted-walk": Case("backward", Activation(limit=7.0), columns=768, probs=True),
    "backward-gpt-oss": Case("backward", _GPT_OSS, Layout(interleave=1), columns=2880),
    "backward-situ": Case("backward", _SITU, dtype="fp16", probs=True),
    "backward-bias": Case(
        "bias_backward", _GPT_OSS, Layout(interleave=1), columns=2880, bias=True, experts=128,
        probs=True,
    ),
}  # fmt: skip


def _pointers(case: Case) -> dict[str, str | None]:
    """Return the element type behind each pointer argument; None where it is absent."""
    wanted_dp = "fp32" if case.probs and case.kernel != "forward" else None
    return {
        "z_ptr": case.dtype,
        "dh_ptr": case.dtype,
        "dz_ptr": case.dtype,
        "h_ptr": case.dtype if case.h or case.kernel == "forward" else None,
        "bias_ptr": case.dtype if case.bias else None,
        "probs_ptr": "fp32" if case.probs else None,
        "dp_ptr": wanted_dp,
        "partial_ptr": wanted_dp,
        "chunk_sums_ptr": "fp32",
        "offsets_ptr": "i32" if case.experts else None,
        "num_rows_ptr": "i32" if case.count else None,
        "scalars_ptr": None,
    }


def build(case: Case, sm: int) -> Any:
    """Return the compiled kernel of ``case`` for ``sm``, specialised as a launch would."""
    function = getattr(kernel, f"_activation_{case.kernel}_kernel")
    size = _SIZES[case.dtype]
    constants: dict[str, Any] = {
        **TileOptions.of(case.activation, DTYPES[case.dtype]).flags,
        "INTERLEAVE": case.layout.interleave or 0,
        "UP_FIRST": case.layout.up_first,
        "EXPERTS": case.experts,
    }
    if case.kernel == "forward":
        config = forward_heuristic(_ROWS, case.columns, size)
    else:
        dbias = case.kernel == "bias_backward"
        dp = _pointers(case).get("dp_ptr") is not None
        config = backward_heuristic(_ROWS, case.columns, size, dbias=dbias, dp=dp)
    tiles = {
        "BLOCK_R": config.block_r,
        "BLOCK_F": config.block_f,
        "STAGES": config.num_stages,
        "CHUNK": kernel.CHUNK,
        "EXPERTS_POW2": triton.next_power_of_2(max(case.experts, 1)),
    }
    names = function.arg_names
    constants |= {name: value for name, value in tiles.items() if name in names}
    pointers = _pointers(case)
    if not config.walk:
        # A launch of its own adds the sums of columns.
        pointers["dp_ptr"] = None
    constants |= {name: None for name in names if name in pointers and pointers[name] is None}
    signature: dict[str, Any] = {}
    attributes = {}
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "values":
            signature[name] = ("fp32",) * 5
        else:
            signature[name] = f"*{pointers[name]}" if name in pointers else "i32"
            if name != "R":
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


if __name__ == "__main__":
    cubins.main(__file__, CASES, build, sys.argv[1:])

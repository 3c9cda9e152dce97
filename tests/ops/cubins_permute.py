"""Compile the permute kernels without a GPU and print what each cubin uses, as JSON.

As ``cubins_activation.py``: ``[registers, stack, shared, vector]`` per case and target, ``vector``
the widest global access in bytes; ``--record`` writes ``cubins_permute.json``.
"""

import sys
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import cubins
from samebits.ops.permute import kernel, tuning

_SIZES = {"bf16": 2, "fp32": 4}


class Case(NamedTuple):
    """One binary: which kernel, which sizes, which optional operands."""

    kernel: str
    warps: int
    # Values of constexpr arguments.
    sizes: dict[str, int]
    ids: str = "i64"
    dtype: str = "bf16"
    # Names of optional pointers that are given.
    given: tuple[str, ...] = ()


def _sort(experts: int, **more: int) -> dict[str, int]:
    return {"BINS": kernel._bins(experts), "BLOCK_R": 128, **more}


def _move(hidden: int, topk: int, dtype: str, *given: str) -> tuple[Any, ...]:
    config = tuning.heuristic(16384, hidden, topk, _SIZES[dtype])
    pow2 = triton.next_power_of_2(topk)
    sizes = {
        "TOPK": topk, "TOPK_POW2": pow2, "WIDE_KEYS": False,
        "BLOCK_H": config.block_h, "AHEAD": config.ahead,
    }  # fmt: skip
    return config.num_warps, sizes, "i64", dtype, given


_DP_IN = ("x_ptr", "partial_ptr", "dp_ptr")
_DP_OUT = ("y_ptr", "partial_ptr", "dp_ptr")
CASES = {
    "few-1": Case("few_metadata", 2, _sort(128, SLOTS=64)),
    "few-4096": Case("few_metadata", 8, _sort(128, SLOTS=4096), given=("num_valid_ptr",)),
    "few-8192-many": Case("few_metadata", 16, _sort(384, SLOTS=8192), ids="i32"),
    "histogram": Case("histogram", 4, _sort(128, CHUNK=tuning.CHUNK)),
    "place": Case("place", 8, _sort(128, STRIP=16, CHUNK=tuning.CHUNK)),
    "place-many": Case("place", 8, _sort(384, STRIP=8, CHUNK=tuning.CHUNK), ids="i32"),
    "tiles": Case("tiles", 1, _sort(128)),
    "gather": Case("gather", *_move(2048, 8, "bf16")),
    "gather-one": Case("gather", *_move(5120, 1, "bf16", "probs_ptr", "kept_ptr")),
    "gather-fp32": Case("gather", *_move(2880, 4, "fp32", "probs_ptr")),
    "gather-dp": Case("gather", *_move(7168, 8, "bf16", "probs_ptr", *_DP_OUT)),
    "sum": Case("sum", *_move(2048, 8, "bf16", "probs_ptr")),
    "sum-plain": Case("sum", *_move(2880, 4, "bf16")),
    "sum-fp32": Case("sum", *_move(7168, 8, "fp32", "probs_ptr")),
    "sum-dp-many": Case("sum", *_move(2048, 8, "bf16", "probs_ptr", *_DP_IN)),
    "sum-dp": Case("sum", *_move(5120, 1, "bf16", "probs_ptr", *_DP_IN)),
}
_VALUES = ("x_ptr", "y_ptr", "rows_ptr", "out_ptr")
_FLOATS = ("probs_ptr", "partial_ptr", "dp_ptr")
# Optional in one kernel at least; x_ptr and y_ptr are, in the other kernel.
_OPTIONAL = {
    "few_metadata": ("num_valid_ptr",),
    "histogram": ("num_valid_ptr",),
    "place": ("num_valid_ptr",),
    "tiles": (),
    "gather": ("y_ptr", "probs_ptr", "partial_ptr", "dp_ptr", "kept_ptr"),
    "sum": ("x_ptr", "probs_ptr", "partial_ptr", "dp_ptr"),
}
_UNALIGNED = ("R", "E", "chunks", "blocks", "topk", "expert_start")


def build(case: Case, sm: int) -> Any:
    """Return the compiled kernel of ``case`` for ``sm``, specialised as a launch would."""
    function = getattr(kernel, f"_{case.kernel}_kernel")
    names = function.arg_names
    absent = [name for name in _OPTIONAL[case.kernel] if name not in case.given]
    constants: dict[str, Any] = {n: v for n, v in case.sizes.items() if n in names}
    constants |= dict.fromkeys(absent)
    signature: dict[str, str] = {}
    attributes = {}
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = case.dtype if name in _VALUES else "fp32" if name in _FLOATS else "i32"
        kind = case.ids if name == "ids_ptr" else kind
        signature[name] = f"*{kind}" if name.endswith("_ptr") else "i32"
        if name not in _UNALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


if __name__ == "__main__":
    cubins.main(__file__, CASES, build, sys.argv[1:])

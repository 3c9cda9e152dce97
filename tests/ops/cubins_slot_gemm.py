"""Compile the launches of single slots without a GPU and print what each cubin uses, as JSON.

``python tests/ops/cubins_slot_gemm.py [case …]`` prints ``{case: {sm: [registers, stack, shared,
vector, kwidth]}}``, see ``cubins_indirect_gemm.py``. ``--record`` writes this version's table.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cubins
from cubins_indirect_gemm import _Collect, measure
from samebits.activation import Activation
from samebits.ops.slot_gemm import kernel
from samebits.ops.slot_gemm.tuning import heuristic
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.weights import ExpertWeights, Layout


class Case(NamedTuple):
    """One binary: which launch, for which problem."""

    launch: str
    problem: Problem


_PLAIN = Problem(H=2880, F=2880, E=128, K=4, dtype="bf16")
_GPT_OSS = replace(
    _PLAIN,
    activation=Activation(alpha=1.702, limit=7.0, linear_offset=1.0),
    layout=Layout(interleave=1),
    gate_up_bias="bf16",
    down_bias="bf16",
)
CASES = {
    "hidden": Case("hidden", _PLAIN),
    "hidden-gpt-oss": Case("hidden", _GPT_OSS),
    "hidden-fc1-input": Case("hidden", replace(_PLAIN, placement=ProbPlacement.FC1_INPUT)),
    **{f"output-{topk}": Case("output", replace(_PLAIN, K=topk)) for topk in (1, 2, 4, 8, 16)},
    "output-gpt-oss": Case("output", _GPT_OSS),
}


def build(case: Case, sm: int) -> Any:
    """Return the compiled kernel of ``case`` for ``sm``."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", sm, 32),
            get_current_device=lambda: sm,
            get_current_stream=lambda _: 0,
        )
    )
    problem = case.problem
    name = {"hidden": "_slot_hidden_kernel", "output": "_token_output_kernel"}[case.launch]
    function = getattr(kernel, name)
    collect = function if isinstance(function, _Collect) else _Collect(function)
    setattr(kernel, name, collect)

    def made(*shape: int, dtype: torch.dtype = DTYPES[problem.dtype]) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = problem.activation.columns * problem.F
    biased = problem.gate_up_bias is not None
    weights = ExpertWeights(
        gate_up=made(problem.E, rows, problem.H),
        down=made(problem.E, problem.H, problem.F),
        gate_up_bias=made(problem.E, rows) if biased else None,
        down_bias=made(problem.E, problem.H) if biased else None,
        layout=problem.layout,
    )
    ids, probs = made(1, problem.K, dtype=torch.int64), made(1, problem.K, dtype=torch.float32)
    tiles = heuristic(1, problem.K, problem.E, f"sm_{sm}", problem.dtype)
    assert tiles is not None
    if case.launch == "hidden":
        kernel.launch_slot_hidden(
            made(1, problem.H), ids, weights, problem.activation, probs, problem.placement,
            tiles.hidden, early=tiles.early,
        )  # fmt: skip
    else:
        kernel.launch_token_output(
            made(problem.K, problem.F), ids, weights.down, weights.down_bias, probs,
            problem.placement, made(1, problem.H), tiles,
        )  # fmt: skip
    return collect.compiled


if __name__ == "__main__":
    cubins.main(__file__, CASES, build, sys.argv[1:], measure=measure, targets=lambda _: (90,))

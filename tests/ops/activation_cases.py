"""Cases, operands and runners of the activation tests: CPU operator, interpreter, GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from samebits.activation import Activation, apply
from samebits.ops.activation import Backward, Operands, Wanted, activate, activate_backward
from samebits.ops.activation.tuning import Config
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget
from samebits.weights import Layout, split_gate_up

GPT_OSS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)
ACTIVATIONS_TRIED = (
    Activation(),
    Activation(alpha=1.702),
    Activation(limit=2.0),
    Activation(limit=1.0, limit_position="post"),
    Activation(linear_offset=0.25),
    GPT_OSS,
    Activation(kind="gelu"),
    Activation(kind="gelu_tanh", limit=2.0),
    Activation(kind="relu", limit=2.0, limit_position="post"),
    Activation(kind="relu2"),
    Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0),
    Activation(kind="situ", gate_softcap=4.0),
    Activation(gated=False),
    Activation(kind="gelu", gated=False),
    Activation(kind="gelu_tanh", gated=False),
    Activation(kind="relu", gated=False),
    Activation(kind="relu2", gated=False),
)
LAYOUTS = (
    Layout(up_first=True),
    Layout(interleave=1),
    Layout(interleave=2, up_first=True),
    Layout(interleave=4),
    Layout(interleave=8, up_first=True),
    Layout(interleave=12),
)


class Case(NamedTuple):
    """A call: the function, the layout, and which optional operands there are."""

    activation: Activation = Activation()
    layout: Layout = Layout()
    # "", "shared" (2F,) or "experts" (E, 2F).
    bias: str = ""
    probs: bool = False
    count: bool = False
    columns: int = 72

    def __str__(self) -> str:
        parts = [self.activation.key, self.layout.key, self.bias and f"bias-{self.bias}"]
        parts += ["probs"] * self.probs + ["count"] * self.count + [f"F{self.columns}"]
        return "-".join(part for part in parts if part)


CASES = (
    *(Case(activation, probs=True) for activation in ACTIVATIONS_TRIED),
    *(Case(GPT_OSS, layout) for layout in LAYOUTS),
    Case(GPT_OSS, Layout(interleave=1), bias="experts", probs=True),
    Case(GPT_OSS, Layout(interleave=1), bias="experts"),
    Case(Activation(limit=2.0), bias="shared", probs=True, count=True),
    Case(Activation(kind="relu2", gated=False), bias="shared"),
    Case(count=True),
    Case(probs=True, count=True),
    Case(columns=1),
    Case(probs=True, columns=130),
    Case(GPT_OSS, Layout(interleave=1), bias="experts", probs=True, columns=63),
)
TILED_CASES = (
    Case(GPT_OSS, Layout(interleave=1), bias="experts", probs=True, columns=200),
    Case(Activation(limit=2.0), probs=True, columns=200),
)
ROWS = 9
# Rows of each expert: an empty expert first, in the middle and last.
COUNTS = (0, 3, 0, 5, 1, 0)


def make_operands(case: Case, dtype: torch.dtype, *, rows: int = ROWS, seed: int = 0) -> Operands:
    """Return operands beyond every limit on a good part of their elements, fp32 side inputs."""
    generator = torch.Generator().manual_seed(seed)
    width = case.activation.columns * case.columns
    bias, offsets = None, None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if case.bias == "shared":
        bias = torch.randn(width, generator=generator).to(wide)
    if case.bias == "experts":
        scale = rows // ROWS
        bias = torch.randn(len(COUNTS), width, generator=generator).to(wide)
        offsets = torch.tensor([0, *COUNTS]).cumsum(0).mul(scale).to(torch.int32)
    return Operands(
        z=(torch.randn(rows, width, generator=generator) * 2.5).to(dtype),
        bias=bias,
        offsets=offsets,
        row_probs=torch.rand(rows, generator=generator) + 0.05 if case.probs else None,
        num_rows=torch.tensor([rows - 2], dtype=torch.int32) if case.count else None,
    )


def make_dh(operands: Operands, case: Case, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (operands.z.shape[0], case.columns)
    return torch.randn(shape, generator=generator).to(operands.z.dtype)


def move(operands: Operands, device: str) -> Operands:
    return Operands(*(None if t is None else t.to(device) for t in operands))


def live_rows(operands: Operands) -> int:
    return operands.z.shape[0] if operands.num_rows is None else int(operands.num_rows)


Results = dict[str, Tensor]


def plain_results(operands: Operands, dh: Tensor, case: Case, dtype: torch.dtype) -> Results:
    """Return h and every gradient by autograd through the formula, rounded to ``dtype``."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    live = live_rows(operands)
    z = operands.z[:live].to(dtype)
    if operands.bias is not None:
        bias = operands.bias.to(wide)
        if operands.offsets is not None:
            counts = operands.offsets.long().diff()
            bias = bias.repeat_interleave(counts, 0)
        z = (z.to(wide) + bias).to(dtype)
    z = z.detach().requires_grad_()
    parts = split_gate_up(z, case.layout) if case.activation.gated else (z, None)
    gate, up = (None if part is None else part.to(wide) for part in parts)
    assert gate is not None
    a = apply(case.activation, gate, up)
    p = None if operands.row_probs is None else operands.row_probs[:live].to(wide)[:, None]
    h = (a if p is None else a * p).to(dtype)
    (dz,) = torch.autograd.grad(h, z, dh[:live].to(dtype))
    results = {"h": h.detach(), "dz": dz}
    if p is not None:
        results["dp"] = (dh[:live].to(wide) * a).sum(-1).detach()
    if operands.bias is not None:
        if operands.offsets is None:
            results["dbias"] = dz.to(wide).sum(0)
        else:
            index = torch.arange(len(COUNTS)).repeat_interleave(operands.offsets.long().diff())
            dbias = torch.zeros(operands.bias.shape, dtype=wide)
            results["dbias"] = dbias.index_add_(0, index, dz.to(wide))
    return results


def wanted_of(operands: Operands) -> Wanted:
    return Wanted(operands.row_probs is not None, h=True, dbias=operands.bias is not None)


def one_nan(value: Tensor) -> Tensor:
    """Return ``value`` on CPU with one bit pattern for every NaN."""
    return torch.where(value.isnan(), float("nan"), value).cpu()


def collect(h: Tensor, grads: Backward, live: int) -> Results:
    """Return the live rows of everything; the recomputed h must have the bits of the forward."""
    assert grads.h is not None
    assert_bitwise_equal(one_nan(grads.h[:live]), one_nan(h[:live]), "recomputed h")
    results = {"h": h[:live], "dz": grads.dz[:live], "dp": grads.dp, "dbias": grads.dbias}
    if grads.dp is not None:
        assert not grads.dp[live:].any(), "dp past the count must be 0"
        results["dp"] = grads.dp[:live]
    return {name: value.cpu() for name, value in results.items() if value is not None}


@dataclass(frozen=True)
class Runner:
    """One way to compute everything, and the dtype in which the general tests try it."""

    function: Callable[[Operands, Tensor, Case], Results]
    dtype: torch.dtype

    def __call__(self, operands: Operands, dh: Tensor, case: Case) -> Results:
        return self.function(operands, dh, case)


def run_operator(device: str, dtype: torch.dtype) -> Runner:
    def run(operands: Operands, dh: Tensor, case: Case) -> Results:
        moved = move(operands, device)
        z, bias, offsets, probs, count, _ = moved
        h = activate(
            z, case.activation, case.layout,
            bias=bias, offsets=offsets, row_probs=probs, num_rows=count,
        )  # fmt: skip
        grads = activate_backward(
            dh.to(device), moved, case.activation, case.layout, wanted_of(moved)
        )
        return collect(h, grads, live_rows(operands))

    return Runner(run, dtype)


def run_launchers(config: Config | None, device: str, dtype: torch.dtype) -> Runner:
    def run(operands: Operands, dh: Tensor, case: Case) -> Results:
        # Here, because the reference tier runs without Triton.
        from samebits.ops.activation import kernel

        moved = move(operands, device)
        options = (case.activation, case.layout)
        h = kernel.launch_activation_forward(moved, *options, config)
        grads = kernel.launch_activation_backward(
            dh.to(device), moved, *options, wanted_of(moved), config
        )
        return collect(h, grads, live_rows(operands))

    return Runner(run, dtype)


SMALL = Config(block_r=2, block_f=64, num_warps=2)


def _on_cpu(dtype: torch.dtype) -> Runner:
    return run_operator("cpu", dtype)


def _interpreted(dtype: torch.dtype) -> Runner:
    return run_launchers(SMALL, "cpu", dtype)


def _on_gpu(dtype: torch.dtype) -> Runner:
    return run_operator("cuda", dtype)


RUNNERS = (
    pytest.param(_on_cpu(torch.float32), id="cpu", marks=pytest.mark.reference),
    pytest.param(_interpreted(torch.float32), id="interpreter", marks=pytest.mark.interpret),
    pytest.param(_on_gpu(torch.bfloat16), id="cuda", marks=pytest.mark.gpu),
)


def _runs(
    runner: Callable[[torch.dtype], Runner], dtype: torch.dtype, cases: Sequence[Case], tier: str
) -> list[Any]:
    name = f"{tier}-{dtype}".replace("torch.", "")
    mark = getattr(pytest.mark, tier)
    return [pytest.param(runner(dtype), case, id=f"{name}-{case}", marks=mark) for case in cases]


# Every case in one dtype of each tier, and every dtype on some cases.
SOME = CASES[::5]
RUNS = [
    *_runs(_on_cpu, torch.bfloat16, CASES, "reference"),
    *_runs(_on_cpu, torch.float16, SOME, "reference"),
    *_runs(_on_cpu, torch.float32, CASES, "reference"),
    *_runs(_on_cpu, torch.float64, CASES, "reference"),
    # bf16 is not trusted in the interpreter.
    *_runs(_interpreted, torch.float16, SOME, "interpret"),
    *_runs(_interpreted, torch.float32, CASES, "interpret"),
    *_runs(_on_gpu, torch.bfloat16, CASES, "gpu"),
    *_runs(_on_gpu, torch.float16, SOME, "gpu"),
    *_runs(_on_gpu, torch.float32, SOME, "gpu"),
]


def assert_results(actual: Results, operands: Operands, dh: Tensor, case: Case) -> None:
    dtype = operands.z.dtype
    plain = plain_results(operands, dh, case, dtype)
    exact = plain_results(operands, dh, case, torch.float64)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert_within_budget(value, plain[name], exact[name], dtype, f"{case} {name}")

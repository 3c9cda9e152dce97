"""The operator boundary of the activation: errors, opcheck, torch.compile, autograd."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from activation_cases import GPT_OSS, Case, make_dh, make_operands, wanted_of
from samebits.activation import Activation
from samebits.errors import UnsupportedError
from samebits.ops.activation import Operands, Wanted, activate, activate_backward
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.reference

FULL = Case(GPT_OSS, Layout(interleave=1), bias="experts", probs=True, columns=6)
Z = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"z": torch.zeros(4)}, ValueError, r"z must have shape \(R, 2F\) or \(R, F\), got \(4,\)"),
        ({"z": torch.zeros(4, 6).int()}, TypeError, "z must be bf16, fp16, fp32 or fp64, got"),
        ({"z": torch.zeros(4, 5)}, ValueError, "z must have an even number of columns, 2F, got 5"),
        ({"z": torch.zeros(4, 0)}, ValueError, r"z must have at least one column, got \(4, 0\)"),
        ({"layout": Layout(interleave=2)}, ValueError, "interleave must divide F = 3"),
        (
            {"activation": Activation(gated=False), "layout": Layout(up_first=True)},
            ValueError,
            "layout must be halves for an activation without a gate",
        ),
        ({"bias": torch.zeros(5)}, ValueError, r"bias must have shape \(6,\) or \(E, 6\)"),
        ({"bias": torch.zeros(6).half()}, TypeError, "bias must be torch.float32"),
        ({"bias": torch.zeros(2, 6)}, ValueError, r"offsets must have shape \(3,\)"),
        (
            {"bias": torch.zeros(2, 6), "offsets": torch.zeros(3)},
            TypeError,
            "offsets must be int32 or int64",
        ),
        ({"offsets": torch.zeros(3).int()}, ValueError, "offsets must come with a bias"),
        (
            {"bias": torch.zeros(0, 6), "offsets": torch.zeros(1).int()},
            ValueError,
            "bias must have at least one expert",
        ),
        ({"row_probs": torch.zeros(4, 1)}, ValueError, r"row_probs must have shape \(R,\)"),
        ({"row_probs": torch.zeros(4).int()}, TypeError, "row_probs must be bf16"),
        ({"num_rows": torch.zeros(()).int()}, ValueError, r"num_rows must have shape \(1,\)"),
        ({"num_rows": torch.zeros(1)}, TypeError, "num_rows must be int32 or int64"),
        (
            {"row_probs": torch.zeros(4, device="meta")},
            ValueError,
            "row_probs must be on cpu, where z is, got meta",
        ),
    ],
)
def test_wrong_arguments_are_named(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        activate(**{"z": Z, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dh", "wanted", "error", "message"),
    [
        (torch.zeros(4, 6), Wanted(), ValueError, r"dh must have shape \(4, 3\) = \(R, F\)"),
        (torch.zeros(4, 3).half(), Wanted(), TypeError, "dh must be torch.float32"),
        (torch.zeros(4, 3, device="meta"), Wanted(), ValueError, "dh must be on cpu"),
        (torch.zeros(4, 3), Wanted(dbias=True), ValueError, "dbias must be False without a bias"),
    ],
)
def test_wrong_gradients_are_named(
    dh: torch.Tensor, wanted: Wanted, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        activate_backward(dh, Operands(Z), wanted=wanted)


def test_inputs_are_not_modified() -> None:
    operands = make_operands(FULL, torch.float32)
    dh = make_dh(operands, FULL)
    copies = [None if t is None else t.clone() for t in (*operands, dh)]

    z, bias, offsets, probs, _, _ = operands
    activate(z, GPT_OSS, FULL.layout, bias=bias, offsets=offsets, row_probs=probs)
    activate_backward(dh, operands, GPT_OSS, FULL.layout, wanted_of(operands))

    for tensor, copy in zip((*operands, dh), copies, strict=True):
        assert tensor is None or torch.equal(tensor, copy)


@pytest.mark.parametrize("case", [Case(columns=6), FULL], ids=str)
def test_opcheck(case: Case) -> None:
    operands = make_operands(case, torch.float32)
    keys = (case.activation.key, case.layout.key)
    dh = make_dh(operands, case)

    torch.library.opcheck(torch.ops.samebits.activation_forward, (*operands, *keys))
    torch.library.opcheck(
        torch.ops.samebits.activation_backward, (dh, *operands, *keys, *wanted_of(operands))
    )


def test_compiled_whole_with_one_graph_for_every_row_count() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def gradients(rows: int, *, compiled: bool) -> list[torch.Tensor]:
        operands = make_operands(FULL, torch.float32, rows=rows)
        z, bias, offsets, probs, _, _ = operands
        assert offsets is not None
        offsets[-1] = rows
        leaves = [t.detach().requires_grad_() for t in (z, bias, probs) if t is not None]

        def call(z: torch.Tensor, bias: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            return activate(z, GPT_OSS, FULL.layout, bias=bias, offsets=offsets, row_probs=probs)

        function = torch.compile(call, fullgraph=True, backend=counter) if compiled else call
        h = function(*leaves)
        return [h.detach(), *torch.autograd.grad(h, leaves, make_dh(operands, FULL))]

    for rows in (9, 127, 193, 64, 18):
        expected = gradients(rows, compiled=False)
        for ours, theirs in zip(gradients(rows, compiled=True), expected, strict=True):
            assert_bitwise_equal(ours, theirs)
    # One for the first size, one for all others.
    assert counter.frame_count <= 2


def test_a_second_derivative_is_refused() -> None:
    z = torch.randn(2, 4, requires_grad=True)

    with pytest.raises(UnsupportedError, match="differentiable once, not twice"):
        torch.autograd.grad(activate(z).sum(), z, create_graph=True)


FIRST_CALL = """
import sys, torch
from samebits.activation import Activation
from samebits.ops.activation import activate
f = torch.compile(lambda z: activate(z, Activation(limit=2.0)), fullgraph=True, backend="aot_eager")
z = torch.randn(3, 8, requires_grad=True)
f(z).sum().backward()
assert z.grad is not None
assert "samebits.ops.activation.kernel" not in sys.modules
"""


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, env=_environment())


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # noqa: TID251

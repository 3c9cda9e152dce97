"""Warming up: what it refuses without a GPU, and what it compiles for one."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from samebits import Problem, UnsupportedError, WeightGradients, warmup
from samebits.backends.repetition import Watch

PROBLEM = Problem(H=64, F=32, E=2, K=1, dtype="bf16")

# A process in which this machine looks like one with a GPU, as far as compiling goes.
PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

class Active:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

names = []
driver.set_active(Active())
CompiledKernel._init_handles = lambda self: names.append(self.metadata.name)
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device: (8, 0)
import samebits
problem = samebits.Problem.parse("H=64 F=32 E=2 K=1 dtype=bf16")
samebits.warmup(problem, tokens=[1])
print(*sorted(set(names)))
try:
    samebits.warmup(samebits.Problem.parse("H=64 F=32 E=2 K=1 dtype=bf16 device=sm_90"), [1])
except ValueError as error:
    print(error)
"""


@pytest.mark.reference
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_says_why_not_without_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="for the GPU of this machine, which has none"):
        warmup(PROBLEM, tokens=[1])


@pytest.mark.reference
def test_arguments_are_checked_first() -> None:
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        warmup(PROBLEM, tokens=[1, 0])
    with pytest.raises(TypeError, match="tokens must be an int"):
        warmup(PROBLEM, tokens=["1"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="tokens must be an Iterable, got int"):
        warmup(PROBLEM, tokens=16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="problem must be a Problem"):
        warmup("H=64", tokens=[1])  # type: ignore[arg-type]


@pytest.mark.compile
def test_compiles_and_loads_every_kernel_of_a_call_without_running_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    kernels, refusal = done.stdout.splitlines()
    assert kernels.split() == [
        "_few_metadata_kernel",
        "_first_projection_kernel",
        "_second_projection_kernel",
        "_sorted_rows_kernel",
        "_sum_kernel",
    ]
    assert refusal == "problem must be of the current device (sm_80), got sm_90"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is compiled: (kernel, whether it adds to a buffer); nothing is."""
    from samebits.ops._triton.launch import Recordable

    found: list[tuple[str, Any]] = []

    def note(kernel: Any, _: Any, __: Any, constants: dict[str, Any]) -> None:
        found.append((kernel.fn.__name__, constants.get("ACCUMULATE")))

    monkeypatch.setattr(Recordable, "_compile", note)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return found


TRAINED = "H=64 F=32 E=2 K=1 dtype=bf16 gate_up_bias=bf16 down_bias=bf16 grad=True"


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("policy", "adding"),
    [
        (None, [False]),
        (WeightGradients(main_grad=True), [False, True]),
        (WeightGradients(delayed=True), [False]),
        (WeightGradients(main_grad=True, delayed=True), [False, True]),
    ],
)
def test_the_kernels_that_add_to_main_grad_are_compiled_where_they_are_used(
    policy: WeightGradients | None, adding: Sequence[bool], compiled: list[tuple[str, Any]]
) -> None:
    with Watch() as watch:
        # So few that no kernel of specialised warps takes the products that nothing is added to.
        warmup(Problem.parse(TRAINED), [60], weight_gradients=policy)

    for kernel in ("_weight_gradient_kernel", "_sum_chunks_kernel"):
        assert sorted({adds for name, adds in compiled if name == kernel}) == adding
    # Whatever else a pass did, it could not be repeated by its launches.
    assert watch.others == []


@pytest.mark.interpret
def test_a_layer_that_recomputes_has_its_forward_without_z_compiled(
    compiled: list[tuple[str, Any]],
) -> None:
    warmup(Problem.parse(TRAINED), [300])
    plain = [name for name, _ in compiled].count("_first_projection_kernel")
    compiled.clear()

    warmup(Problem.parse(TRAINED), [300], recompute=True)

    assert [name for name, _ in compiled].count("_first_projection_kernel") == 2 * plain


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("text", "backend"),
    [
        (str(PROBLEM), "reference"),
        # Rows of MXFP8 may be beyond fp16 in kernels.
        ("H=64 F=32 E=2 K=1 dtype=fp16 format=mxfp8 row_format=mxfp8", "auto"),
    ],
)
def test_what_has_no_kernels_is_refused(
    text: str, backend: str, compiled: list[tuple[str, Any]]
) -> None:
    with pytest.raises(UnsupportedError, match="it has no kernels to compile"):
        warmup(Problem.parse(text), [1], backend=backend)
    assert compiled == []


@pytest.mark.reference
def test_what_only_a_backward_has_needs_a_problem_with_one() -> None:
    with pytest.raises(ValueError, match="grad=True where weight_gradients or recompute"):
        warmup(PROBLEM, [1], recompute=True)
    with pytest.raises(ValueError, match="grad=True where weight_gradients or recompute"):
        warmup(PROBLEM, [1], weight_gradients=WeightGradients(delayed=True))
    with pytest.raises(TypeError, match="weight_gradients must be a WeightGradients"):
        warmup(PROBLEM, [1], weight_gradients=True)  # type: ignore[arg-type]

"""Warming up: what it refuses without a GPU, and what it compiles for one."""

import subprocess
import sys

import pytest
import torch

from samebits import Problem, UnsupportedError, warmup

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
        "_sum_kernel",
    ]
    assert refusal == "problem must be of the current device (sm_80), got sm_90"

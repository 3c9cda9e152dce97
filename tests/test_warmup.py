"""Warming up: what it refuses."""

import pytest
import torch

from samebits import Problem, UnsupportedError, warmup

pytestmark = pytest.mark.reference

PROBLEM = Problem(H=64, F=32, E=2, K=1, dtype="bf16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_says_why_not_without_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="for the GPU of this machine, which has none"):
        warmup(PROBLEM, tokens=[1])


def test_arguments_are_checked_first() -> None:
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        warmup(PROBLEM, tokens=[1, 0])
    with pytest.raises(TypeError, match="tokens must be an int"):
        warmup(PROBLEM, tokens=["1"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="problem must be a Problem"):
        warmup("H=64", tokens=[1])  # type: ignore[arg-type]

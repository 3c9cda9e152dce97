"""Every backend against the contract, over the whole catalogue of cases."""

from dataclasses import replace

import pytest

from samebits.backends import BACKENDS
from samebits.testing.cases import CASES, QUANTIZED
from samebits.testing.inputs import judge_all, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

# (backend, case) that a backend refuses, with the start of its reason; compared, so that coverage
# cannot shrink unseen.
EXPECTED_REFUSALS: dict[tuple[str, str], str] = {}
ALL = CASES | QUANTIZED
# Backends that refuse every problem of a CPU; they have a suite of their own.
GPU_ONLY = {"fused"}
ON_CPU = [backend for backend in BACKENDS if backend not in GPU_ONLY]
RUNNABLE = [
    pytest.param(backend, name, id=f"{backend}-{name}")
    for backend, module in BACKENDS.items()
    for name, problem in ALL.items()
    if module.why_not(problem) is None
]


def test_refusals_are_the_expected_ones() -> None:
    refused = {
        (backend, name): module.why_not(problem)
        for backend, module in BACKENDS.items()
        for name, problem in ALL.items()
        if module.why_not(problem) is not None and backend not in GPU_ONLY
    }

    assert refused == EXPECTED_REFUSALS


def test_gpu_backends_refuse_a_cpu_with_the_reason() -> None:
    for backend in GPU_ONLY:
        for problem in ALL.values():
            assert str(BACKENDS[backend].why_not(problem)).startswith("it needs an NVIDIA GPU")


@pytest.mark.parametrize("distribution", ["uniform", "dropped"])
@pytest.mark.parametrize(("backend", "name"), RUNNABLE)
def test_output_and_every_gradient_within_budget(
    backend: str, name: str, distribution: str
) -> None:
    problem = ALL[name]
    inputs = make_inputs(problem, 7, distribution=distribution, valid_tokens=5)

    judgements = judge_all(problem, inputs, run(problem, inputs, backend))

    over = {quantity: str(j) for quantity, j in judgements.items() if not j.passed}
    assert not over, problem


@pytest.mark.parametrize(("backend", "name"), RUNNABLE)
def test_inference_has_the_bits_of_training(backend: str, name: str) -> None:
    problem = ALL[name]
    inputs = make_inputs(problem, 17, distribution="zipf")

    inference = run(replace(problem, grad=False), inputs, backend)["out"]

    assert_bitwise_equal(run(problem, inputs, backend)["out"], inference)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("tokens", [0, 1, 2, 64, 129])
@pytest.mark.parametrize("distribution", ["uniform", "zipf", "one", "dropped"])
def test_token_counts_and_distributions(backend: str, tokens: int, distribution: str) -> None:
    problem = CASES["gpt-oss-whole"]
    inputs = make_inputs(problem, tokens, distribution=distribution)

    judgements = judge_all(problem, inputs, run(problem, inputs, backend))

    over = {quantity: str(j) for quantity, j in judgements.items() if not j.passed}
    assert not over


@pytest.mark.parametrize("backend", ON_CPU)
def test_repeats_bit_for_bit(backend: str) -> None:
    problem = CASES["bf16-gpt-oss"]
    inputs = make_inputs(problem, 65)

    first, second = (run(problem, inputs, backend) for _ in range(2))

    for quantity, value in first.items():
        assert_bitwise_equal(value, second[quantity], quantity)

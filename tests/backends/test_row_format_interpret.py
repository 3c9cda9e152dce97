"""Activations in 8 bits by the stages of a GPU, in the interpreter: the reference's numbers."""

from dataclasses import replace

import pytest
import torch
from row_format_cases import CASES

from samebits.backends.call import call_of
from samebits.backends.grouped import eight_bits
from samebits.problem import Problem, ProbPlacement
from samebits.testing.inputs import Inputs, make_inputs, run
from samebits.testing.numerics import relative_error, unit_roundoff

pytestmark = pytest.mark.interpret

# The interpreter multiplies bf16 wrongly.
SMALL = {
    "H": 160,
    "F": 96,
    "E": 3,
    "K": 2,
    "dtype": "fp32",
    "gate_up_bias": "fp32",
    "down_bias": "fp32",
}


def _launched(problem: Problem, inputs: Inputs) -> torch.Tensor:
    call = call_of(inputs.x, inputs.routing, inputs.weights, inputs.num_valid_tokens)
    return eight_bits.forward(problem, call)[0]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("fp8", ProbPlacement.FC1_INPUT),
        ("fp8", ProbPlacement.FC2_INPUT),
        ("fp8", ProbPlacement.FC2_OUTPUT),
        ("mxfp8", ProbPlacement.FC2_INPUT),
        ("mxfp4", ProbPlacement.FC1_INPUT),
    ],
)
def test_stages_are_the_reference(name: str, placement: ProbPlacement) -> None:
    problem = replace(CASES[name], **SMALL, placement=placement, counted=True)
    inputs = make_inputs(problem, 6, distribution="dropped", valid_tokens=5)
    inputs.x[5] = torch.nan

    out = _launched(replace(problem, device="sm_100"), inputs)

    expected = run(problem, inputs, "reference")["out"]
    # Sums of a product have torch's order there; everything else is the same.
    assert relative_error(out, expected) < 4 * unit_roundoff(torch.float32)
    assert not out[5].any()

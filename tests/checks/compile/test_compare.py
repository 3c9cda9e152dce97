"""When a result counts as wrong, and as whose."""

import math

import pytest
import torch

from samebits.checks.compile.compare import compare, distance, effect, named_tensors

pytestmark = pytest.mark.reference

ONE = torch.ones(8)


def test_equal_results_have_no_distance_where_they_are_not_finite():
    value = torch.tensor([float("nan"), float("inf"), 1.0])

    assert distance(value, value.clone()) == 0.0


def test_a_nan_that_only_one_has_is_infinitely_far():
    assert distance(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == math.inf


def test_shapes_that_differ_are_infinitely_far():
    assert distance(torch.ones(2), torch.ones(3)) == math.inf


def test_a_gradient_that_should_be_zero_is_wrong():
    judged = compare({"grad": ONE}, {"grad": 0 * ONE}, [], {})

    assert judged.wrong
    assert judged.distance == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_wrong(dtype):
    eps = torch.finfo(dtype).eps

    judged = compare({"out": (ONE * (1 + eps)).to(dtype)}, {"out": ONE.to(dtype)}, [], {})

    assert not judged.wrong


def test_a_small_effect_is_seen_by_whose_result_it_is():
    own, other = {"out": ONE}, {"out": ONE * (1 + 4e-6)}

    judged = compare(dict(other), own, [other], {"out": 1e-8})

    assert judged.wrong
    assert judged.nearest == 0
    assert judged.distance < judged.allowed


def test_a_result_that_is_off_from_the_first_call_on_is_allowed_to_stay_so():
    judged = compare({"out": ONE * 1.001}, {"out": ONE}, [], {"out": 1e-3})

    assert not judged.wrong


def test_the_worst_tensor_is_named():
    expected = {"out": ONE, "grad x": ONE}

    judged = compare({"out": ONE, "grad x": ONE * 2}, expected, [], {})

    assert (judged.tensor, judged.wrong) == ("grad x", True)


def test_a_missing_output_is_wrong():
    assert compare({"out[0]": ONE}, {"out[0]": ONE, "out[1]": ONE}, [], {}).wrong
    assert effect({"out": ONE}, {}) == math.inf


def test_outputs_are_named_by_their_place():
    value = {"loss": torch.zeros(()), "aux": (ONE, [2.5, "text"])}

    assert set(named_tensors(value)) == {"out['loss']", "out['aux'][0]", "out['aux'][1][0]"}

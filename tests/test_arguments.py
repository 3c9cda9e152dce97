"""What callers give: messages name the argument, the rule and the value."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import Activation, ExpertWeights, Routing, RoutingRule, experts
from samebits.arguments import read_bool, read_options, require_number
from samebits.problem import ProbPlacement
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["c=1"], "unknown option 'c'; expected one of 'a', 'b', 'p'"),
        (["a=1", "b=True", "a=1"], "a must be given once, got twice"),
        (["a=1.5"], "a must be an int, got '1.5'"),
        (["a"], "a must be an int, got ''"),
        (["b=true"], "b must be True or False, got 'true'"),
        (["p=nope"], "unknown placement 'nope'; expected one of"),
    ],
)
def test_a_spelling_that_says_nothing_is_refused(items: list[str], message: str) -> None:
    readers = {"a": int, "b": read_bool, "p": ProbPlacement}

    with pytest.raises(ValueError, match=re.escape(message)):
        read_options("option", items, readers)


def test_values_are_read_by_name() -> None:
    assert read_options("option", ["b=False", "a=-2"], {"a": int, "b": read_bool}) == {
        "a": -2,
        "b": False,
    }


@pytest.mark.parametrize(
    "key",
    [
        "silu(limit=7.0,limit=5.0)",
        "silu(gated=maybe)",
        "silu(alpha=big)",
        "silu(limit_position=mid,limit=1.0)",
    ],
)
def test_a_key_of_an_activation_has_one_meaning(key: str) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown"):
        Activation.parse(key)


@pytest.mark.parametrize("key", ["topk=2,topk=3", "topk=2,renormalize=1", "topk=two", "topk=2,"])
def test_a_key_of_a_rule_has_one_meaning(key: str) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown"):
        RoutingRule.parse(key)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (float("nan"), ValueError),
        (10**400, ValueError),
        (0, ValueError),
    ],
)
def test_a_number_is_finite_and_in_range(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^rate must be "):
        require_number("rate", value, above=0.0)


def test_zero_has_one_sign() -> None:
    assert str(require_number("offset", -0.0)) == "0.0"


@pytest.mark.parametrize("kind", [[], None, 3])
def test_names_are_text(kind: Any) -> None:
    with pytest.raises(TypeError, match="activation kind must be a str"):
        Activation(kind=kind)
    with pytest.raises(TypeError, match="score must be a str"):
        RoutingRule(topk=1, score=kind)
    with pytest.raises(TypeError, match="placement must be a str"):
        ProbPlacement(kind)


def test_compiled_code_may_make_an_activation() -> None:
    weights = ExpertWeights(gate_up=torch.randn(3, 160, 48), down=torch.randn(3, 48, 80))

    def call(x: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Tensor:
        return experts(x, Routing(topk_ids, topk_probs), weights, Activation(limit=7.0))

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")

    arguments = (torch.randn(5, 48), torch.randint(0, 3, (5, 2)), torch.rand(5, 2))
    assert_bitwise_equal(compiled(*arguments), call(*arguments))

"""A caller's own output buffer."""

import re
from typing import Any

import pytest
import torch

from samebits import ExpertWeights, Routing, UnsupportedError, experts
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

WEIGHTS = ExpertWeights(gate_up=torch.randn(3, 16, 8), down=torch.randn(3, 8, 8))
X = torch.randn(4, 8)
ROUTING = Routing(torch.tensor([[0, 1], [2, 0], [1, 2], [-1, 1]]), torch.rand(4, 2))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_is_written_and_returned(backend: str, out_dtype: torch.dtype | None) -> None:
    out = torch.empty(4, 8)

    result = experts(X, ROUTING, WEIGHTS, backend=backend, out_dtype=out_dtype, out=out)

    assert result is out
    assert_bitwise_equal(out, experts(X, ROUTING, WEIGHTS, backend=backend))


_BUFFER = torch.zeros(100)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(4, 7), "out must be torch.float32 of shape (4, 8) on cpu, got"),
        (torch.empty(4, 8, dtype=torch.float16), "out must be torch.float32 of shape"),
        (torch.empty(4, 8, device="meta"), "out must be torch.float32 of shape (4, 8) on cpu"),
        (torch.empty(8, 4).T, "out must be contiguous, got strides (1, 4)"),
        (X, "out must have no memory in common with x, got some"),
        (WEIGHTS.down[0, :4], "out must have no memory in common with down, got some"),
    ],
)
def test_what_cannot_take_the_result_is_refused(out: Any, message: str) -> None:
    before = X.clone()

    with pytest.raises(ValueError, match=re.escape(message)):
        experts(X, ROUTING, WEIGHTS, out=out)

    assert_bitwise_equal(X, before)


def test_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match="out must be a Tensor, got list"):
        experts(X, ROUTING, WEIGHTS, out=[1.0])  # type: ignore[arg-type]


def test_may_be_another_part_of_the_same_buffer() -> None:
    x, out = _BUFFER[:32].view(4, 8), _BUFFER[32:64].view(4, 8)
    x.copy_(X)

    experts(x, ROUTING, WEIGHTS, out=out)

    assert_bitwise_equal(out, experts(X, ROUTING, WEIGHTS))


def test_has_no_gradient() -> None:
    x, out = X.clone().requires_grad_(), torch.empty(4, 8)

    with pytest.raises(UnsupportedError, match="no gradients through out"):
        experts(x, ROUTING, WEIGHTS, out=out)
    with torch.no_grad():
        experts(x, ROUTING, WEIGHTS, out=out)

    assert_bitwise_equal(out, experts(X, ROUTING, WEIGHTS))


def test_is_written_by_compiled_code() -> None:
    def function(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, out: torch.Tensor) -> Any:
        return experts(x, Routing(ids, probs), WEIGHTS, out=out) + 1

    out = torch.zeros(4, 8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    result = compiled(X, ROUTING.topk_ids, ROUTING.topk_probs, out)

    assert_bitwise_equal(out, experts(X, ROUTING, WEIGHTS))
    assert_bitwise_equal(result, out + 1)

import pytest
import torch

from samebits.integrations.transformers.oracle import Float64Casts

pytestmark = pytest.mark.reference

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4) / 3
CASTS = {
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to, by position": lambda x: x.to(torch.float32),
    "to, by name": lambda x: x.to(dtype=torch.bfloat16),
    "type": lambda x: x.type(torch.float16),
    "type, by its old name": lambda x: x.type("torch.FloatTensor"),
    "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "sum": lambda x: x.sum(0, dtype=torch.float32),
    "a like tensor": lambda x: torch.zeros_like(x, dtype=torch.float32) + x,
    "a tensor of the default type": lambda x: torch.ones(4) * x,
    "a numbered range": lambda x: torch.arange(4, dtype=torch.float32) + x,
    "through another tensor": lambda x: x.type_as(torch.zeros(1)),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_no_cast_loses_a_bit(cast):
    with Float64Casts():
        value = cast(X)
        back = cast(X.clone())
    assert value.dtype == torch.float64
    assert torch.equal(value, back)


@pytest.mark.parametrize("cast", [CASTS["float"], CASTS["to, by position"], CASTS["bfloat16"]])
def test_values_are_those_of_the_argument(cast):
    with Float64Casts():
        assert torch.equal(cast(X), X)
    assert not torch.equal(cast(X).double(), X)


def test_integers_and_bools_pass():
    with Float64Casts():
        assert X.to(torch.int32).dtype == torch.int32
        assert (X > 0).dtype == torch.bool
        assert (
            torch.cumsum(torch.ones(3, dtype=torch.int64), 0, dtype=torch.int32).dtype
            == torch.int32
        )


def test_gradients_are_exact_too():
    x = X.clone().requires_grad_()
    with Float64Casts():
        (x.float() * x.to(torch.bfloat16)).sum().backward()
    assert torch.equal(x.grad, 2 * X)


def test_it_ends_with_its_block():
    with Float64Casts():
        pass
    assert X.float().dtype == torch.float32

"""The norm of rows in the interpreter: any width, and rows that no expert has."""

import pytest
import torch

from samebits.ops.row_norm.kernel import launch_row_norm, launch_row_norm_backward
from samebits.ops.row_norm.reference import row_norm, row_norm_backward
from samebits.testing.numerics import assert_within_budget

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("hidden", [1, 7, 40, 600])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_row_is_within_the_budget(hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(hidden)
    y = 50 * torch.randn(5, hidden, generator=generator)
    scale = torch.rand(hidden, generator=generator) + 0.5
    kept = torch.tensor([4], dtype=torch.int32)

    whole = launch_row_norm(y, scale, kept, 1e-3, dtype)

    # Memory that is not written is NaN in tests.
    assert whole[4].isnan().all()
    out = whole[:4]
    exact = row_norm(y[:4].double(), scale.double(), 1e-3, torch.float64)
    assert_within_budget(out, row_norm(y[:4], scale, 1e-3, dtype), exact, dtype)


@pytest.mark.parametrize("hidden", [1, 40, 1100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_gradient_is_within_the_budget(hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(hidden)
    y = 50 * torch.randn(3, hidden, generator=generator)
    scale = torch.rand(hidden, generator=generator) + 0.5
    dout = torch.randn(3, hidden, generator=generator).to(dtype)
    probs = torch.rand(3, 1, generator=generator)
    # Rows 0 and 1 are slots 2 and 0; slot 1 is dropped.
    offsets, slots, inverse = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 2], [2, 0, 3], [1, 3, 0])
    )
    order = [2, 0]
    dn = dout[order].float() * probs[order]
    exact_y, exact_terms = row_norm_backward(y[:2].double(), scale.double(), dn.double(), 1e-3)
    plain_y, plain_terms = row_norm_backward(y[:2], scale, dn, 1e-3)

    found = launch_row_norm_backward(
        y.clone(), scale, dout, offsets, slots, inverse, 1e-3,
        y_probs=probs, h_probs=None, bias=None,
    )  # fmt: skip

    assert found.y[2].isnan().all()
    assert found.bounds.tolist() == [0, 2]
    assert found.probs is not None
    assert found.probs[1] == 0
    assert_within_budget(found.y[:2], plain_y.to(dtype), exact_y, dtype)
    assert_within_budget(found.terms[:2], plain_terms, exact_terms, torch.float32)

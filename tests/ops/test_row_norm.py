"""The norm of rows in the interpreter: any width, and rows that no expert has."""

import pytest
import torch

from samebits.ops.row_norm.kernel import launch_row_norm
from samebits.ops.row_norm.reference import row_norm
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

"""Scalar functions of fp32 tiles against fp64, in the interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from samebits.ops._triton.elementwise import sigmoid_fp32

pytestmark = pytest.mark.interpret


@triton.jit
def _sigmoid_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, sigmoid_fp32(tl.load(x_ptr + place)))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    _sigmoid_kernel[(x.numel() // 1024,)](x, y, BLOCK=1024)
    return y


def test_a_sigmoid_in_fp32_is_within_two_units_in_the_last_place() -> None:
    x = torch.linspace(-80.0, 80.0, 64 * 1024)

    exact = x.double().sigmoid()

    error = (_sigmoid(x).double() - exact).abs() / exact
    assert error.max() <= 2 * torch.finfo(torch.float32).eps


def test_a_sigmoid_in_fp32_ends_in_0_and_1_and_nan_stays_nan() -> None:
    x = torch.zeros(1024)
    x[:5] = torch.tensor([-torch.inf, -1e30, 1e30, torch.inf, torch.nan])

    with pytest.warns(RuntimeWarning, match="overflow"):
        y = _sigmoid(x)

    assert y[:5].nan_to_num(7.0).tolist() == [0.0, 0.0, 1.0, 1.0, 7.0]
    assert y[5] == 0.5

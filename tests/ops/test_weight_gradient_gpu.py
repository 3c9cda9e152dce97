"""Gradients of parameters by specialised warps: the bits of the other kernel, whatever the rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.ops.weight_gradient.kernel import launch_order, launch_weight_gradient
from samebits.ops.weight_gradient.tuning import TABLE, Specialized
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

TILES = {
    "in use": Specialized(),
    "wide": Specialized(block_m=256, block_n=128),
    "long steps": Specialized(block_k=64, num_stages=3),
    "short steps": Specialized(block_k=16, num_stages=12),
    "few programs": Specialized(programs=7, group=3),
}
# Every number of rows in the last step; experts without rows; many steps.
ROWS = {
    "every rest": list(range(130)),
    "few": [0, 1, 0, 15, 16, 17, 31, 32, 33, 0],
    "many": [700, 0, 513, 1024, 40, 333],
}
SIZES = ((128, 256), (136, 1032), (40, 72))


def _operands(rows: list[int], size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(sum(rows))
    total = sum(rows)
    a, b = (
        # Some rows belong to no expert.
        torch.randn(total + 70, width, device="cuda", generator=generator).to(dtype)
        for width in size
    )
    a[::5] *= 1e-3
    b[3::7] = -0.0
    for operand in (a, b):
        operand[total:] = float("nan")
    # What one expert holds is no business of its neighbours'.
    longest = max(range(len(rows)), key=rows.__getitem__)
    first = sum(rows[:longest])
    a[first + rows[longest] - 1, 3] = float("inf")
    b[first, 5] = float("nan")
    offsets = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32, device="cuda")
    return a, b, offsets, launch_order(offsets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_bits_are_those_of_one_kind_of_warp(
    tile: Specialized, rows: list[int], dtype: torch.dtype
) -> None:
    plain = TABLE[0][1]
    for size in SIZES:
        operands = _operands(rows, size, dtype)
        for transposed in (False, True):
            results = []
            for config in (replace(plain, specialized=None), replace(plain, specialized=tile)):
                for _ in range(3):
                    shape = (len(rows), *(size[::-1] if transposed else size))
                    dw = torch.full(shape, 7.0, device="cuda", dtype=dtype)
                    seen = dw.transpose(1, 2) if transposed else dw
                    launch_weight_gradient(*operands, seen, config)
                    results.append(dw)
            for other in results[1:]:
                assert_bitwise_equal(other, results[0], f"{size} {transposed}")


def test_what_descriptors_cannot_say_takes_the_other_kernel() -> None:
    config = replace(TABLE[0][1], specialized=Specialized())
    plain = replace(config, specialized=None)
    a, b, offsets, order = _operands([40, 0, 100], (136, 72), torch.bfloat16)
    places = {
        "fp32": torch.zeros(3, 136, 72, device="cuda"),
        "odd stride": torch.zeros(3, 136, 73, device="cuda", dtype=torch.bfloat16)[:, :, :72],
        "odd address": torch.zeros(3, 136, 80, device="cuda", dtype=torch.bfloat16)[:, :, 1:73],
    }
    for name, place in places.items():
        found, expected = place.clone(), place.clone()
        for dw, tile in ((found, config), (expected, plain)):
            launch_weight_gradient(a, b, offsets, order, dw, tile)
        assert_bitwise_equal(found, expected, name)
    ones = torch.ones(3, 136, 72, device="cuda", dtype=torch.bfloat16)
    found, expected = ones.clone(), ones.clone()
    for dw, tile in ((found, config), (expected, plain)):
        launch_weight_gradient(a, b, offsets, order, dw, tile, accumulate=True)
    assert_bitwise_equal(found, expected, "added")

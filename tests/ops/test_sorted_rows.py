"""The metadata of sorted rows in the interpreter: what sorting their experts gives, without it."""

import pytest
import torch
from torch import Tensor

from samebits.ops.permute import reference as permute
from samebits.ops.permute.tuning import Metadata
from samebits.ops.sorted_rows import reference
from samebits.ops.sorted_rows.kernel import launch_sorted_rows
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.interpret

# Rows of each expert, and rows of none behind them.
SIZES = [([5], 0), ([0, 7, 0, 3], 2), ([0, 0, 0], 4), ([1] * 33, 0), ([40, 0, 1000, 17], 30)]


def _parts(metadata: Metadata) -> list[Tensor]:
    """Return every tensor that counts: tiles from their count on hold anything."""
    count = int(metadata.tiles.count)
    *columns, counted = metadata.tiles
    return [*metadata[:3], counted, *(column[:count] for column in columns)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("sizes", "rest"), SIZES)
def test_equals_the_sort_of_the_rows_experts(
    sizes: list[int], rest: int, dtype: torch.dtype
) -> None:
    experts, total = len(sizes), sum(sizes) + rest
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(dtype)
    counts = torch.tensor([*sizes, rest])
    ids = torch.arange(experts + 1).repeat_interleave(counts)[:, None]
    expected = _parts(permute.metadata(ids, experts, 16))

    for found in (launch_sorted_rows(offsets, total, 16), reference.metadata(offsets, total, 16)):
        for value, other in zip(_parts(found), expected, strict=True):
            assert_bitwise_equal(value, other)


@pytest.mark.parametrize(
    "offsets", [[0, 9, 2, 9], [-5, 3, 99, 4], [7, 7, 7, 1 << 40], [0, -(1 << 40), 2, 3]]
)
def test_wrong_offsets_stay_within_the_rows(offsets: list[int]) -> None:
    total = 9
    found = launch_sorted_rows(torch.tensor(offsets), total, 4)

    bounds = found.offsets.tolist()
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert bounds[-1] <= total
    count = int(found.tiles.count)
    assert count <= found.tiles.row.shape[0]
    covered = [
        row
        for first, end in zip(found.tiles.row[:count], found.tiles.end[:count], strict=True)
        for row in range(int(first), min(int(first) + 4, int(end)))
    ]
    assert sorted(covered) == list(range(bounds[-1]))


def test_no_rows_are_legal() -> None:
    found = launch_sorted_rows(torch.zeros(4, dtype=torch.int32), 0, 16)

    assert found.offsets.tolist() == [0, 0, 0, 0]
    assert int(found.tiles.count) == 0

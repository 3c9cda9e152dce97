"""Gradients of parameters in the interpreter: any storage, any expert size, added or written."""

from dataclasses import replace

import pytest
import torch

from samebits.ops.weight_gradient import kernel
from samebits.ops.weight_gradient.kernel import (
    launch_bias_gradient,
    launch_order,
    launch_weight_gradient,
)
from samebits.ops.weight_gradient.reference import bias_gradient, weight_gradient
from samebits.ops.weight_gradient.specialized.kernel import launch_specialized_weight_gradient
from samebits.ops.weight_gradient.tuning import Config, Specialized
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = [
    pytest.mark.interpret,
    # An expert of infinities has a gradient of NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

# An empty expert, one below a step, one of whole steps, one with a rest.
OFFSETS = torch.tensor([0, 0, 5, 69, 102], dtype=torch.int32)
TILE = Config(block_m=32, block_n=64, block_k=32, num_warps=4, num_stages=2, programs=2)
CONFIGS = {
    "boxes": TILE,
    "pointers": replace(TILE, tma=False, block_k=16),
    "few programs": replace(TILE, programs=5),
}


def _rows(width, seed):
    rows = torch.randn(110, width, generator=torch.Generator().manual_seed(seed))
    # Past the last expert.
    rows[102:] = float("nan")
    return rows


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_equal_the_reference(transposed, config) -> None:
    a, b = _rows(40, 0), _rows(72, 1)
    dw = torch.empty(4, 72, 40).transpose(1, 2) if transposed else torch.empty(4, 40, 72)

    launch_weight_gradient(a, b, OFFSETS, launch_order(OFFSETS), dw, config)

    plain = weight_gradient(a, b, OFFSETS, torch.float32)
    exact = weight_gradient(a.double(), b.double(), OFFSETS, torch.float64)
    assert_within_budget(dw, plain, exact, torch.float32, per_expert=True)
    assert_bitwise_equal(dw[0], torch.zeros(40, 72))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tile_that_leaves_through_a_box_has_the_same_bits(transposed) -> None:
    a, b = _rows(40, 0).half(), _rows(72, 1).half()
    order, results = launch_order(OFFSETS), []
    for stored in (False, True):
        shape = (4, 72, 40) if transposed else (4, 40, 72)
        dw = torch.full(shape, float("nan"), dtype=torch.float16)
        seen = dw.transpose(1, 2) if transposed else dw
        config = replace(TILE, stored=stored)
        results.append(launch_weight_gradient(a, b, OFFSETS, order, seen, config))

    assert_bitwise_equal(results[1], results[0])


@pytest.mark.parametrize("config", [TILE, CONFIGS["few programs"]])
def test_a_neighbour_that_is_not_finite_changes_nothing(config) -> None:
    a, b = _rows(40, 0), _rows(72, 1)
    order, expected = launch_order(OFFSETS), torch.empty(4, 40, 72)
    launch_weight_gradient(a, b, OFFSETS, order, expected, TILE)
    a[69:] = float("inf")
    b[69:] = float("nan")

    dw = launch_weight_gradient(a, b, OFFSETS, order, torch.empty(4, 40, 72), config)

    assert_bitwise_equal(dw[:3], expected[:3])


def test_accumulation_adds_the_unrounded_sum_once() -> None:
    a, b = _rows(40, 0).half(), _rows(72, 1).half()
    order = launch_order(OFFSETS)
    alone = launch_weight_gradient(a, b, OFFSETS, order, torch.empty(4, 40, 72), TILE)
    buffer = torch.full((4, 40, 72), 3.0)

    launch_weight_gradient(a, b, OFFSETS, order, buffer, TILE, accumulate=True)

    assert_bitwise_equal(buffer, alone + 3.0)


def test_the_longest_expert_comes_first() -> None:
    assert launch_order(OFFSETS).tolist() == [2, 3, 1, 0]


def test_bias_gradients_add_in_chunks_counted_from_the_expert() -> None:
    rows, probs = _rows(72, 2), torch.rand(55, 2)
    slots = torch.arange(110, dtype=torch.int32).flip(0).contiguous()
    by_row = probs.reshape(-1)[slots.long()]

    dbias = launch_bias_gradient(rows, OFFSETS, slots, probs, torch.empty(4, 72))

    plain = bias_gradient(rows, OFFSETS, by_row, torch.float32)
    exact = bias_gradient(rows.double(), OFFSETS, by_row, torch.float64)
    assert_within_budget(dbias, plain, exact, torch.float32, per_expert=True)
    # The second expert alone, from row 0 on, has the same bits.
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    alone = launch_bias_gradient(
        rows[5:69].contiguous(), offsets, slots[5:69].contiguous(), probs, torch.empty(1, 72)
    )
    assert_bitwise_equal(alone[0], dbias[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bias_gradients_are_added_to_a_buffer_unrounded(dtype: torch.dtype) -> None:
    rows, slots = _rows(72, 2), torch.arange(110, dtype=torch.int32)
    alone = launch_bias_gradient(rows, OFFSETS, slots, None, torch.empty(4, 72))
    # A view: buffers of many parameters lie in one.
    held = torch.full((4, 2, 72), 3.0, dtype=dtype)

    launch_bias_gradient(rows, OFFSETS, slots, None, held[:, 1], accumulate=True)

    assert_bitwise_equal(held[:, 1], (alone + 3.0).to(dtype))
    assert_bitwise_equal(held[:, 0], torch.full((4, 72), 3.0, dtype=dtype))


def test_specialised_warps_are_asked_only_for_what_descriptors_can_say() -> None:
    a, b = _rows(40, 0), _rows(72, 1)
    order, config = launch_order(OFFSETS), replace(TILE, specialized=Specialized())
    expected = launch_weight_gradient(a, b, OFFSETS, order, torch.empty(4, 40, 72), TILE)

    dw = launch_weight_gradient(a, b, OFFSETS, order, torch.empty(4, 40, 72), config)

    assert_bitwise_equal(dw, expected)
    for left, right, place in (
        (a.half(), b.half(), torch.empty(4, 40, 72)),
        (a.half()[:, 1:], b.half(), torch.empty(4, 39, 72).half()),
        (a.half(), b.half(), torch.empty(4, 72, 40).half().transpose(1, 2)),
        (a.half()[:0], b.half()[:0], torch.empty(4, 40, 72).half()),
    ):
        assert not launch_specialized_weight_gradient(
            left, right, OFFSETS, order, place, Specialized()
        )


def test_without_a_gluon_that_is_known_the_other_kernel_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, order = _rows(40, 0).half(), _rows(72, 1).half(), launch_order(OFFSETS)
    expected = launch_weight_gradient(a, b, OFFSETS, order, torch.empty(4, 40, 72).half(), TILE)
    monkeypatch.setattr(kernel, "_GLUON_KNOWN", False)

    config = replace(TILE, specialized=Specialized())
    dw = launch_weight_gradient(a, b, OFFSETS, order, torch.empty(4, 40, 72).half(), config)

    assert_bitwise_equal(dw, expected)

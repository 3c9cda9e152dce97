"""Layouts, orientations and conversions of expert parameters: lossless, and never guessed."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits import ExpertWeights, Layout, PostExpertNorm
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import merge_gate_up, split_gate_up

pytestmark = pytest.mark.reference


def layouts(columns: int) -> st.SearchStrategy[Layout]:
    divisors = [None, *(s for s in range(1, columns + 1) if columns % s == 0)]
    return st.builds(Layout, interleave=st.sampled_from(divisors), up_first=st.booleans())


COLUMNS = st.integers(1, 24)


@settings(derandomize=True, deadline=None)
@given(layouts(24))
def test_layout_key_round_trip(layout: Layout) -> None:
    assert Layout.parse(layout.key) == layout


@settings(derandomize=True, deadline=None)
@given(st.data(), COLUMNS, st.integers(0, 2))
def test_split_undoes_merge_along_any_dimension(
    data: st.DataObject, columns: int, dim: int
) -> None:
    layout = data.draw(layouts(columns))
    shape = [2, 3, 4]
    shape[dim] = columns
    gate = torch.arange(torch.Size(shape).numel()).reshape(shape)
    up = gate + 1000

    merged = merge_gate_up(gate, up, layout, dim)

    assert merged.shape[dim] == 2 * columns
    for part, expected in zip(split_gate_up(merged, layout, dim), (gate, up), strict=True):
        assert_bitwise_equal(part, expected)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (Layout(), "g0 g1 g2 g3 u0 u1 u2 u3"),
        (Layout(up_first=True), "u0 u1 u2 u3 g0 g1 g2 g3"),
        (Layout(interleave=1), "g0 u0 g1 u1 g2 u2 g3 u3"),
        (Layout(interleave=2), "g0 g1 u0 u1 g2 g3 u2 u3"),
        (Layout(interleave=2, up_first=True), "u0 u1 g0 g1 u2 u3 g2 g3"),
        (Layout(interleave=4), "g0 g1 g2 g3 u0 u1 u2 u3"),
    ],
    ids=str,
)
def test_order_of_rows(layout: Layout, rows: str) -> None:
    names = [f"{part}{i}" for part in "gu" for i in range(4)]

    merged = merge_gate_up(torch.arange(4), torch.arange(4, 8), layout)

    assert " ".join(names[i] for i in merged.tolist()) == rows


def _weights(**options: Any) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "gate_up": torch.randn(3, 16, 5, generator=generator),
        "down": torch.randn(3, 5, 8, generator=generator),
        "gate_up_bias": torch.randn(3, 16, generator=generator),
        "down_bias": torch.randn(3, 5, generator=generator),
    }
    return ExpertWeights(**(tensors | options))


@settings(derandomize=True, deadline=None)
@given(layouts(8), layouts(8))
def test_conversions_of_layout_are_lossless_and_commute(first: Layout, second: Layout) -> None:
    weights = _weights(layout=first)

    there = weights.to_layout(second)
    back = there.to_layout(first)

    assert there.layout == second
    for name, tensor in weights.named_tensors().items():
        assert_bitwise_equal(getattr(back, name), tensor, name)
    for mine, theirs in (
        (split_gate_up(weights.gate_up, first, 1), split_gate_up(there.gate_up, second, 1)),
        (split_gate_up(weights.gate_up_bias, first), split_gate_up(there.gate_up_bias, second)),
    ):
        for part, expected in zip(theirs, mine, strict=True):
            assert_bitwise_equal(part.contiguous(), expected.contiguous())


def test_storage_is_changed_without_changing_values() -> None:
    weights = _weights()

    stored = weights.to_storage("in_out")

    assert stored.gate_up.transpose(1, 2).is_contiguous()
    assert stored.down.transpose(1, 2).is_contiguous()
    assert stored.to_storage("out_in").gate_up.is_contiguous()
    assert_bitwise_equal(stored.gate_up.contiguous(), weights.gate_up)
    assert_bitwise_equal(stored.down.contiguous(), weights.down)


def test_storage_is_viewed_never_copied() -> None:
    gate_up, down = torch.randn(3, 5, 16), torch.randn(3, 8, 5)

    weights = ExpertWeights.from_storage(gate_up, down)

    assert weights.gate_up.shape == (3, 16, 5)
    assert weights.gate_up.data_ptr() == gate_up.data_ptr()
    assert weights.down.data_ptr() == down.data_ptr()


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        pytest.param((3, 16, 8), (3, 8, 8), id="down is square"),
        pytest.param((3, 16, 16), (3, 16, 8), id="gate_up is square"),
        pytest.param((3, 8, 8), (3, 8, 8), id="both are square"),
    ],
)
def test_a_square_matrix_needs_its_orientation_stated(
    gate_up: tuple[int, ...], down: tuple[int, ...]
) -> None:
    tensors = torch.randn(gate_up), torch.randn(down)

    with pytest.raises(
        ValueError, match="orientation must be stated for square matrices, got gate_up"
    ):
        ExpertWeights.from_storage(*tensors)

    assert ExpertWeights.from_storage(*tensors, orientation="out_in").down.shape == down


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gate_up": "w"}, TypeError, "gate_up must be a tensor, got str"),
    ({"down": None}, TypeError, "down must be a tensor, got NoneType"),
    ({"gate_up": torch.randn(16, 5)}, ValueError, "gate_up and down must have three dimensions"),
    (
        {"gate_up": torch.ones(3, 16, 5, dtype=torch.int32)},
        TypeError,
        "gate_up must be bfloat16, float16",
    ),
    (
        {"gate_up": torch.randn(3, 16, 6)},
        ValueError,
        "gate_up must have shape (E, 2F or F, H) with E, H of down (3, 5, 8), got (3, 16, 6)",
    ),
    ({"gate_up": torch.randn(2, 16, 5)}, ValueError, "with E, H of down (3, 5, 8), got (2, 16, 5)"),
    (
        {"gate_up": torch.randn(3, 15, 5)},
        ValueError,
        "gate_up must have 2F or F rows with F = down.shape[2] = 8, got 15",
    ),
    (
        {"down": torch.randn(3, 5, 8).half()},
        ValueError,
        "down must have the dtype of gate_up (torch.float32)",
    ),
    (
        {"gate_up_bias": torch.randn(3, 8)},
        ValueError,
        "gate_up_bias must have shape (3, 16), got (3, 8)",
    ),
    ({"down_bias": torch.randn(5)}, ValueError, "down_bias must have shape (3, 5), got (5,)"),
    (
        {"down_bias": torch.randn(3, 5).half()},
        ValueError,
        "down_bias must be torch.float32 (as gate_up) or float32, got torch.float16",
    ),
    (
        {"down_bias": torch.randn(3, 5, device="meta")},
        ValueError,
        "down_bias must be on the device of gate_up (cpu), got meta",
    ),
    ({"norm": PostExpertNorm(eps=1e-5)}, ValueError, "norm and norm_scale must be given together"),
    (
        {"layout": Layout(interleave=3)},
        ValueError,
        "interleave must divide F = 8 (2F must be a multiple of",
    ),
    (
        {"gate_up": torch.randn(3, 8, 5), "gate_up_bias": None, "layout": Layout(interleave=1)},
        ValueError,
        "layout must be Layout() where there is no up part, got interleave=1",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_tensors_that_do_not_fit_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        _weights(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"interleave": 0}, ValueError),
        ({"interleave": True}, TypeError),
        ({"up_first": 1}, TypeError),
    ],
)
def test_layouts_out_of_range_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(options))} must"):
        Layout(**options)


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan"), float("inf")])
def test_eps_of_the_norm_out_of_range_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be finite and > 0"):
        PostExpertNorm(eps=eps)


@pytest.mark.parametrize(
    "key", ["", "thirds", "halves,down_first", "interleave", "interleave=x", "halves=2"]
)
def test_a_layout_key_of_the_wrong_form_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="layout key must look like"):
        Layout.parse(key)

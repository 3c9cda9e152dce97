"""The error budget: what it lets pass, and what it must not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.testing.numerics import Judgement, judge, unit_roundoff

pytestmark = pytest.mark.reference

ROWS, COLUMNS = 6, 48
INF, NAN = float("inf"), float("nan")


def noisy(exact: Tensor, eps: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return exact + eps * torch.randn(exact.shape, generator=generator, dtype=torch.float64)


def values(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)


def judged(value: Tensor, plain: Tensor, exact: Tensor) -> Judgement:
    return judge(value, plain, exact, torch.bfloat16)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.integers(0, 99),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.sampled_from([1, 7, 48]),
    st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e6]), min_size=ROWS, max_size=ROWS),
    st.booleans(),
)
def test_the_plain_loop_is_within_its_own_budget(
    seed: int, dtype: torch.dtype, columns: int, scales: list[float], per_expert: bool
) -> None:
    exact = values(seed)[:, :columns] * torch.tensor(scales, dtype=torch.float64)[:, None]
    plain = noisy(exact, 1e-3, seed)

    assert judge(plain, plain, exact, dtype, per_expert=per_expert).passed


def test_twice_the_error_of_the_plain_loop_passes_and_three_times_fails() -> None:
    exact = values()
    plain = noisy(exact, 0.1, 1)

    assert judged(exact + 1.9 * (plain - exact), plain, exact).passed
    assert not judged(exact + 3.0 * (plain - exact), plain, exact).passed


def test_two_roundings_pass_where_the_plain_loop_is_exact() -> None:
    exact = torch.ones(ROWS, COLUMNS, dtype=torch.float64)
    eps = unit_roundoff(torch.bfloat16)

    assert judged(exact + 1.9 * eps, exact, exact).passed
    assert not judged(exact + 2.1 * eps, exact, exact).passed


def test_a_row_that_cancels_keeps_the_rounding_errors_of_its_terms() -> None:
    exact, eps = values(), unit_roundoff(torch.bfloat16)
    exact[2] *= 1e-6

    plain, value = noisy(exact, eps, 1), noisy(exact, eps, 2)

    assert judged(value, plain, exact).passed


def test_a_row_that_cancels_does_not_excuse_the_others() -> None:
    exact, eps = values(), unit_roundoff(torch.bfloat16)
    exact[2] *= 1e-6
    plain, value = noisy(exact, eps, 1), noisy(exact, eps, 2)
    value[4] *= 1.5

    judgement = judged(value, plain, exact)

    assert not judgement.passed
    assert judgement.row == 4


@pytest.mark.parametrize("share", [0.1, 0.01])
def test_a_small_row_is_judged_by_its_own_size(share: float) -> None:
    exact, eps = values(), unit_roundoff(torch.bfloat16)
    exact[2] *= share
    plain = exact + eps * exact.abs()
    value = plain.clone()
    value[2] *= 1.5

    judgement = judged(value, plain, exact)

    assert not judgement.passed
    assert judgement.row == 2


def test_a_zero_that_the_plain_loop_misses_may_be_missed_as_far() -> None:
    exact = values()
    exact[3] = 0.0
    plain = exact.clone()
    plain[3, 5] = 1e-2

    assert judged(plain, plain, exact).passed
    value = exact.clone()
    value[3] = 1.0
    assert not judged(value, plain, exact).passed


@pytest.mark.parametrize("columns", [3, COLUMNS])
def test_a_zero_that_the_plain_loop_keeps_is_kept(columns: int) -> None:
    exact = values()[:, :columns].clone()
    exact[3] = 0.0
    value = exact.clone()
    value[3, 1] = 1e-30

    judgement = judged(value, exact, exact)

    assert not judgement.passed
    assert judgement.worst_row == INF
    assert judgement.row == 3


def test_nothing_but_zeros() -> None:
    exact = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)

    assert judged(exact, exact, exact) == Judgement(
        passed=True,
        measured=0.0,
        allowed=2 * unit_roundoff(torch.bfloat16),
        worst_row=0.0,
        worst_allowed=2 * unit_roundoff(torch.bfloat16),
        row=0,
    )
    assert not judged(exact + 1e-30, exact, exact).passed
    assert judged(exact + 1e-3, exact + 1e-3, exact).passed


@pytest.mark.parametrize("poison", [INF, -INF, NAN])
@pytest.mark.parametrize("plain_too", [False, True])
def test_what_is_not_finite_where_it_must_be_fails(poison: float, plain_too: bool) -> None:
    exact = values()
    value = exact.clone()
    value[1, 7] = poison

    judgement = judged(value, value if plain_too else exact, exact)

    assert not judgement.passed
    assert judgement.row == 1


@pytest.mark.parametrize("poison", [INF, -INF, NAN])
def test_what_is_not_finite_in_both_agrees(poison: float) -> None:
    exact = values()
    exact[1, 7] = poison
    plain = noisy(exact, 1e-3, 1)

    assert judged(noisy(exact, 1e-3, 2), plain, exact).passed
    wrong = noisy(exact, 1e-3, 2)
    wrong[1, 8] += 1.0
    assert not judged(wrong, plain, exact).passed
    for other in {INF, -INF, 0.0} - {poison}:
        wrong = exact.clone()
        wrong[1, 7] = other
        assert not judged(wrong, plain, exact).passed


def test_a_plain_loop_that_overflows_allows_nothing_more() -> None:
    exact = values()
    plain = exact.clone()
    plain[1, 7] = INF
    value = exact.clone()
    value[1] += 1.0

    assert judged(exact, plain, exact).passed
    assert not judged(value, plain, exact).passed


def test_no_elements_agree_and_other_shapes_are_refused() -> None:
    assert judged(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4)).passed
    with pytest.raises(ValueError, match=r"must have one shape, got \(2,\), \(3,\), \(3,\)"):
        judged(torch.zeros(2), torch.zeros(3), torch.zeros(3))

"""Four asserts for anyone's code, as pytest fixtures: ``pytest -p samebits_pytest``.

* ``assert_no_stale_scalars(function, make_inputs)``: compiled code keeps no old value of a number.
* ``assert_row_independent(function, make_inputs)``: a row's bits do not depend on the other rows.
* ``assert_repeatable(function, make_inputs)``: the same call gives the same bits, gradients too.
* ``assert_parity(function, reference, make_inputs)``: within the error budget of the reference.

``make_inputs()`` returns ``(args, kwargs)``. Nothing is imported before a fixture is used.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

Inputs = tuple[Sequence[Any], dict[str, Any]]
Factory = Callable[[], Inputs]

_REPEATS = 3
_SEED = 1234


@pytest.fixture
def assert_no_stale_scalars() -> Callable[..., None]:
    """Return the assert; see ``samebits.checks.compile.audit_compile`` for its arguments."""
    return _assert_no_stale_scalars


@pytest.fixture
def assert_row_independent() -> Callable[..., None]:
    """Return the assert that compares each row computed alone, and in parts, with the whole."""
    return _assert_row_independent


@pytest.fixture
def assert_repeatable() -> Callable[..., None]:
    """Return the assert that makes one call several times, and compares bits."""
    return _assert_repeatable


@pytest.fixture
def assert_parity() -> Callable[..., None]:
    """Return the assert that judges a function by the error of a reference against fp64."""
    return _assert_parity


def _assert_no_stale_scalars(
    function: Callable[..., Any],
    make_inputs: Factory | None = None,
    *,
    only: Sequence[str] = (),
    budget: float | None = None,
) -> None:
    """Fail where compiled code keeps an old value of a number; skip where nothing could be judged.

    Args:
        function: Any callable, also one under ``torch.compile``.
        make_inputs: Its inputs; None guesses by annotations.
        only: Paths of numbers to vary; empty takes all.
        budget: Seconds; a sequence that is not finished then fails the assert, since a test that
            did not look must not pass.
    """
    from samebits.checks.compile import audit_compile, results

    found = audit_compile(function, make_inputs, only=only, budget=budget, stop_at_first=True)
    verdicts = results(found)
    failed = [r for r in verdicts if r.verdict == "fail"]
    if failed:
        pytest.fail("\n".join(f"{r.case}: {r.note}" for r in failed), pytrace=False)
    if found.late:
        pytest.fail(f"the budget of {budget} s ran out before all was judged", pytrace=False)
    if not any(r.verdict == "pass" for r in verdicts):
        reasons = "; ".join(f"{r.case}: {r.note}" for r in verdicts) or "no number reaches it"
        pytest.skip(f"nothing could be judged: {reasons}")


def _assert_row_independent(function: Callable[..., Any], make_inputs: Factory) -> None:
    """Fail where a row of an output has other bits alone, or in a part, than in the whole.

    The rows are the first dimension of every tensor argument as long as the first one; outputs with
    another first dimension are not compared. Beside NaN rows a row must keep its bits, too.
    """
    from samebits.testing.numerics import assert_bitwise_equal

    args, kwargs = _made(make_inputs)
    rows = _rows(args, kwargs)
    whole = _by_row(function(*args, **kwargs), rows)
    if not whole:
        raise ValueError(f"no output has {rows} rows: nothing can be compared")
    for start, stop in _parts(rows):
        part = _map([args, kwargs], rows, lambda t, a=start, b=stop: t[a:b])  # type: ignore[misc]
        outputs = _by_row(function(*part[0], **part[1]), stop - start)
        _same_count(whole, outputs, f"rows {start} to {stop}")
        for name, value in outputs.items():
            assert_bitwise_equal(value, whole[name][start:stop], f"{name}, rows {start} to {stop}")
    poisoned = _map([args, kwargs], rows, _with_nan_below)
    for name, value in _by_row(function(*poisoned[0], **poisoned[1]), rows).items():
        half = (rows + 1) // 2
        assert_bitwise_equal(value[:half], whole[name][:half], f"{name}, beside NaN rows")


def _assert_repeatable(
    function: Callable[..., Any], make_inputs: Factory, *, times: int = _REPEATS
) -> None:
    """Fail where outputs or gradients of a repeated call differ in a bit.

    Args:
        function: Called with fresh inputs from one seed each time.
        make_inputs: The inputs.
        times: Number of calls, at least 2.
    """
    from samebits.checks.compile.evaluate import NotDifferentiableError, evaluate
    from samebits.checks.compile.survey import prepare
    from samebits.testing.numerics import assert_bitwise_equal

    if times < 2:
        raise ValueError(f"times must be at least 2, got {times}")
    results = []
    for _ in range(times):
        call = prepare(function, make_inputs)
        try:
            results.append(evaluate(call, function, "all"))
        except NotDifferentiableError:
            results.append(evaluate(call, function, None))
    for index, result in enumerate(results[1:], 2):
        _same_count(results[0], result, f"call {index}")
        for name, value in result.items():
            assert_bitwise_equal(value, results[0][name], f"{name}, call {index}")


def _assert_parity(
    function: Callable[..., Any], reference: Callable[..., Any], make_inputs: Factory
) -> None:
    """Fail where the error of ``function`` passes twice that of ``reference``, both against fp64.

    Args:
        function: What is judged.
        reference: Plain code of the same meaning; it must compute in the dtype of its inputs, since
            it is run on fp64 inputs for the exact values.
        make_inputs: The inputs, in the working dtype.
    """
    import torch

    from samebits.testing.numerics import judge

    args, kwargs = _made(make_inputs)
    outputs = _tensors(function(*args, **kwargs))
    plain = _tensors(reference(*args, **kwargs))
    exact_args, exact_kwargs = _map(
        [args, kwargs], None, lambda t: t.double() if t.is_floating_point() else t
    )
    exact = _tensors(reference(*exact_args, **exact_kwargs))
    _same_count(plain, outputs, "the function")
    for name, value in outputs.items():
        if not value.is_floating_point():
            if not torch.equal(value, plain[name]):
                pytest.fail(f"{name}: integers differ from the reference's", pytrace=False)
            continue
        judgement = judge(value, plain[name], exact[name], value.dtype)
        if not judgement.passed:
            pytest.fail(f"{name}: {judgement}", pytrace=False)


def _made(make_inputs: Factory) -> tuple[list[Any], dict[str, Any]]:
    import torch

    torch.manual_seed(_SEED)
    args, kwargs = make_inputs()
    return list(args), dict(kwargs)


def _tensors(value: Any) -> dict[str, Any]:
    from samebits.checks.compile.compare import named_tensors

    return {name: tensor.detach() for name, tensor in named_tensors(value).items()}


def _rows(args: list[Any], kwargs: dict[str, Any]) -> int:
    for value in [*args, *kwargs.values()]:
        if getattr(value, "ndim", 0) > 0:
            return int(value.shape[0])
    raise ValueError("no argument is a tensor with rows")


def _by_row(value: Any, rows: int) -> dict[str, Any]:
    return {n: t for n, t in _tensors(value).items() if t.ndim > 0 and t.shape[0] == rows}


def _parts(rows: int) -> Iterator[tuple[int, int]]:
    """Yield each of the first and last rows alone, the halves, and all but the last row."""
    alone = sorted({0, rows // 2, rows - 1})
    parts = [(i, i + 1) for i in alone] + [(0, rows // 2), (rows // 2, rows), (0, rows - 1)]
    yield from dict.fromkeys((a, b) for a, b in parts if b > a)


def _with_nan_below(tensor: Any) -> Any:
    if not tensor.is_floating_point():
        return tensor
    poisoned = tensor.detach().clone()
    poisoned[(len(tensor) + 1) // 2 :] = float("nan")
    return poisoned


def _map(value: Any, rows: int | None, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each tensor of that many rows (of any shape for None) changed."""
    import torch

    if isinstance(value, torch.Tensor):
        fits = rows is None or (value.ndim > 0 and value.shape[0] == rows)
        return change(value) if fits else value
    if type(value) is dict:
        return {key: _map(item, rows, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, rows, change) for item in value)
    return value


def _same_count(expected: dict[str, Any], actual: dict[str, Any], where: str) -> None:
    if expected.keys() != actual.keys():
        pytest.fail(
            f"{where}: outputs {sorted(actual)} instead of {sorted(expected)}", pytrace=False
        )

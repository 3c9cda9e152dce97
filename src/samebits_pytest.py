"""Four asserts for anyone's code, as pytest fixtures: ``pytest -p samebits_pytest``.

* ``assert_no_stale_scalars(function, make_inputs)``: compiled code keeps no old value of a number.
* ``assert_row_independent(function, make_inputs)``: a row's bits do not depend on the other rows.
* ``assert_repeatable(function, make_inputs)``: the same call gives the same bits, gradients too.
* ``assert_parity(function, reference, make_inputs)``: within the error budget of the reference.

``make_inputs()`` returns ``(args, kwargs)``. Nothing is imported before a fixture is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

Inputs = tuple[Sequence[Any], dict[str, Any]]
Factory = Callable[[], Inputs]

_REPEATS = 3


@pytest.fixture
def assert_no_stale_scalars() -> Callable[..., None]:
    """Return the assert; see ``samebits.checks.compile.audit_compile`` for its arguments."""
    return _assert_no_stale_scalars


@pytest.fixture
def assert_row_independent() -> Callable[..., None]:
    """Return the assert that changes a batch around a row, and compares the row's bits."""
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

    Raises:
        TypeError: Something that must be callable is not, or another argument is of a wrong type.
        ValueError: The inputs do not fit, the budget is not greater than 0, a path is unknown, or
            the function cannot be judged: it raises, or is not deterministic.
    """
    from samebits.checks.compile import audit_compile, results

    if make_inputs is not None:
        _made(make_inputs, function)
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
    """Fail where a row's bits depend on the size of its batch, its place in it, or the other rows.

    The rows are the first dimension of every tensor argument as long as the first one; outputs with
    another first dimension are not compared. It is `samebits check invariance`, in batches of up to
    as many rows as there are.
    """
    from samebits.checks.invariance import Rows, audit
    from samebits.checks.invariance.audit import TOKENS

    rows = Rows(function, *_made(make_inputs, function))
    sizes = [size for size in TOKENS if size < rows.count]
    answers = list(audit(rows, [*sizes, rows.count]))
    for answer in answers:
        if answer.difference is not None:
            pytest.fail(str(answer.difference), pytrace=False)
    reasons = "; ".join(dict.fromkeys(answer.reason for answer in answers if answer.reason))
    if reasons:
        raise ValueError(f"nothing can be compared: {reasons}")


def _assert_repeatable(
    function: Callable[..., Any], make_inputs: Factory, *, times: int = _REPEATS
) -> None:
    """Fail where outputs or gradients of a repeated call differ in a bit.

    Args:
        function: Called with fresh inputs from one seed each time.
        make_inputs: The inputs.
        times: Number of calls, at least 2.
    """
    from samebits.arguments import require_int
    from samebits.checks.compile.evaluate import NotDifferentiableError, evaluate
    from samebits.checks.compile.survey import prepare
    from samebits.testing.numerics import assert_bitwise_equal

    require_int("times", times, minimum=2)
    _made(make_inputs, function)
    results = []
    for _ in range(times):
        call = prepare(function, make_inputs)
        try:
            results.append(evaluate(call, function, "all"))
        except NotDifferentiableError:
            results.append(evaluate(call, function, None))
    _not_empty(results[0], "the function")
    for index, result in enumerate(results[1:], 2):
        _same_count(results[0], result, f"call {index}")
        for name, value in result.items():
            assert_bitwise_equal(value, results[0][name], f"{name}, call {index}")


def _assert_parity(
    function: Callable[..., Any], reference: Callable[..., Any], make_inputs: Factory
) -> None:
    """Fail where the error of ``function`` passes twice that of ``reference``, both against fp64.

    Args:
        function: What is judged, with the rounding that the dtype of the reference's result allows.
        reference: Plain code of the same meaning; it must compute in the dtype of its inputs, since
            it is run on fp64 inputs for the exact values. A module, or a method of one, is copied
            for that with fp64 parameters and buffers.
        make_inputs: The inputs, in the working dtype: tensors, also in lists, tuples and dicts.

    Raises:
        TypeError: One of the three is not callable.
        ValueError: The inputs do not fit, the reference does not run in fp64, or it gives no
            tensor, or no fp64 on fp64 inputs.
    """
    from samebits.testing.numerics import judge

    args, kwargs = _made(make_inputs, function, reference)
    # First, and on copies: each may write to what it is given, the reference to its buffers.
    exact = _exact(reference, args, kwargs)
    outputs, plain = (
        _tensors(code(*_copied(args, fp64=False), **_copied(kwargs, fp64=False)))
        for code in (function, reference)
    )
    _not_empty(plain, "the reference")
    _same_count(plain, outputs, "the function")
    if exact.keys() != plain.keys():
        given = f"{sorted(exact)} on fp64 instead of {sorted(plain)}"
        raise ValueError(f"the reference gives {given}: it must return the same for every dtype")
    for name, value in outputs.items():
        expected = plain[name]
        _same_kind(expected, value, name)
        if not value.is_floating_point():
            if not bool((value == expected).all()):
                pytest.fail(f"{name}: integers differ from the reference's", pytrace=False)
            continue
        judgement = judge(value, expected, exact[name], expected.dtype)
        if not judgement.passed:
            pytest.fail(f"{name}: {judgement}", pytrace=False)


def _in_fp64(reference: Any) -> Any:
    """Return the reference, eager, with the numbers of its module in fp64."""
    import copy
    from types import MethodType

    import torch

    from samebits.checks.compile.discover import original

    plain: Any = original(reference)
    holder = getattr(plain, "__self__", plain)
    if not isinstance(holder, torch.nn.Module):
        return plain
    wide = copy.deepcopy(original(holder)).double()
    return wide if holder is plain else MethodType(plain.__func__, wide)


def _exact(
    reference: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the results of the reference on fp64 inputs.

    Raises:
        ValueError: It raises there, or computes in another dtype.
    """
    import torch

    from samebits.checks.result import FOREIGN_ERRORS

    rule = "it must compute in the dtype of its inputs"
    try:
        wide = _in_fp64(reference)
        exact = _tensors(wide(*_copied(args, fp64=True), **_copied(kwargs, fp64=True)))
    except FOREIGN_ERRORS as error:
        advice = "give a module as the reference itself, or its weights among the inputs"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the reference raises {reason} on fp64: {rule}; {advice}") from error
    for name, value in exact.items():
        if value.is_floating_point() and value.dtype != torch.float64:
            raise ValueError(f"{name}: the reference gives {value.dtype} on fp64: {rule}")
    return exact


def _same_kind(expected: Any, actual: Any, name: str) -> None:
    """Fail where shapes differ, or one tensor is of floats and the other is not."""
    if expected.shape != actual.shape:
        shapes = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        pytest.fail(f"{name}: {shapes}", pytrace=False)
    if expected.is_floating_point() != actual.is_floating_point():
        pytest.fail(f"{name}: {actual.dtype} instead of {expected.dtype}", pytrace=False)


def _made(make_inputs: Factory, *functions: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the inputs, which every function must take.

    Raises:
        TypeError: Something that must be callable is not.
        ValueError: The factory raises or returns something else, or a function does not take it.
    """
    from samebits.checks.compile.target import fits, make, require_callable

    for argument, value in zip(("function", "reference"), functions, strict=False):
        require_callable(argument, value)
    require_callable("make_inputs", make_inputs)
    args, kwargs = make(make_inputs)
    for function in functions:
        fits(function, args, kwargs)
    return list(args), kwargs


def _tensors(value: Any) -> dict[str, Any]:
    from samebits.checks.compile.compare import named_tensors, real

    return {name: real(tensor.detach()) for name, tensor in named_tensors(value).items()}


def _copied(value: Any, *, fp64: bool) -> Any:
    """Return ``value`` with each tensor in it copied, floats as fp64 if asked."""
    import torch

    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        if fp64 and (copy.is_floating_point() or copy.is_complex()):
            copy = copy.to(torch.complex128 if copy.is_complex() else torch.float64)
        return copy.requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: _copied(item, fp64=fp64) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item, fp64=fp64) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _not_empty(outputs: dict[str, Any], what: str) -> None:
    if not outputs:
        raise ValueError(f"{what} returns no tensor: nothing can be compared")
    if all(tensor.numel() == 0 for tensor in outputs.values()):
        raise ValueError(f"{what} returns tensors without elements: nothing can be compared")


def _same_count(expected: dict[str, Any], actual: dict[str, Any], where: str) -> None:
    if expected.keys() != actual.keys():
        pytest.fail(
            f"{where}: outputs {sorted(actual)} instead of {sorted(expected)}", pytrace=False
        )

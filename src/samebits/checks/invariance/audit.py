"""Change one thing about a batch at a time, and compare the bytes of a row's results.

    repeat      nothing: the same call twice
    T           the size of the batch; the row stays first, its neighbours follow it
    position    the place of the row; size and rows stay, the batch is rotated
    neighbours  the other rows; size and place stay

The first that differs explains those after it: with another T a library may choose another kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.checks.determinism.memory import differing
from samebits.checks.invariance.rows import Outputs, Rows
from samebits.checks.result import FOREIGN_ERRORS, Result, Verdict
from samebits.testing.numerics import bitwise_equal

CASES = ("repeat", "T", "position", "neighbours")
TOKENS = (1, 2, 7, 16, 17, 63, 64, 65, 128, 257)
# Large, and finite in every dtype.
_HUGE = 1e4
_FILLS: Mapping[str, float] = {"zeros": 0.0, "huge values": _HUGE, "NaN": float("nan")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a row's bytes differ first, and by how much."""

    case: str
    # What was compared with what.
    what: str
    # Size of the batch, place of the row in it, and which row of the inputs it is.
    tokens: int
    position: int
    row: int
    # Name of the result, how many of the row's elements differ, the first, and both values.
    output: str
    differing: int
    elements: int
    first: int
    actual: float
    expected: float
    # Largest |actual - expected|, and in norm relative to the row.
    largest: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.differing} of {self.elements} elements of {self.output} differ, "
            f"largest difference {self.largest:.2e} ({self.relative:.1e} of the row); "
            f"first element {self.first}: {self.actual!r} and {self.expected!r}"
        )


class Answer(NamedTuple):
    """What one case showed."""

    case: str
    difference: Difference | None
    # Why nothing could be compared; "" where it could.
    reason: str = ""
    # What was compared, and where it differed.
    note: str = ""


def audit(rows: Rows, tokens: Sequence[int] = TOKENS) -> Iterator[Answer]:
    """Yield what each case shows.

    Args:
        rows: The function and its rows; fewer than a batch needs are repeated.
        tokens: Sizes of batches.

    Determinism: a function of ``rows``, where the function is one.
    """
    sizes = sorted(set(tokens))
    try:
        smallest = rows.learn(sizes)
        whole = rows.batch(0, sizes[-1])
        first = rows.in_order(0, sizes[-1])
        again = rows.outputs(whole)
    except FOREIGN_ERRORS as error:
        for case in CASES:
            yield Answer(case, None, f"T={sizes[-1]}: {_told(error)}")
        return
    if all(bool(result.isnan().all()) for result in first.values()):
        for case in CASES:
            yield Answer(case, None, f"T={sizes[-1]}: every result is NaN: nothing can be told")
        return
    found = _unrepeated(first, again, whole)
    yield Answer("repeat", found, note=f"T={sizes[-1]}")
    if found is not None:
        for case in CASES[1:]:
            yield Answer(case, None, "the same call twice gives other bits")
        return
    compared = (("T", partial(_sizes, smallest)), ("position", _positions))
    for case, compare in (*compared, ("neighbours", _neighbours)):
        yield _case(case, compare, rows, sizes)


def _unrepeated(first: Outputs, again: Outputs, whole: Tensor) -> Difference | None:
    if all(name in again and bitwise_equal(again[name], first[name]) for name in first):
        return None
    size = len(whole)
    for place in range(size):
        about = {"case": "repeat", "what": f"T={size}, twice the same", "row": int(whole[place])}
        found = _difference(about, again, place, first, place, size)
        if found is not None:
            return found
    return None


# Of a row in a batch of that size.
_Compare = Callable[[Rows, int, int], Iterator[Difference | None]]


def _case(case: str, compare: _Compare, rows: Rows, sizes: Sequence[int]) -> Answer:
    first: Difference | None = None
    wrong, refused = [], []
    why = ""
    tried = 0
    for size in sizes:
        try:
            for probe in _probes(rows.count):
                found = list(compare(rows, probe, size))
                tried += len(found)
                differences = [difference for difference in found if difference is not None]
                if differences:
                    wrong.append(size)
                    first = first or differences[0]
                    break
        except FOREIGN_ERRORS as error:
            refused.append(size)
            why = why or f"T={size}: {_told(error)}"
    if tried == 0:
        return Answer(case, None, why or f"batches of {sizes[-1]} leave nothing to change")
    done = _listed(size for size in sizes if size not in refused)
    note = f"wrong at T={_listed(wrong)} of {done}" if wrong else f"T={done}"
    if refused:
        note += f"; could not be run at {_listed(refused)} ({why})"
    return Answer(case, first, note=note)


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def _probes(count: int) -> list[int]:
    return sorted({0, count - 1})


def _sizes(smallest: int, rows: Rows, row: int, size: int) -> Iterator[Difference | None]:
    if size > smallest:
        alone = rows.in_order(row, smallest)
        other = "alone" if smallest == 1 else f"T={smallest}, the smallest that runs"
        about = {"case": "T", "what": f"T={size}, row {row} first, against {other}", "row": row}
        yield _difference(about, rows.in_order(row, size), 0, alone, 0, size)


def _positions(rows: Rows, row: int, size: int) -> Iterator[Difference | None]:
    if size == 1:
        return
    batch, expected = rows.batch(row, size), rows.in_order(row, size)
    for position in sorted({1, size // 2, size - 1}):
        what = f"T={size}, row {row} at position {position} against position 0"
        about = {"case": "position", "what": what, "row": row}
        outputs = rows.outputs(batch.roll(position))
        yield _difference(about, outputs, position, expected, 0, size)


def _neighbours(rows: Rows, row: int, size: int) -> Iterator[Difference | None]:
    if size == 1:
        return
    batch, expected = rows.batch(row, size), rows.in_order(row, size)
    others: dict[str, tuple[Tensor, float | None]] = {
        f"copies of row {row}": (torch.full_like(batch, row), None),
    }
    if rows.count > 2:
        reversed_ = torch.cat([batch[:1], (row - torch.arange(1, size)) % rows.count])
        others[f"rows before row {row}"] = (reversed_, None)
    others |= {name: (batch, fill) for name, fill in _FILLS.items()}
    for name, (index, fill) in others.items():
        about = {
            "case": "neighbours",
            "what": f"T={size}, row {row} first, beside {name} against the rows that follow it",
            "row": row,
        }
        yield _difference(about, rows.outputs(index, fill), 0, expected, 0, size)


def _difference(
    about: dict[str, Any],
    actual: Outputs,
    position: int,
    expected: Outputs,
    expected_position: int,
    size: int,
) -> Difference | None:
    if actual.keys() != expected.keys():
        raise ValueError(f"results {sorted(actual)} instead of {sorted(expected)}")
    for name in expected:
        a, b = actual[name][position], expected[name][expected_position]
        if bitwise_equal(a, b):
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{name} has another shape or dtype with other rows")
        if a.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        wide, exact = a.reshape(-1).double().cpu(), b.reshape(-1).double().cpu()
        where = differing(a, b).cpu()
        delta = (wide - exact).abs()
        scale = float(exact.norm())
        return Difference(
            **about,
            tokens=size,
            position=position,
            output=name,
            differing=len(where),
            elements=a.numel(),
            first=int(where[0]),
            actual=float(wide[where[0]]),
            expected=float(exact[where[0]]),
            largest=float(delta.max()),
            relative=float(delta.norm()) / scale if scale else float(delta.norm()),
        )
    return None


def results(answers: Sequence[Answer], target: str, problem: str) -> list[Result]:
    """Return one result for each case; a difference of any size fails."""
    found = []
    for answer in answers:
        verdict: Verdict = "pass"
        note = answer.note
        if answer.difference is not None:
            verdict = "fail"
            note = "; ".join(part for part in (str(answer.difference), answer.note) if part)
        elif answer.reason:
            verdict, note = "not_run", answer.reason
        relative = answer.difference.relative if answer.difference else 0.0
        found.append(
            Result(
                check="invariance",
                case=answer.case,
                problem=problem,
                backend=target,
                verdict=verdict,
                measured=None if verdict == "not_run" else relative,
                allowed=None if verdict == "not_run" else 0.0,
                note=note,
            )
        )
    return found


def _told(error: BaseException) -> str:
    text = str(error).partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}"

"""Judge one experts class: the class itself, then every implementation of it, case by case.

| case | what is judged |
| --- | --- |
| oracle | the class: its own loop and its batched form agree in fp64 |
| default | output and every gradient against the error budget; unused experts exactly 0 |
| odd | the same with sizes that are multiples of nothing |
| dropped | the same with a third of the slots dropped |
| sensitivity:<attribute> | the same after the attribute changed on the module that already ran |
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from samebits.checks.models.finding import Finding
from samebits.checks.models.outcome import THE_CLASS, About, spell, verdict_of
from samebits.checks.models.protocol import (
    FOREIGN_ERRORS,
    ExpertsCase,
    Found,
    ModelProvider,
    Plain,
    Results,
    UnbuildableError,
)
from samebits.checks.result import Verdict
from samebits.problem import DTYPE_NAMES
from samebits.testing.numerics import judge, relative_error

# What the class's own loop and the framework's batched form of it may differ by in fp64.
AGREEMENT = 1e-12
# Share of z that must lie beyond a clamp limit, on each side, for the case to test the limit.
BINDING_SHARE = 0.2
# A changed attribute tests something where the exact output moves by more than this.
MOVES = 1e-2
# Where a changed limit may be judged by its gradients too. In narrower dtypes many z lie one
# rounding away from the limit, and each that lands on the other side moves whole gradient rows.
CONTINUOUS = (torch.float32, torch.float64)

OWN_LOOP = "eager"
BATCHED = "batched_mm"


class Setting(NamedTuple):
    """One way to run a case."""

    case: str
    dropped: bool = False
    scalars: Mapping[str, float] | None = None


class Truth(NamedTuple):
    """What an implementation is judged against."""

    exact: Results
    plain: Plain


def judge_found(
    found: Found,
    provider: ModelProvider,
    implementations: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> Iterator[Finding]:
    """Build one class, default and odd, and yield every finding about it.

    Args:
        found: The class.
        provider: Where it came from.
        implementations: Names to judge.
        dtypes: Working dtypes.

    Determinism: repeatable; every input has a fixed seed.
    """
    for odd in (False, True):
        try:
            case = found.build(odd=odd)
        except FOREIGN_ERRORS as error:
            reason = str(error) if isinstance(error, UnbuildableError) else spell(error)
            yield _unbuilt(found, odd=odd, reason=reason)
            continue
        for dtype in dtypes:
            if not odd:
                yield from judge_class(case, dtype)
            yield from judge_case(case, provider, implementations, dtype, odd=odd)


def judge_class(case: ExpertsCase, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge the class itself in fp64, and whether its limits bind on the tokens of the case."""
    about = About(case.name, "oracle", THE_CLASS, DTYPE_NAMES[dtype])
    try:
        exact, batched = case.oracle(OWN_LOOP, dtype), case.oracle(BATCHED, dtype)
    except FOREIGN_ERRORS as error:
        yield about.finding("all", "not_run", note=f"no fp64 run: {spell(error)}")
        return
    for name, value in exact.items():
        measured = relative_error(batched[name], value)
        verdict: Verdict = "pass" if measured <= AGREEMENT else "fail"
        note = "" if verdict == "pass" else f"its own loop and {BATCHED} are two functions in fp64"
        yield about.finding(name, verdict, measured=measured, allowed=AGREEMENT, note=note)
    yield from _judge_binding(case, about)


def _judge_binding(case: ExpertsCase, about: About) -> Iterator[Finding]:
    try:
        binding = case.binding()
    except FOREIGN_ERRORS as error:
        yield about.finding("binding", "not_run", note=spell(error))
        return
    for name, shares in binding.items():
        bound = min(shares) >= BINDING_SHARE
        where = f"{shares[0]:.0%} of z lie above {name} and {shares[1]:.0%} below its negative"
        note = where if bound else f"{where}: too few to test it"
        yield about.finding(f"binding:{name}", "pass" if bound else "not_run", note=note)


def judge_case(
    case: ExpertsCase,
    provider: ModelProvider,
    implementations: Sequence[str],
    dtype: torch.dtype,
    *,
    odd: bool = False,
) -> Iterator[Finding]:
    """Judge every implementation in every setting of one built case."""
    settings = [Setting("odd")] if odd else [Setting("default"), Setting("dropped", dropped=True)]
    for setting in settings:
        yield from _judge_setting(case, provider, implementations, dtype, setting)
    if odd:
        return
    for name, value in case.scalars().items():
        changed = _moving_value(case, dtype, name, value)
        what = f"sensitivity:{name}"
        if changed is None:
            note = f"changing {name} changes nothing that the class computes, so it tests nothing"
            about = About(case.name, what, THE_CLASS, DTYPE_NAMES[dtype])
            yield about.finding("all", "not_run", note=note)
        else:
            setting = Setting(what, scalars={name: changed})
            yield from _judge_setting(case, provider, implementations, dtype, setting)


def _judge_setting(
    case: ExpertsCase,
    provider: ModelProvider,
    implementations: Sequence[str],
    dtype: torch.dtype,
    setting: Setting,
) -> Iterator[Finding]:
    dropped, scalars = setting.dropped, setting.scalars
    try:
        truth = Truth(
            case.oracle(OWN_LOOP, dtype, dropped=dropped, scalars=scalars),
            case.plain(dtype, dropped=dropped, scalars=scalars),
        )
    except FOREIGN_ERRORS as error:
        about = About(case.name, setting.case, THE_CLASS, DTYPE_NAMES[dtype])
        yield about.finding("all", "not_run", note=f"no oracle or plain loop: {spell(error)}")
        return
    for implementation in implementations:
        about = About(case.name, setting.case, implementation, DTYPE_NAMES[dtype])
        try:
            run = case.run(implementation, dtype, dropped=dropped, scalars=scalars)
        except FOREIGN_ERRORS as error:
            verdict = verdict_of(error, implementation, provider)
            yield about.finding("all", verdict, note=spell(error))
            continue
        results = run.results
        about = about._replace(evidence=run.evidence)
        if setting.scalars and dtype not in CONTINUOUS:
            results = {name: value for name, value in results.items() if name == "out"}
            truth = truth._replace(exact={"out": truth.exact["out"]})
        yield from _compare(case, about, results, truth, dtype, _note(setting, case))


def _compare(
    case: ExpertsCase,
    about: About,
    results: Results,
    truth: Truth,
    dtype: torch.dtype,
    note: str,
) -> Iterator[Finding]:
    exact, plain = truth
    missing = sorted(exact.keys() - results.keys())
    if missing:
        yield about.finding("all", "fail", note=f"no {', '.join(missing)}")
    note = f"{note}; plain: {plain.loop}" if note else f"plain: {plain.loop}"
    for name in exact:
        if name not in results:
            continue
        value = results[name]
        if value.shape != exact[name].shape:
            shapes = f"shape {tuple(value.shape)} instead of {tuple(exact[name].shape)}"
            yield about.finding(name, "fail", note=shapes)
            continue
        per_expert = name in case.per_expert
        judgement = judge(value, plain.results[name], exact[name], dtype, per_expert=per_expert)
        yield about.judged(name, judgement, note)


def _unbuilt(found: Found, *, odd: bool, reason: str) -> Finding:
    about = About(found.name, "odd" if odd else "default", THE_CLASS, "fp32")
    return about.finding("all", "not_run", note=f"not built: {reason}")


def _moving_value(case: ExpertsCase, dtype: torch.dtype, name: str, value: float) -> float | None:
    """Return a new value of an attribute that changes the exact output, or None."""
    for candidate in (value / 2, value + 1, value * 4, value + 100):
        try:
            before = case.oracle(OWN_LOOP, dtype)["out"]
            after = case.oracle(OWN_LOOP, dtype, scalars={name: candidate})["out"]
        except FOREIGN_ERRORS:  # a value that the class does not take
            continue
        if relative_error(after, before) > MOVES:
            return candidate
    return None


def _note(setting: Setting, case: ExpertsCase) -> str:
    if not setting.scalars:
        return str(case.sizes)
    before = case.scalars()
    changes = [f"{name} {before[name]:g} -> {value:g}" for name, value in setting.scalars.items()]
    return f"after a first run, {', '.join(changes)}"

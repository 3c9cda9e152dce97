"""Is there evidence for every kernel as it is now? By syntax and JSON alone: no GPU, Triton or git.

A kernel is covered where every variant that launches it has a record with its current hash, of a
clean tree, whose replays had the same bytes, and whose run saw every planted fault.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from samebits.checks.determinism.evidence import Debt, Evidence, Record, read_all, read_debts
from samebits.checks.determinism.source import Sources
from samebits.checks.determinism.variant import Registry, RegistryError, Variant
from samebits.checks.result import Result, Verdict

IN_NO_VARIANT = "a @triton.jit function in no variant"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The results, and what lacks evidence (with a debt or without)."""

    results: list[Result]
    # What a debt may stand for, with its hash: variants by name, and kernels that are in none.
    lacking: dict[str, str]
    # Names of variants without evidence, those that raced too.
    owed: list[str]


def coverage(registry: Registry) -> Coverage:
    """Return one result for each variant, each uncovered kernel and each problem of the evidence.

    Raises:
        RegistryError: The registry names a kernel that is not there, or a file cannot be read.
    """
    sources = Sources(registry.root)
    evidence = read_all(registry.evidence, registry.debts)
    debts = read_debts(registry.debts)
    results = [
        _result(e.file, "evidence", "fail", why)
        for e in evidence
        if (why := blind(e, registry.variants))
    ]
    lacking: dict[str, str] = {}
    owed = []
    for variant in registry.variants:
        current = fingerprint(sources, variant)
        if variant.expected != "same":
            continue
        judged = judge(variant, current, evidence, registry.variants)
        verdict: Verdict = "pass" if judged.covered else "fail"
        note = judged.note
        if not judged.covered:
            owed.append(variant.name)
            if judged.excusable:
                lacking[variant.name] = current
                verdict, note = _owed(debts.get(variant.name), current, note)
        results.append(_result(variant.name, variant.kernels[0], verdict, note))
    for kernel in _unreached(sources, registry.variants):
        current = lacking[kernel] = sources.fingerprint((kernel,), {})
        found = _owed(debts.get(kernel), current, IN_NO_VARIANT)
        results.append(_result("", kernel, *found))
    known = {*sources.kernels, *(v.name for v in registry.variants if v.expected == "same")}
    for name in sorted(debts.keys() - lacking.keys()):
        why = "does not lack evidence" if name in known else "does not exist"
        results.append(_result(name, "", "fail", f"listed as debt, but it {why}: --owe drops it"))
    return Coverage(results, lacking, owed)


def fingerprint(sources: Sources, variant: Variant) -> str:
    """Return the current hash of a variant; "" of a planted fault that is not of this folder.

    Raises:
        RegistryError: It names a kernel that is not there.
    """
    if variant.expected != "same" and not sources.kernels.keys() >= set(variant.kernels):
        return ""
    try:
        return sources.fingerprint(tuple(variant.kernels), dict(variant.config))
    except RegistryError as error:
        raise RegistryError(f"variant {variant.name!r}: {error}") from None
    except TypeError as error:
        raise RegistryError(f"config of variant {variant.name!r} is not JSON: {error}") from None


def blind(evidence: Evidence, variants: Iterable[Variant]) -> str | None:
    """Return why a whole run proves nothing, or None."""
    if not evidence.clean:
        return f"made on a dirty tree ({evidence.tree or 'of no known revision'}): make it again"
    for variant in variants:
        if variant.expected != "different":
            continue
        record = evidence.variants.get(variant.name)
        if record is None:
            return f"{variant.name} was not among its replays: nothing shows that they see faults"
        unseen = unseen_by(variant, record)
        if unseen:
            return f"its replays ({', '.join(unseen)}) did not see {variant.name}"
    return None


def unseen_by(variant: Variant, record: Record) -> list[str]:
    """Return the kinds of replay that should have seen a planted fault and did not."""
    return [kind for kind in variant.seen_by if not record.different.get(kind)]


class Judged(NamedTuple):
    """What the evidence says of one variant: where, or why not."""

    covered: bool
    note: str
    # Whether a debt may stand for the evidence: not for a race.
    excusable: bool = True


def judge(
    variant: Variant, current: str, evidence: Sequence[Evidence], variants: Sequence[Variant]
) -> Judged:
    """Return what the evidence says of a variant whose hash is ``current``."""
    found = [(e, e.variants[variant.name]) for e in evidence if variant.name in e.variants]
    if not found:
        return Judged(False, "no evidence")
    known = [(e, record) for e, record in found if record.hash == current]
    if not known:
        return Judged(False, f"changed since its evidence ({found[-1][0].file})")
    for where, record in known:
        if record.raced:
            return Judged(False, failure(record, where), excusable=False)
    same = [(e, record) for e, record in known if record.same]
    if not same:
        return Judged(False, failure(known[-1][1], known[-1][0]))
    usable = [pair for pair in same if blind(pair[0], variants) is None]
    if not usable:
        return Judged(False, f"no evidence but that of {same[-1][0].file}")
    where, record = usable[-1]
    return Judged(True, f"{record.total} replays on {where.where}")


def failure(record: Record, where: Evidence) -> str:
    """Return what was wrong with a variant's replays."""
    if record.raced:
        counts = ", ".join(
            f"{n} of {record.replays[k]} {k}" for k, n in record.different.items() if n
        )
        return f"raced on {where.where}: {counts} replays differ; {record.note}"
    done = ", ".join(f"{n} {kind}" for kind, n in record.replays.items())
    what = f"only {done} replays" if done else "not replayed"
    return f"{what} on {where.where}: {record.note or 'no replays'}"


def _owed(debt: Debt | None, current: str, note: str) -> tuple[Verdict, str]:
    if debt is None:
        return "fail", note
    if debt.hash != current:
        since = f"changed since it was listed as debt ({debt.reason})"
        return "fail", f"{note}; {since}: list it again with --owe"
    return "not_run", f"{note}; owed: {debt.reason}"


def _unreached(sources: Sources, variants: Iterable[Variant]) -> list[str]:
    reached: set[str] = set()
    for variant in variants:
        for kernel in sources.kernels.keys() & set(variant.kernels):
            reached |= sources.closure(kernel).keys()
    # A class that a kernel names brings its methods.
    return [
        kernel
        for kernel in sources.kernels
        if kernel not in reached and kernel.rpartition(".")[0] not in reached
    ]


def _result(case: str, kernel: str, verdict: Verdict, note: str) -> Result:
    return Result(
        check="determinism", case=case, problem="", backend=kernel, verdict=verdict, note=note
    )

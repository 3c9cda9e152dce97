"""Can the audit still see the fault with this torch? Known programs, one planted for good."""

from pathlib import Path

from samebits import env
from samebits.checks.compile.audit import audit
from samebits.checks.compile.process import Deadline, Tell
from samebits.checks.compile.record import Audit
from samebits.checks.compile.target import Target
from samebits.checks.result import Result, Verdict

_MODULE = "samebits.checks.compile.known_bad"
_PLANTED = "planted"
PROGRAMS = (_PLANTED, "clamped_swiglu", "scaled_rms_norm")


def self_test(
    *, budget: float | None = None, folder: Path | None = None, tell: Tell
) -> list[Result]:
    """Return one verdict for each known program.

    A planted fault that is not found fails: the audit is blind. A fault of torch that is not found
    passes only where every sequence was run, and says "fixed upstream".
    """
    verdicts = []
    for name in PROGRAMS:
        tell(f"known program {name}")
        target = Target(f"{_MODULE}:{name}")
        found = audit(
            target,
            deadline=Deadline(budget),
            stop_at_first=True,
            remedies=False,
            folder=folder,
            tell=tell,
        )
        verdict, note = judge(name, found)
        verdicts.append(
            Result(
                check="compile",
                case=f"self-test {name}",
                problem="",
                backend=f"torch {env.versions()['torch']}",
                verdict=verdict,
                note=note,
            )
        )
    return verdicts


def judge(name: str, found: Audit) -> tuple[Verdict, str]:
    """Return the verdict on one known program, with its reason.

    Determinism: pure function of its arguments.
    """
    if found.wrong:
        seen = "the planted fault" if name == _PLANTED else "the fault of this torch"
        return "pass", f"the audit sees {seen}"
    errors = [step.error for step in found.steps if step.error]
    unfinished = [*errors, *found.unfinished.values()]
    if unfinished or not found.steps:
        return "not_run", unfinished[0] if unfinished else "nothing was run"
    if name == _PLANTED:
        return "fail", "the audit does not see the planted fault: do not trust it with this torch"
    return "pass", "fixed upstream: this torch computes the program right"

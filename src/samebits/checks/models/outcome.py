"""From what happened to what is said: errors to verdicts, judgements to findings."""

from collections.abc import Mapping
from typing import NamedTuple

from samebits.checks.models.finding import Finding
from samebits.checks.models.protocol import ModelProvider
from samebits.checks.result import Verdict
from samebits.testing.numerics import Judgement

# The "implementation" of a finding about the class itself.
THE_CLASS = "class"
# Characters kept of an error's message.
NOTE_LENGTH = 400


class About(NamedTuple):
    """What several findings have in common."""

    model: str
    case: str
    implementation: str
    dtype: str
    evidence: str | None = None

    def finding(
        self,
        quantity: str,
        verdict: Verdict,
        *,
        measured: float | None = None,
        allowed: float | None = None,
        worst_row: int | None = None,
        note: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> Finding:
        """Return a finding about ``quantity``."""
        return Finding(
            **self._asdict(),
            quantity=quantity,
            verdict=verdict,
            measured=measured,
            allowed=allowed,
            worst_row=worst_row,
            note=note,
            figures=figures or {},
        )

    def judged(
        self,
        quantity: str,
        judgement: Judgement,
        note: str,
        figures: Mapping[str, float] | None = None,
    ) -> Finding:
        """Return the finding that a judgement under the error budget makes."""
        whole = (judgement.measured, judgement.allowed)
        row = (judgement.worst_row, judgement.worst_allowed)
        # The place that decides: the one with the larger share of its allowance.
        measured, allowed = max(whole, row, key=lambda pair: pair[0] / pair[1])
        return self.finding(
            quantity,
            "pass" if judgement.passed else "fail",
            measured=measured,
            allowed=allowed,
            worst_row=judgement.row,
            note=note,
            figures=figures,
        )


def verdict_of(error: BaseException, implementation: str, provider: ModelProvider) -> Verdict:
    """Return the verdict on an implementation that raised ``error`` instead of computing."""
    if isinstance(error, ImportError):
        return "not_run"
    return "unsupported" if provider.refuses(error, implementation) else "fail"


def spell(error: BaseException) -> str:
    """Return an error's type and message on one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = f"{type(error).__name__}: {' · '.join(lines)}".strip(": ")
    return text if len(text) <= NOTE_LENGTH else f"{text[: NOTE_LENGTH - 1]}…"

"""One line of the check's result, and its JSON form (``models.schema.json``)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from samebits.checks.result import Verdict

# Worst last: a group of findings shows its worst verdict.
_BY_SEVERITY: tuple[Verdict, ...] = ("pass", "unsupported", "not_run", "fail")
# Cases that need the fewest words come first.
_PLAINEST = ("default", "oracle", "odd", "dropped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the check says about one quantity of one implementation of one model."""

    # "<model>.<Class>".
    model: str
    # default, odd, dropped, oracle, sensitivity:<attribute>, language_model or control.
    case: str
    # An implementation's name; "class" where the class itself is judged.
    implementation: str
    # bf16, fp16, fp32 or fp64.
    dtype: str
    # "out", "d_<name>", "log_probs", or "all" where nothing could be measured.
    quantity: str
    verdict: Verdict
    # Error, and what the budget allows, in the place that is nearest to (or furthest over) it.
    measured: float | None = None
    allowed: float | None = None
    # Index of the worst row (parameter gradients: the worst expert).
    worst_row: int | None = None
    # "run" or "arguments", see ``protocol.Evidence``; None where nothing ran.
    evidence: str | None = None
    note: str = ""
    # Further figures by name; language models: mean, p95, p99, max, outside_share and so on.
    figures: Mapping[str, float] = field(default_factory=dict)
    # The check's name.
    check: str = "models"
    # Versions that decide the result, by package.
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return one line of JSON; a figure that is not finite becomes null, and the note says so.

        Determinism: keys in a fixed order.
        """
        values = asdict(self)
        lost = [n for n in ("measured", "allowed") if not _finite(values[n])]
        for name in lost:
            values[name] = None
        if lost:
            not_finite = f"{', '.join(lost)} not finite"
            values["note"] = f"{self.note}; {not_finite}" if self.note else not_finite
        values["figures"] = {n: v if _finite(v) else None for n, v in self.figures.items()}
        return json.dumps(values, ensure_ascii=False, sort_keys=True)

    @property
    def severity(self) -> float:
        """How far over the budget: measured / allowed, inf where it is not finite."""
        if self.measured is None or self.allowed is None:
            return float("inf") if self.verdict == "fail" else 0.0
        if not math.isfinite(self.measured):
            return float("inf")
        return self.measured / self.allowed if self.allowed else self.measured


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the finding that tells most: the worst verdict, in the plainest case, furthest off."""
    return max(findings, key=lambda f: (_BY_SEVERITY.index(f.verdict), -_rank(f.case), f.severity))


def _rank(case: str) -> int:
    return _PLAINEST.index(case) if case in _PLAINEST else len(_PLAINEST)


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)

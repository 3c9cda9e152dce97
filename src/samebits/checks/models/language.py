"""Judge whole language models: what an experts implementation costs in log-probability.

| case | what is judged |
| --- | --- |
| language_model | log p of every target token against the error budget |
| control | the same with each sequence on its own: one implementation at another batch size |

The figures are those of ``samebits.checks.logprobs.figures``.
"""

from collections.abc import Iterator, Sequence

import torch

from samebits.checks.logprobs.figures import figures
from samebits.checks.models.finding import Finding
from samebits.checks.models.outcome import THE_CLASS, About, spell, verdict_of
from samebits.checks.models.protocol import (
    FOREIGN_ERRORS,
    LanguageBuilder,
    LanguageCase,
    ModelProvider,
    UnbuildableError,
)
from samebits.problem import DTYPE_NAMES
from samebits.testing.numerics import judge

CASE, CONTROL = "language_model", "control"
QUANTITY = "log_probs"
# Nats that ablating the experts must cost; below, the model says nothing about its experts.
ABLATION = 0.5


def judge_language(
    builder: LanguageBuilder,
    provider: ModelProvider,
    implementations: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> Iterator[Finding]:
    """Build one language model and yield every finding about it.

    Determinism: repeatable; parameters and tokens have fixed seeds.
    """
    about = About(builder.name, CASE, THE_CLASS, "fp32")
    try:
        case = builder.build()
    except UnbuildableError as error:
        yield about.finding("all", "not_run", note=f"not built: {error}")
        return
    if case.ablation < ABLATION:
        note = f"ablating the experts costs {case.ablation:.2f} nats, less than {ABLATION}"
        yield about.finding("all", "not_run", note=note)
        return
    for dtype in dtypes:
        yield from _judge_dtype(builder.name, case, provider, implementations, dtype)


def _judge_dtype(
    name: str,
    case: LanguageCase,
    provider: ModelProvider,
    implementations: Sequence[str],
    dtype: torch.dtype,
) -> Iterator[Finding]:
    about = About(name, CASE, THE_CLASS, DTYPE_NAMES[dtype])
    try:
        exact, plain = case.exact(dtype), case.plain(dtype)
    except FOREIGN_ERRORS as error:
        yield about.finding("all", "not_run", note=f"no oracle or plain loop: {spell(error)}")
        return
    for implementation in implementations:
        about = about._replace(implementation=implementation, evidence=None, case=CASE)
        try:
            whole, evidence = case.run(implementation, dtype)
            split, _ = case.run(implementation, dtype, split=True)
            flips = case.flips(implementation, dtype)
        except FOREIGN_ERRORS as error:
            verdict = verdict_of(error, implementation, provider)
            yield about.finding("all", verdict, note=spell(error))
            continue
        about = about._replace(evidence=evidence)
        values = figures(list(whole.double() - exact.double())) | {
            "ablation": case.ablation,
            "flips": flips.flipped,
            "choices": flips.choices,
        }
        yield about.judged(QUANTITY, judge(whole, plain, exact, dtype), _note(values), values)
        values = figures(list(split.double() - whole.double()))
        yield about._replace(case=CONTROL).judged(
            QUANTITY, judge(split, plain, exact, dtype), _note(values), values
        )


def _note(values: dict[str, float]) -> str:
    return f"mean |Δ log p| {values['mean']:.1e} nats, max {values['max']:.1e}"

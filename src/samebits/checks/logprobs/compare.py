"""Compare two recordings: the gap, what an engine differs from itself, and what explains it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from samebits.checks.logprobs.diagnose import CAUSES, diagnose
from samebits.checks.logprobs.figures import figures
from samebits.checks.logprobs.recording import Pair, Recording, pairs
from samebits.checks.result import Result, Verdict
from samebits.errors import must

# Mean gap, in nats, that is allowed where nothing else is known: public reports of healthy pairs of
# trainer and engine begin there.
ALLOWED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Result):
    """A result with every figure (see ``figures``); ``measured`` is the mean gap in nats."""

    # None where one is not finite.
    figures: Mapping[str, float | None] = field(default_factory=dict)


def compare(
    a: Recording,
    b: Recording,
    *,
    control: Recording | None = None,
    allowed: float | None = None,
) -> list[Row]:
    """Return the gap between two recordings, the control row, and a verdict for each cause.

    Args:
        a: Of the side that sampled the tokens, normally the inference engine.
        b: Of the other side, normally the trainer.
        control: The engine of ``a`` once more, at another batch size: what it differs from itself.
        allowed: Mean gap in nats that passes; None allows 0.01, or twice the control if that is
            more.

    Returns:
        Rows of the cases "gap", "control" (if given), "masking", "shift" and "temperature".

    Raises:
        RecordingError: The recordings are not of the same tokens.
        ValueError: ``allowed`` is negative or not finite.

    Determinism: pure function of its arguments.
    """
    if allowed is not None and not 0 <= allowed < float("inf"):
        raise ValueError(must("allowed", "be finite and >= 0", allowed))
    both = pairs(a, b)
    rows = []
    noise = 0.0
    if control is not None:
        itself = figures([pair.change for pair in pairs(a, control)])
        noise = itself["mean"]
        note = f"the engine against itself; {_spell(itself)}"
        rows.append(_row(a, control, "control", "pass", measured=noise, note=note, of=itself))
    if allowed is None:
        allowed = max(ALLOWED, 2 * noise)
    values = figures([pair.change for pair in both])
    verdict: Verdict = "pass" if values["mean"] <= allowed else "fail"
    gap = _row(
        a, b, "gap", verdict, measured=values["mean"], allowed=allowed, note=_spell(values),
        of=values,
    )  # fmt: skip
    return [gap, *rows, *_causes(a, b, both, allowed)]


def _causes(a: Recording, b: Recording, both: Sequence[Pair], allowed: float) -> list[Row]:
    causes = diagnose(both, allowed)
    rows = []
    for name in CAUSES:
        cause = causes.get(name)
        if cause is None:
            rows.append(_row(a, b, name, "not_run", note="the gap is explained already"))
            continue
        verdict: Verdict = "fail" if cause.found else "not_run" if cause.note else "pass"
        figure, limit = cause.measured, cause.limit
        rows.append(_row(a, b, name, verdict, note=cause.note, measured=figure, allowed=limit))
    return rows


def _row(
    a: Recording,
    b: Recording,
    case: str,
    verdict: Verdict,
    *,
    note: str,
    measured: float | None = None,
    allowed: float | None = None,
    of: Mapping[str, float] | None = None,
) -> Row:
    return Row(
        check="logprobs",
        case=case,
        problem=a.name,
        backend=b.name,
        verdict=verdict,
        measured=measured,
        allowed=allowed,
        note=note,
        figures={n: v if isfinite(v) else None for n, v in (of or {}).items()},
    )


def _spell(values: Mapping[str, float]) -> str:
    parts = [f"p95 {values['p95']:.1e}", f"p99 {values['p99']:.1e}", f"max {values['max']:.1e}"]
    parts += [f"outside {values['outside_share']:.2%}", f"k3 {values['k3']:.1e}"]
    if "sum_100" in values:
        parts.append(f"sum of 100 {values['sum_100']:.1e}")
    return ", ".join(parts)


Model = Callable[..., Any]


def record(
    model: Model,
    tokens: Tensor,
    *,
    name: str,
    mask: Tensor | None = None,
    alone: bool = False,
) -> Recording:
    """Return what ``model`` says of every token of ``tokens`` but the first.

    Args:
        model: Called as ``model(tokens)``, or ``model(tokens, attention_mask=mask)`` where a mask
            is given; returns logits ``(B, S, V)``, or an object that has them as ``logits``.
        tokens: ``(B, S)`` int64, S >= 2.
        name: What messages call the recording.
        mask: ``(B, S)``, 0 for padding; a token counts where it and all it stands on is none.
        alone: Run each sequence on its own: the engine at another batch size, for the control.

    Raises:
        ValueError: A shape is wrong, or tokens are no ids of the model; the message names it.
        TypeError: The model returns no logits.
        RecordingError: The model returns NaN.

    Determinism: as the model's.
    """
    if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            must("tokens", "have shape (B, S) with B >= 1, S >= 2", tuple(tokens.shape))
        )
    if tokens.is_floating_point() or tokens.dtype == torch.bool or int(tokens.min()) < 0:
        raise ValueError(must("tokens", "be ids: whole numbers >= 0", _range(tokens)))
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(
            must("mask", f"have the shape of tokens {tuple(tokens.shape)}", mask.shape)
        )
    size = 1 if alone else tokens.shape[0]
    parts = []
    with torch.no_grad():
        for index in range(0, tokens.shape[0], size):
            batch = slice(index, index + size)
            options = {} if mask is None else {"attention_mask": mask[batch]}
            returned = model(tokens[batch], **options)
            logits = returned if isinstance(returned, Tensor) else getattr(returned, "logits", None)
            if not isinstance(logits, Tensor):
                rule = "return logits, or an object that has them as logits"
                raise TypeError(must(f"model {name}", rule, type(returned).__name__))
            expected = (*tokens[batch].shape, logits.shape[-1] if logits.dim() else 1)
            if tuple(logits.shape) != expected:
                rule = f"return logits of shape (B, S, V) = {expected}"
                raise ValueError(must(f"model {name}", rule, tuple(logits.shape)))
            if int(tokens[batch].max()) >= expected[-1]:
                rule = f"be ids below {expected[-1]}, the vocabulary of model {name}"
                raise ValueError(must("tokens", rule, _range(tokens[batch])))
            chosen = tokens[batch, 1:, None].to(logits.device)
            log_probs = logits[:, :-1].double().log_softmax(-1).gather(-1, chosen)
            parts.append(log_probs[..., 0].cpu())
    counted = None
    if mask is not None:
        live = mask.bool().cpu()
        counted = list(live[:, 1:] & live[:, :-1])
    return Recording(
        name=name, log_probs=list(torch.cat(parts)), masks=counted, tokens=list(tokens[:, 1:].cpu())
    )


def _range(tokens: Tensor) -> str:
    return f"{tokens.dtype} from {tokens.min().item()} to {tokens.max().item()}"


def compare_models(
    a: Model,
    b: Model,
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    allowed: float | None = None,
) -> list[Row]:
    """Compare two models in this process on the same tokens; the control is ``a`` one by one.

    Args:
        a: See ``record``.
        b: See ``record``.
        tokens: See ``record``.
        mask: See ``record``.
        allowed: See ``compare``.

    Returns:
        See ``compare``.

    Raises:
        ValueError: See ``record``.
        TypeError: See ``record``.

    Determinism: as the models'.
    """
    whole = record(a, tokens, name="a", mask=mask)
    control = record(a, tokens, name="a, one by one", mask=mask, alone=True)
    return compare(whole, record(b, tokens, name="b", mask=mask), control=control, allowed=allowed)

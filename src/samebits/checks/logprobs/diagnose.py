"""Why two recordings differ, where the numbers show it: masking, a shift, a temperature.

* masking: the masks differ; or exact zeros on one side alone; or a gap in the padded sequences
  alone; or a gap on one side of a position alone.
* shift: the gap is less than half as large when one side is moved by one or two positions.
* temperature: the gap follows log p, which alone explains more than a third of its variance.

A temperature T turns log p into log p / T − log Σ p^(1/T): confident tokens lose and doubtful ones
gain (T > 1), or the reverse. Rounding and noise leave Δ almost independent of log p: under 2 %
explained in every case tried, and over 50 % for temperatures from 0.6 to 1.5.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.checks.logprobs.recording import Pair

_LAGS = (-2, -1, 1, 2)
_SHIFT_SHARE = 0.5
_EXPLAINED_SHARE = 1 / 3
# Tokens of one bin of log p, and how many tokens a temperature needs to show.
_BIN = 20
_ENOUGH = 200
# An exact 0 says p = 1: a rounding where the other side is nearly as sure, a mask where it is not.
_DOUBTFUL = -1.0
# A part that is right has a gap this much smaller than one that is wrong.
_CONTRAST = 0.1
# Tokens that a part needs, and that a shift does.
_PART = 64
_SHIFTED = 8


class Cause(NamedTuple):
    """What explains a gap, or that it was not found (``note`` is empty then)."""

    found: bool
    # The figure that decides, in the unit of the cause, and its limit; None where none applies.
    measured: float | None = None
    limit: float | None = None
    note: str = ""


def diagnose(pairs: Sequence[Pair], allowed: float) -> dict[str, Cause]:
    """Return each cause by name; the first that is found ends the search.

    Args:
        pairs: The sequences of both recordings.
        allowed: Mean gap, in nats, that needs no explanation.

    Determinism: pure function of its arguments.
    """
    found: dict[str, Cause] = {}
    for name, look in CAUSES.items():
        found[name] = look(pairs, allowed)
        if found[name].found:
            break
    return found


def _masking(pairs: Sequence[Pair], allowed: float) -> Cause:
    for look in (_masks, _zeros, _padding, _position):
        note = look(pairs, allowed)
        if note:
            return Cause(found=True, note=note)
    return Cause(found=False)


def _masks(pairs: Sequence[Pair], allowed: float) -> str:
    del allowed
    differ = [pair for pair in pairs if pair.masked_once.any()]
    if not differ:
        return ""
    count = sum(int(pair.masked_once.sum()) for pair in differ)
    return f"the masks differ at {count} tokens; first: {_first(differ[0], differ[0].masked_once)}"


def _zeros(pairs: Sequence[Pair], allowed: float) -> str:
    del allowed
    for side in ("a", "b"):
        places = [_zero_once(pair, side) for pair in pairs]
        count = sum(int(place.sum()) for place in places)
        if count < 2:
            continue
        pair, place = next((p, z) for p, z in zip(pairs, places, strict=True) if z.any())
        which = "first" if side == "a" else "second"
        return (
            f"{count} doubtful tokens are exactly 0 in the {which} recording alone, as if masked; "
            f"first: {_first(pair, place)}"
        )
    return ""


def _zero_once(pair: Pair, side: str) -> Tensor:
    one, other = (pair.a, pair.b) if side == "a" else (pair.b, pair.a)
    return (one == 0) & (other < _DOUBTFUL) & pair.mask


def _padding(pairs: Sequence[Pair], allowed: float) -> str:
    """Only sequences shorter than the longest, which a batch pads, are off."""
    longest = max(len(pair.a) for pair in pairs)
    whole = [pair.change for pair in pairs if len(pair.a) == longest]
    padded = [pair.change for pair in pairs if len(pair.a) < longest]
    if not padded or not _contrast(whole, padded, allowed):
        return ""
    return (
        f"sequences shorter than the longest ({longest} tokens) are off by {_mean(padded):.2g} "
        f"nats, the longest by {_mean(whole):.2g}: padding is attended to, or not masked"
    )


def _position(pairs: Sequence[Pair], allowed: float) -> str:
    """The gap begins, or ends, at a position."""
    longest = max(len(pair.a) for pair in pairs)
    totals, counts = torch.zeros(longest).double(), torch.zeros(longest).double()
    for pair in pairs:
        length = len(pair.a)
        totals[:length] += torch.where(pair.mask, (pair.b - pair.a).abs(), 0.0)
        counts[:length] += pair.mask
    total, count = totals.cumsum(0), counts.cumsum(0)
    # Means before each position, and from it on.
    before = total[:-1] / count[:-1].clamp(min=1)
    after = (total[-1] - total[:-1]) / (count[-1] - count[:-1]).clamp(min=1)
    enough = (count[:-1] >= _PART) & (count[-1] - count[:-1] >= _PART)
    small, large = torch.minimum(before, after), torch.maximum(before, after)
    contrast = torch.where(enough & (large > allowed), small / large, 1.0)
    if not len(contrast):
        return ""
    # Where no error at all is on one side, many places have the same contrast: the sharpest is
    # that with the most on the other.
    best = contrast <= contrast.min()
    place = int(torch.where(best, large, -1.0).argmax()) + 1
    early = [(pair.b - pair.a)[:place][pair.mask[:place]] for pair in pairs]
    late = [(pair.b - pair.a)[place:][pair.mask[place:]] for pair in pairs]
    begins = bool(after[place - 1] > before[place - 1])
    right, wrong = (early, late) if begins else (late, early)
    if not _contrast(right, wrong, allowed):
        return ""
    return (
        f"only tokens {'from' if begins else 'before'} position {place} are off (by "
        f"{_mean(wrong):.2g} nats, the others by {_mean(right):.2g}): a mask, a window or what "
        "comes before differs"
    )


def _contrast(right: Sequence[Tensor], wrong: Sequence[Tensor], allowed: float) -> bool:
    """Return whether one part is off and the other is not.

    By the median as well: a few far tokens, as a dropped option makes, may all be in one part.
    """
    if min(sum(map(len, right)), sum(map(len, wrong))) < _PART or _mean(wrong) <= allowed:
        return False
    middle = [float(torch.cat(list(part)).abs().median()) for part in (right, wrong)]
    return _mean(right) <= _CONTRAST * _mean(wrong) and middle[0] <= _CONTRAST * middle[1]


def _mean(changes: Sequence[Tensor]) -> float:
    return float(torch.cat(list(changes)).abs().mean())


def _shift(pairs: Sequence[Pair], allowed: float) -> Cause:
    gap = _mean([pair.change for pair in pairs])
    lags = {lag: _lagged(pairs, lag) for lag in _LAGS}
    lag = min(lags, key=lambda one: lags[one])
    share = lags[lag] / gap if gap > 0 else 1.0
    if gap <= allowed or share >= _SHIFT_SHARE:
        return Cause(found=False, measured=min(share, 1.0), limit=_SHIFT_SHARE)
    way = "later" if lag > 0 else "earlier"
    note = (
        f"the second recording is {abs(lag)} position{'s' * (abs(lag) > 1)} {way} than the first: "
        f"moved back, the gap is {lags[lag]:.2g} instead of {gap:.2g} nats"
    )
    if lags[lag] > allowed:
        note += ", still more than is allowed: compare again when this is mended"
    return Cause(found=True, measured=share, limit=_SHIFT_SHARE, note=note)


def _lagged(pairs: Sequence[Pair], lag: int) -> float:
    """Return the mean of abs(b[t + lag] − a[t]), or inf where there are too few tokens."""
    parts = []
    for pair in pairs:
        early, late = slice(None, -abs(lag)), slice(abs(lag), None)
        ours, theirs = (early, late) if lag > 0 else (late, early)
        both = pair.mask[ours] & pair.mask[theirs]
        parts.append((pair.b[theirs] - pair.a[ours])[both])
    return _mean(parts) if sum(map(len, parts)) >= _SHIFTED else float("inf")


def _temperature(pairs: Sequence[Pair], allowed: float) -> Cause:
    a = torch.cat([pair.a[pair.mask] for pair in pairs])
    change = torch.cat([pair.change for pair in pairs])
    if len(a) < _ENOUGH:
        return Cause(found=False, note=f"not looked for: fewer than {_ENOUGH} tokens")
    if float(change.abs().mean()) <= allowed:
        return Cause(found=False, measured=0.0, limit=_EXPLAINED_SHARE)
    # What sequences share, such as their beginnings, would look like a law: it is seen once.
    a, change = torch.stack([a, change], 1).unique(dim=0).unbind(1)
    if len(a) < _ENOUGH:
        note = f"not looked for: fewer than {_ENOUGH} tokens without repetitions"
        return Cause(found=False, note=note)
    spread = (change - change.mean()).square().sum()
    if float(spread) == 0:
        return Cause(found=False, measured=0.0, limit=_EXPLAINED_SHARE)
    bins = change[a.argsort(stable=True)].split(_BIN)
    within = sum(float((part - part.mean()).square().sum()) for part in bins)
    # Bins of n tokens explain 1/n of pure noise: that is taken out.
    explained = (1 - within / float(spread) - 1 / _BIN) / (1 - 1 / _BIN)
    if explained <= _EXPLAINED_SHARE:
        return Cause(found=False, measured=max(explained, 0.0), limit=_EXPLAINED_SHARE)
    note = (
        f"log p alone explains {explained:.0%} of the gap's variance: the second recording is at "
        f"about {_ratio(a, a + change):.2g} times the temperature of the first"
    )
    return Cause(found=True, measured=explained, limit=_EXPLAINED_SHARE, note=note)


def _ratio(a: Tensor, b: Tensor) -> float:
    """Return the temperature of b in units of a's, a bound that doubtful tokens come near.

    log p_T is below log p / T where T > 1 and above it where T < 1, so the extreme of log p_T /
    log p bounds 1 / T.
    """
    doubtful = a < _DOUBTFUL
    if not doubtful.any():
        return float("nan")
    ratios = (b[doubtful] / a[doubtful]).sort().values
    hotter = float((b - a)[a <= a.median()].mean()) > 0
    edge = int(0.005 * (len(ratios) - 1))
    return 1.0 / float(ratios[edge] if hotter else ratios[-1 - edge])


def _first(pair: Pair, places: Tensor) -> str:
    return f"{pair.called}, token {int(places.nonzero()[0])}"


CAUSES: Mapping[str, Callable[[Sequence[Pair], float], Cause]] = {
    "masking": _masking,
    "shift": _shift,
    "temperature": _temperature,
}

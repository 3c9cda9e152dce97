"""What two recordings of log-probabilities differ by, in figures that hide nothing.

With Δ = log p_B − log p_A of one token, p_A the side that sampled it:

| figure | meaning |
| --- | --- |
| mean, p95, p99, max | of abs(Δ), in nats |
| outside_share | share of tokens with exp(Δ) outside [0.9, 1.1] |
| k3 | mean of exp(Δ) − 1 − Δ, an estimate of KL(A ‖ B) that is never negative |
| sum_100 | mean of abs(ΣΔ) over 100 successive tokens; absent where no sequence has as many |

A signed mean hides everything: it is not among them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# exp(Δ) outside these bounds moves a token's probability by a tenth or more.
BOUNDS = (0.9, 1.1)
# Tokens of one sum_100.
WINDOW = 100


def figures(changes: Sequence[Tensor]) -> dict[str, float]:
    """Return the figures (module docstring) of the changes of several sequences.

    Args:
        changes: Δ of each sequence, 1-D, any lengths; at least one token in all.

    Determinism: computed in fp64, repeatable.
    """
    change = torch.cat([sequence.detach().double() for sequence in changes])
    size = change.abs().sort().values
    ratio = change.exp()
    outside = (ratio < BOUNDS[0]) | (ratio > BOUNDS[1]) | ratio.isnan()
    found = {
        "mean": float(size.mean()),
        "p95": _quantile(size, 0.95),
        "p99": _quantile(size, 0.99),
        "max": float(size[-1]),
        "outside_share": float(outside.double().mean()),
        # expm1 keeps the figure exact where Δ is small.
        "k3": float((torch.expm1(change) - change).mean()),
    }
    windows = [sequence.detach().double() for sequence in changes if len(sequence) >= WINDOW]
    if windows:
        sums = torch.cat([w[: len(w) // WINDOW * WINDOW].view(-1, WINDOW).sum(1) for w in windows])
        found["sum_100"] = float(sums.abs().mean())
    return found


def _quantile(ordered: Tensor, share: float) -> float:
    """Return a quantile with linear interpolation; torch's own takes 2**24 elements at most."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[low], ordered[high], place - low))

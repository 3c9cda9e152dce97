"""The gap position by position, as a picture: where in a sequence two recordings part."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from samebits.checks.logprobs.recording import Pair
from samebits.checks.writing import written_whole


def by_position(pairs: Sequence[Pair]) -> list[Tensor]:
    """Return abs(Δ) of the tokens that count at each position; some may be empty."""
    longest = max(len(pair.a) for pair in pairs)
    sizes: list[list[Tensor]] = [[] for _ in range(longest)]
    for pair in pairs:
        size = (pair.b - pair.a).abs()
        for place in pair.mask.nonzero().flatten().tolist():
            sizes[place].append(size[place])
    return [torch.stack(found) if found else torch.zeros(0) for found in sizes]


def draw(pairs: Sequence[Pair], path: Path, title: str) -> None:
    """Draw mean and largest gap of each position to ``path``, in the form of its suffix.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib knows no such form.
    """
    import matplotlib.figure

    places = [(i, size) for i, size in enumerate(by_position(pairs)) if len(size)]
    figure = matplotlib.figure.Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    at = [place for place, _ in places]
    axes.plot(at, [float(size.max()) for _, size in places], label="max", lw=0.8, color="#c44")
    axes.plot(at, [float(size.mean()) for _, size in places], label="mean", lw=1.4, color="#236")
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set(xlabel="position", ylabel="|Δ log p|, nats", title=title, ylim=(0, None))
    axes.legend(frameon=False)
    with written_whole(path) as beside:
        figure.savefig(beside)

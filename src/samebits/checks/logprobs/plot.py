"""The gap position by position, as a picture: where in a sequence two recordings part."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from samebits.checks.logprobs.recording import Pair
from samebits.checks.writing import written_whole
from samebits.errors import must

SUFFIXES = (".svg", ".png", ".pdf")


def by_position(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions at which a token counts, and mean and largest abs(Δ) of each."""
    longest = max(len(pair.a) for pair in pairs)
    total, count, largest = (torch.zeros(longest, dtype=torch.float64) for _ in range(3))
    for pair in pairs:
        size = torch.where(pair.mask, (pair.b - pair.a).abs(), 0.0)
        total[: len(size)] += size
        count[: len(size)] += pair.mask
        largest[: len(size)] = torch.maximum(largest[: len(size)], size)
    at = count.nonzero().flatten()
    return at, total[at] / count[at], largest[at]


def check_suffix(path: Path) -> None:
    """Raise ``ValueError`` unless the suffix of ``path`` is that of a picture."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(must("--plot", f"end in {', '.join(SUFFIXES)}", repr(path.name)))


def draw(pairs: Sequence[Pair], path: Path, title: str) -> None:
    """Draw mean and largest gap of each position to ``path``, in the form of its suffix.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The suffix is not that of a picture.
    """
    import matplotlib.figure

    check_suffix(path)
    at, mean, largest = (values.tolist() for values in by_position(pairs))
    figure = matplotlib.figure.Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(at, largest, label="max", lw=0.8, color="#c44")
    axes.plot(at, mean, label="mean", lw=1.4, color="#236")
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set(xlabel="position", ylabel="|Δ log p|, nats", title=title, ylim=(0, None))
    axes.legend(frameon=False)
    with written_whole(path) as beside:
        figure.savefig(beside)

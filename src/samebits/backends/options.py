"""The options of a call, and their spelling: made of strings, so that no float enters a graph."""

from functools import lru_cache
from typing import NamedTuple

import torch

from samebits.activation import Activation
from samebits.formats.descriptor import FormatPair, WeightFormat
from samebits.problem import DTYPE_NAMES, DTYPES, ProbPlacement
from samebits.weights import Layout, PostExpertNorm


class Options(NamedTuple):
    """What a call is besides its tensors; ``text()`` is how it enters an operator."""

    activation: Activation
    placement: ProbPlacement
    layout: Layout
    norm: PostExpertNorm | None
    out_dtype: torch.dtype | None
    backend: str
    format: FormatPair | None = None
    # A backward follows that gets no z.
    recompute: bool = False
    # Of activations in 8 bits.
    row_format: WeightFormat | None = None

    # A method: torch 2.10 cannot trace a property of a named tuple.
    def text(self) -> str:
        """Canonical spelling, made of strings only so that it can be traced."""
        norm = "" if self.norm is None else self.norm.key
        out = "" if self.out_dtype is None else DTYPE_NAMES[self.out_dtype]
        parts = (
            self.activation.key,
            self.placement.value,
            self.layout.key,
            norm,
            out,
            self.backend,
            "" if self.format is None else self.format.key,
            "recompute" if self.recompute else "",
            "" if self.row_format is None else self.row_format.key,
        )
        return "|".join(parts)

    @staticmethod
    def parse(text: str) -> "Options":
        """Return the options that ``text`` spells."""
        return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Options:
    activation, placement, layout, norm, out, backend, stored, recompute, rows = text.split("|")
    return Options(
        Activation.parse(activation),
        ProbPlacement(placement),
        Layout.parse(layout),
        PostExpertNorm(eps=float(norm)) if norm else None,
        DTYPES[out] if out else None,
        backend,
        FormatPair.parse(stored) if stored else None,
        bool(recompute),
        WeightFormat.parse(rows) if rows else None,
    )
